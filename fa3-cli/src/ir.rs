//! `fa3 ir`: prints a kernel's statements.

use std::error::Error;

use crate::console;
use crate::kernel::{self, KernelArgs};

pub(crate) const ABOUT: &str = "\
Prints a kernel: parameters, shared memory, barriers, then every statement with the line of Rust that built it. If \
there are several launches, each of their kernels is printed once.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 ir vector_add
  fa3 ir gemm --dtype f16
  fa3 ir forward --causal --softcap 30")]
pub(crate) struct Options {
    #[command(subcommand)]
    kernel: KernelArgs,
}

/// Prints the kernels. Always true, since nothing is checked.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    for kernel in kernel::distinct(options.kernel.program()?) {
        console::print(&kernel.to_string().trim_end());
    }
    Ok(true)
}
