//! The suite's own kernels on a GPU.

use fa3_cuda::host::{Device, HostError};
use fa3_ir::{Kernel, Program};

/// The bytes of a program's buffers after it has run on `device`; they begin as `initial`.
///
/// # Errors
/// What the driver says.
#[allow(unsafe_code, reason = "a kernel gets plain addresses")]
pub fn run(
    device: &Device,
    program: &Program<Kernel>,
    initial: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, HostError> {
    // SAFETY: the programs are the suite's own and the ladder's, whose kernels stay within the buffers that they list.
    unsafe { device.run(program, initial) }
}
