//! `fa3 kernels`: all kernels and what they take.

mod compile;
mod count;

use fa3_cuda::host::HostError;
use fa3_cuda::kernels::Job;
use fa3_cuda::kernels::catalogue::{self, CatalogueError};
use fa3_ir::Ptx;

use crate::ptx::{self, Unsound};
use crate::table::Table;
use compile::{CompileError, Compiler};
use count::Count;

/// What `fa3 kernels --help` says first.
pub(crate) const ABOUT: &str = "\
Lists all kernels, a row each and dtype: threads of a CTA, registers that roles take by setmaxnreg, bytes of shared memory, \
statements, matrix products (wgmma), tensor and bulk copies (TMA), arrivals and waits at barriers (all as written, not as often \
as executed), bytes of PTX.

Then what ptxas says, if $PTXAS names one or the path has one: registers at entry, bytes spilled, warnings, and milliseconds. \
With --gpu the same of the driver's compiler; what the driver has in its cache it says nothing of (CUDA_CACHE_DISABLE=1 turns that \
off).";

/// Options of `fa3 kernels`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 kernels
  PTXAS=/usr/local/cuda/bin/ptxas fa3 kernels --gpu

Exit code: 0, or 1 if a compiler spills or warns, or 2 if it rejects a kernel.")]
pub(crate) struct Options {
    /// Compiles them with the driver of GPU 0, too
    #[arg(long)]
    gpu: bool,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages are the sources'")]
pub(crate) enum Error {
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    #[error(transparent)]
    Unsound(#[from] Unsound),
    #[error(transparent)]
    Compile(#[from] CompileError),
    #[error(transparent)]
    Driver(#[from] HostError),
}

/// Lists. False if a compiler spills or warns.
///
/// # Errors
/// See [`Error`].
pub(crate) fn run(options: &Options) -> Result<bool, Error> {
    let compilers = Compiler::installed(options.gpu)?;
    let mut rows = vec![heads(compilers.len())];
    let (mut notes, mut clean) = (Vec::new(), true);
    for job in jobs()? {
        let ptx = ptx::emit(&job, false)?;
        let mut row = facts(&job, &ptx);
        for compiler in &compilers {
            let Ok(compiler) = compiler else {
                row.extend(["-"; 4].map(str::to_owned));
                continue;
            };
            let compiled = compiler.compile(&ptx)?;
            row.extend(compiled.cells());
            if let Some(report) = compiled.report {
                clean &= report.is_clean();
                notes.extend(report.warnings.iter().map(|warning| format!("{}: {warning}", ptx.entry)));
            }
        }
        rows.push(row);
    }
    crate::print(&Table { rows, left: 3 });
    crate::print(&"");
    for compiler in &compilers {
        crate::print(&match compiler {
            Ok(compiler) => compiler.describe(),
            Err(why) => format!("skipped: {why}"),
        });
    }
    notes.iter().for_each(crate::print);
    Ok(clean)
}

/// Every kernel with every dtype.
fn jobs() -> Result<Vec<Job>, CatalogueError> {
    let jobs = catalogue::ALL.iter().map(catalogue::Entry::jobs).collect::<Result<Vec<_>, _>>()?;
    Ok(jobs.into_iter().flatten().collect())
}

/// The heads of the columns, four for each compiler.
fn heads(compilers: usize) -> Vec<String> {
    let facts =
        ["kernel", "dtype", "setmaxnreg", "threads", "smem", "stmts", "wgmma", "tma", "barrier", "ptx"];
    let verdict = [["regs", "spills", "warns", "ms"], ["gpu regs", "spills", "warns", "ms"]];
    let heads = facts.into_iter().chain(verdict.into_iter().take(compilers).flatten());
    heads.map(str::to_owned).collect()
}

/// What is known of a kernel without a compiler.
fn facts(job: &Job, ptx: &Ptx) -> Vec<String> {
    let Count { statements, products, copies, barriers } = Count::of(&job.kernel);
    let elem = job.arrays.first().map(|array| array.elem.to_string());
    let dash = || "-".to_owned();
    let names =
        [ptx.entry.clone(), elem.unwrap_or_else(dash), count::registers(&job.kernel).unwrap_or_else(dash)];
    let numbers = [ptx.threads, ptx.smem_bytes, statements, products, copies, barriers];
    let numbers = numbers.map(|number| number.to_string());
    names.into_iter().chain(numbers).chain([ptx.text.len().to_string()]).collect()
}
