//! Kernels for NVIDIA Hopper, and the host layer that launches them.
//!
//! ```text
//! Kernel -> PTX -> the driver's compiler -> Function -> launch(stream, grid, arguments)
//! ```
//!
//! The host layer needs the NVIDIA driver and nothing else, and that only when it runs: no CUDA to build, and an error
//! value where there is no driver or no Hopper GPU.
//!
//! ```
//! use fa3_cuda::host::{Device, HostError};
//! use fa3_ir::{ArgValue, B32, Elem, Kernel, Launch, ptx};
//!
//! // x = x + 1, one element a thread.
//! let kernel = Kernel::build("increment", Launch::threads(32), |b| {
//!     let x = b.param_pointer("x", Elem::U32);
//!     let at = b.tid().mad_wide(4, x);
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

pub mod kernels;

pub mod host;

pub mod sass;

pub use cudarc;
