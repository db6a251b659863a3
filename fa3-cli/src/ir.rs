//! `fa3 ir`: a kernel for the reader.

use fa3_cuda::kernels::catalogue::CatalogueError;

use crate::kernel::{self, KernelArgs};

/// What `fa3 ir --help` says first.
pub(crate) const ABOUT: &str = "\
Prints a kernel: parameters, shared memory, barriers, then every statement with the line of Rust that built it. What takes \
several launches prints each of their kernels once.";

const EXAMPLES: &str = "\
Examples:
  fa3 ir vector_add
  fa3 ir gemm --dtype f16";

/// Options of `fa3 ir`.
#[derive(Debug, clap::Args)]
#[command(after_help = kernel::help(EXAMPLES))]
pub(crate) struct Options {
    #[command(flatten)]
    kernel: KernelArgs,
}

/// Prints. True: there is nothing to check.
///
/// # Errors
/// A kernel that the catalogue does not have.
pub(crate) fn run(options: &Options) -> Result<bool, CatalogueError> {
    for kernel in kernel::distinct(options.kernel.program()?) {
        crate::print(&kernel.to_string().trim_end());
    }
    Ok(true)
}
