//! The suite's own kernels on a GPU.

use fa3_cuda::host::{Device, HostError};
use fa3_cuda::kernels::Job;

/// The bytes of a job's arrays after it has run on `device`; they begin as `initial`.
///
/// # Errors
/// What the driver says.
#[allow(unsafe_code, reason = "a kernel gets plain addresses")]
pub fn run(device: &Device, job: &Job, initial: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, HostError> {
    // SAFETY: the jobs are the suite's own and the catalogue's, whose kernels stay within the arrays that the job lists.
    unsafe { device.run(job, initial) }
}
