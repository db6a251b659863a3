//! Kernels for NVIDIA Hopper, and the host layer that launches them.
//!
//! ```text
//! Kernel -> PTX -> the driver's compiler -> Function -> launch(stream, grid, arguments)
//! ```
//!
//! [`kernels`] are programs of [`fa3_ir`], which a simulator runs as well; [`sass`] and [`JitReport`] read what compilers made of
//! them. None of these needs a driver, and without the feature `driver`, which is on by default, nothing else is built.
//!
//! [`host`] is that feature. It needs the NVIDIA driver and nothing else, and that only when it runs: no CUDA to build, and an error
//! value where there is no driver or no Hopper GPU.
//!
//! The feature `cudarc` adds the forward pass over slices of that crate, and shows its version.

mod report;

pub mod kernels;

#[cfg(feature = "driver")]
pub mod host;

pub mod sass;

pub use report::{JitReport, JitWarning};

#[cfg(feature = "cudarc")]
pub use cudarc;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
