//! Kernels as programs of [`fa3_ir`]: nothing here needs a driver.

pub mod append;
pub mod bwd;
pub mod cached;
pub mod combine;
pub mod fp8;
pub mod fwd;
pub mod ladder;
pub mod packed;
mod params;
pub mod parts;
pub mod quantize;
pub mod shipped;
mod spec;
mod tensors;
mod usual;

pub use spec::{KernelSpec, Spec};
pub use usual::usual;
