//! Kernels as programs of [`fa3_ir`]: nothing here needs a driver.

pub mod catalogue;
pub mod fwd;
pub mod job;
pub mod ladder;
mod params;
mod parts;
pub mod shipped;

pub use job::{Array, ArrayUse, Job, JobArg};
