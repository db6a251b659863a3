//! Attention and its gradients: beside candle's own operations in f32, and in every type the same bits as the crate
//! `fa3` computes, on the CPU and, if this is built with the feature `cuda`, on a GPU.

mod gpu;
mod reference;
mod refusals;
mod same_bits;
mod views;
