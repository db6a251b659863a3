//! Kernels for NVIDIA Hopper, and the host layer that launches them.
//!
//! ```text
//! Kernel -> PTX -> the driver's compiler -> Function -> launch(stream, grid, arguments)
//! ```
//!
//! [`kernels`] are programs of [`fa3_ir`], which a simulator runs as well. [`sass`] and [`JitReport`] read the output
//! of compilers. These modules need no driver. Without the feature `driver`, which is on by default, nothing else is
//! built.
//!
//! [`host`] is the feature `driver`. It builds without CUDA and needs the NVIDIA driver only at run time. Without a
//! driver or a Hopper GPU, it returns an error value.
//!
//! The feature `cudarc` adds the forward pass over slices of the crate cudarc, whose version is then part of the
//! interface.

mod archive;
mod report;

pub mod kernels;

#[cfg(feature = "driver")]
pub mod host;

pub mod sass;

pub use archive::{Archive, ArchiveError};
pub use report::{JitReport, JitWarning};

#[cfg(feature = "cudarc")]
pub use cudarc;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
