//! `fa3 archive`: compiled kernels in a file.

use std::error::Error;
use std::path::PathBuf;

use fa3_cuda::{Archive, kernels};
use fa3_ir::Ptx;
use rayon::prelude::*;

use crate::console;
use crate::progress;
use crate::ptx;
use crate::threads;
use crate::tools::{Assembled, Ptxas};
use crate::write;

pub(crate) const ABOUT: &str = "\
Compiles the kernels of usual calls with ptxas ($PTXAS, or the one on the path) and writes them to one file, from \
which a program loads a kernel in a millisecond. Without it the driver compiles each kernel for half a second when it \
is first needed, and keeps it on disk.

They are kernels of attention in bf16: training and prefill, dense and packed, with head dimensions 64, 128, 256 \
and 192 (V: 128), and decoding over a cache, also latent. Other kernels are compiled as before. So are all kernels \
if the driver is older than ptxas: kernels of ptxas 13 need a driver for CUDA 13.

The Python package loads kernels.sm_90a in its own folder. A Rust program gives the file to Device::with_archive.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 archive kernels.sm_90a
  PTXAS=/usr/local/cuda/bin/ptxas fa3 archive site-packages/fa3/kernels.sm_90a

Prints the kernels that spill or of which ptxas warns. Exit code: 0, or 1 if ptxas warns, or 2 without ptxas.")]
pub(crate) struct Options {
    /// The file to write
    file: PathBuf,
}

/// Writes the archive. False if ptxas warns of a kernel.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let [file] = write::open([Some(&*options.file)], &[])?;
    threads::start()?;
    let ptxas = Ptxas::find()?;
    let texts: Vec<Ptx> =
        kernels::usual().map(|spec| ptx::emit(&spec.kernel(), false)).collect::<Result<_, _>>()?;
    let bar = progress::late_bar(texts.len() as u64);
    let assembled = texts.par_iter().map(|text| ptxas.assemble(text).inspect(|_| bar.inc(1)));
    let assembled: Result<Vec<Assembled>, _> = assembled.collect();
    bar.finish_and_clear();
    let assembled = assembled?;
    let bytes = Archive::file(texts.iter().zip(assembled.iter().map(|kernel| &*kernel.cubin)));
    console::print(&format_args!("ptxas {}", ptxas.0.describe()));
    console::print(&format_args!("{} kernels, {} KiB", texts.len(), bytes.len() >> 10));
    let unclean = texts.iter().zip(&assembled).filter(|(_, kernel)| !kernel.report.is_clean());
    unclean.for_each(|(text, kernel)| console::print(&format_args!("{}: {}", text.entry, kernel.report)));
    write::write(file.map(|file| (file, bytes)))?;
    Ok(assembled.iter().all(|kernel| kernel.report.warnings.is_empty()))
}
