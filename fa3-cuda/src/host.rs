//! The host layer: all code that calls the NVIDIA driver.
//!
//! A [`Device`] holds the primary context of a GPU, which other CUDA libraries of the process use as well.
//! [`Device::compile`] turns a [`Ptx`](fa3_ir::Ptx) into a [`Function`], once. [`Function::launch`] checks the
//! arguments against the kernel's parameters, encodes tensor maps and launches the kernel on a [`Stream`]. A
//! [`Forward`] is the forward pass of a problem, planned and compiled; each further run is one launch.
//!
//! libcuda is loaded at run time. Without it, [`Device::open`] returns an error, and nothing else can be called.
//!
//! Errors of the GPU come late and are final. When a kernel accesses a wrong address, a later call reports the error,
//! and the process cannot use the GPU any more. From then on every call on the device, and on objects made from it,
//! returns [`HostError::Poisoned`], which names the launches that may have caused it. `CUDA_LAUNCH_BLOCKING=1` finds
//! the launch.
//!
//! ```
//! use fa3_cuda::host::{Device, HostError};
//! use fa3_ir::{ArgValue, Elem, Kernel, Launch, ptx};
//! use fa3_ir::lang::B32;
//!
//! // x = x + 1, one element a thread.
//! let kernel = Kernel::build("increment", Launch::threads(32), |b| {
//!     let at = b.tid().mad_wide(4, b.param_pointer("x", Elem::U32));
//!     b.store(at, b.load::<B32>(at) + 1);
//! });
//! let ptx = ptx::emit(&kernel).expect("a sound kernel");
//!
//! let run = || -> Result<Vec<u32>, HostError> {
//!     let device = Device::open(0)?;
//!     let (stream, function) = (device.stream()?, device.compile(&ptx)?);
//!     let mut x = device.alloc(4 * 32)?;
//!     x.upload(&stream, &[41_u32; 32])?;
//!     // SAFETY: x has the 32 elements that 32 threads touch, and lives until it is downloaded.
//!     unsafe { function.launch(&stream, [1, 1, 1], &[ArgValue::Pointer(x.address())]) }?;
//!     x.download(&stream)
//! };
//! match run() {
//!     Ok(x) => assert_eq!(x, [42; 32]),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```
#![allow(unsafe_code, reason = "every call of the driver is unsafe")]

// The GPU and its errors.
mod context;
mod device;
mod driver;
mod error;

// Kernels.
mod function;
mod launch;
mod module;
mod params;
mod tensor_map;

// The memory of kernels and their launches.
mod buffer;
mod event;
mod graph;
mod host_buffer;
mod run;
mod stream;

// Operations: compiled programs.
mod cache;
mod compiled;
mod forward_table;
mod keyed_mutex;
mod operation_error;
mod operations;
mod placement;
mod plan_cache;
mod planned;
mod prepared;
#[cfg(feature = "cudarc")]
mod slices;
mod tensors;
mod workspace;

pub use buffer::DeviceBuffer;
pub use compiled::{Compiled, Operation};
pub use device::{Device, Memory};
pub use driver::is_driver_present;
pub use error::{CudaError, HostError, Poison};
pub use event::Event;
pub use forward_table::ForwardTable;
pub use function::{Function, Origin};
pub use graph::Graph;
pub use host_buffer::HostBuffer;
pub use keyed_mutex::{KeyedMutex, Lease};
pub use launch::LaunchInfo;
pub use operation_error::OperationError;
pub use operations::{Append, Backward, CachedForward, Combine, Forward, Fp8Forward, Quantize};
pub use placement::PlacementError;
pub use plan_cache::PlanCache;
pub use planned::WorkspaceLayout;
#[cfg(feature = "cudarc")]
pub use slices::Element;
pub use stream::Stream;
pub use tensor_map::TiledMap;
pub use tensors::Tensors;
pub use workspace::Workspace;
