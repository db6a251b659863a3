//! Errors of the host layer.

use std::fmt;

use cudarc::driver::sys::CUresult;
use fa3_ir::{ArgError, BoxShape, TensorView};

use super::LaunchInfo;

/// The errors of the host layer.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum HostError {
    #[error("no nvidia driver: libcuda cannot be loaded")]
    NoDriver,
    #[error("the nvidia driver is for cuda {major}.{minor}, not 12.0 or newer")]
    DriverTooOld { major: u32, minor: u32 },
    #[error("no device {ordinal}: the driver has {count}")]
    NoDevice { ordinal: u32, count: u32 },
    #[error("device {name} has compute capability {major}.{minor}, the kernels need 9.0")]
    NotHopper { name: String, major: u32, minor: u32 },
    #[error("{call}: {error}")]
    Driver { call: &'static str, error: CudaError },
    #[error("{bytes} bytes of device memory: {free} of {total} are free")]
    OutOfMemory { bytes: usize, free: usize, total: usize },
    #[error("{given} bytes for a buffer of {bytes}")]
    BufferSize { given: usize, bytes: usize },
    #[error("memory and stream belong to different devices")]
    OtherDevice,
    #[error("kernel {kernel} is not sound: {}", faults.join("; "))]
    Unsound { kernel: String, faults: Vec<String> },
    #[error("{given} buffers for a program of {expected}")]
    Buffers { given: usize, expected: usize },
    #[error("a program with {given} bytes of tile counters, a workspace has {limit}")]
    Tickets { given: usize, limit: usize },
    #[error("kernel {kernel} is not compiled: {error}\n{log}")]
    Compile { kernel: String, error: CudaError, log: String },
    #[error("kernel {kernel}: {call}: {error}")]
    Kernel { kernel: String, call: &'static str, error: CudaError },
    #[error("kernel {kernel} takes {given} bytes of shared memory, the device has {limit}")]
    SharedMemory { kernel: String, given: u32, limit: u32 },
    #[error("kernel {kernel}: {error}")]
    Args { kernel: String, error: Box<ArgError> },
    #[error("kernel {kernel}: tensor map {param}: {error} for {map}")]
    TensorMap { kernel: String, param: String, error: CudaError, map: Box<RejectedMap> },
    #[error("launch of {launch}: {error}")]
    Launch { launch: Box<LaunchInfo>, error: CudaError },
    #[error("the device is lost: {by}")]
    Poisoned { by: Box<Poison> },
}

/// A tensor map that the driver would not encode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectedMap {
    /// The part that the kernel fixes.
    pub shape: BoxShape,
    /// The part that the launch gives.
    pub view: TensorView,
}

impl fmt::Display for RejectedMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TensorView { address, dims, strides } = &self.view;
        write!(f, "{} of {dims:?} elements at {address:#x}, strides {strides:?} bytes", self.shape)
    }
}

/// An error code of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CudaError(CUresult);

impl CudaError {
    pub(super) fn new(result: CUresult) -> CudaError {
        CudaError(result)
    }

    /// The number.
    pub fn code(self) -> u32 {
        self.0 as u32
    }

    /// Whether the context is lost, so that every later call in it fails. For these errors the documentation of the
    /// driver API says that the process must be restarted before it can use CUDA again.
    pub fn is_sticky(self) -> bool {
        [
            CUresult::CUDA_ERROR_ECC_UNCORRECTABLE,
            CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE,
            CUresult::CUDA_ERROR_CONTAINED,
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            CUresult::CUDA_ERROR_LAUNCH_TIMEOUT,
            CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED,
            CUresult::CUDA_ERROR_ASSERT,
            CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR,
            CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION,
            CUresult::CUDA_ERROR_MISALIGNED_ADDRESS,
            CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE,
            CUresult::CUDA_ERROR_INVALID_PC,
            CUresult::CUDA_ERROR_LAUNCH_FAILED,
            CUresult::CUDA_ERROR_TENSOR_MEMORY_LEAK,
            CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED,
            CUresult::CUDA_ERROR_EXTERNAL_DEVICE,
        ]
        .contains(&self.0)
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} ({})", self.0, self.code())
    }
}

/// The error that broke a device, and its suspects.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Poison {
    /// The sticky error.
    pub error: CudaError,
    /// The call that found it, some time after the kernel that caused it.
    pub call: &'static str,
    /// The launches that may have caused it, oldest first: at most the last 8, without those launches that a
    /// synchronisation of their stream has shown to be correct. Empty if none of this device's launches caused it.
    pub suspects: Vec<LaunchInfo>,
}

impl fmt::Display for Poison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} found it, {}, ", self.call, self.error)?;
        let launches: Vec<String> = self.suspects.iter().map(LaunchInfo::to_string).collect();
        match launches.len() {
            0 => write!(f, "but no launch of this library was under way"),
            1 => write!(f, "after the launch of {}", launches[0]),
            count => write!(f, "after {count} launches: {}", launches.join("; ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(kernel: &str, grid: u32) -> LaunchInfo {
        LaunchInfo { kernel: kernel.into(), grid: [grid, 1, 1], threads: 384, smem_bytes: 1024, cluster: 2 }
    }

    /// A context survives bad arguments and full memory, but no error of a running kernel.
    #[test]
    fn errors_of_running_kernels_are_sticky() {
        let sticky = |code| CudaError::new(code).is_sticky();
        assert!(sticky(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) && sticky(CUresult::CUDA_ERROR_LAUNCH_FAILED));
        assert!(
            sticky(CUresult::CUDA_ERROR_EXTERNAL_DEVICE)
                && sticky(CUresult::CUDA_ERROR_MPS_CLIENT_TERMINATED)
        );
        assert!(!sticky(CUresult::CUDA_ERROR_INVALID_VALUE) && !sticky(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
        assert!(!sticky(CUresult::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES));
    }

    #[test]
    fn a_poisoned_device_says_which_launches_may_have_done_it() {
        let error = CudaError::new(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        let text = |suspects| {
            let by = Box::new(Poison { error, call: "cuStreamSynchronize", suspects });
            HostError::Poisoned { by }.to_string()
        };
        let start = "the device is lost: cuStreamSynchronize found it, CUDA_ERROR_ILLEGAL_ADDRESS (700), ";
        let one = "fwd, 4 x 1 x 1 ctas of 384 threads, 1024 bytes of shared memory, clusters of 2";
        assert_eq!(text(vec![launch("fwd", 4)]), format!("{start}after the launch of {one}"));
        assert!(text(vec![launch("fwd", 4), launch("bwd", 8)]).contains("after 2 launches: fwd, 4 x"));
        assert!(text(vec![]).ends_with("but no launch of this library was under way"));
    }
}
