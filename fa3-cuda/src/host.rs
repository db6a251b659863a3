//! The host layer: everything that talks to the NVIDIA driver.
//!
//! A [`Device`] holds the primary context of a GPU, the one that other CUDA libraries of the process use, too.
//! [`Device::compile`] turns a [`Ptx`](fa3_ir::Ptx) into a [`Function`], once; [`Function::launch`] checks the
//! arguments against the kernel's parameters, encodes tensor maps and puts the kernel on a [`Stream`].
//! A [`Forward`] is the forward pass of a problem, planned and compiled; running it again and again is a launch each.
//! libcuda is loaded at run time: without one, [`Device::open`] is an error and nothing else can be called.
//!
//! Errors of the GPU come late and for good: when a kernel touches a wrong address, a later call finds out, and the
//! GPU is lost to the process. From then on every call on the device and what was made from it is a
//! [`HostError::Poisoned`] that says which launches may have done it. To know the one, set `CUDA_LAUNCH_BLOCKING=1`.
#![allow(unsafe_code, reason = "every call of the driver is unsafe")]

// The GPU and what can go wrong.
mod context;
mod device;
mod driver;
mod error;

// Kernels.
mod function;
mod launch;
mod module;
mod params;
mod report;
mod tensor_map;

// What they work on.
mod buffer;
mod graph;
mod run;
mod stream;

// Attention.
mod counters;
mod forward;
mod prepared;

pub use buffer::{DeviceBuffer, Plain};
pub use device::{Device, Memory};
pub use driver::is_driver_present;
pub use error::{CudaError, HostError, Poison};
pub use forward::{Element, Forward, ForwardError};
pub use function::Function;
pub use graph::Graph;
pub use launch::LaunchInfo;
pub use report::{JitReport, JitWarning};
pub use stream::{Event, Stream};
