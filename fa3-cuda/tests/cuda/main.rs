//! Tests of kernels and programs through the crate's public items, in one binary, so that they link once.

mod archive;
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
