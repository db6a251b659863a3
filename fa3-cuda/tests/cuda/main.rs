//! Tests of kernels and programs by what the crate makes public. They are one binary, which links once.

mod budget;
mod bwd;
mod cached;
mod fwd;
#[cfg(feature = "driver")]
mod host;
mod interfaces;
mod ladder;
mod listed;
mod packed;
mod shipped;
