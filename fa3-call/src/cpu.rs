//! Calls on the CPU, which the crate `fa3` computes over the caller's memory.

mod attention;
mod cache;
mod call;
mod combine;
mod e4m3;
mod fp8;
mod gradients;
mod inputs;
mod lists;
mod memory;
mod quantize;
mod results;
mod rotary;
mod sparse;
mod threads;

pub use call::CpuCall;
pub use memory::Memory;
pub use threads::threads;
