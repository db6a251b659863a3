//! Calls of fa3's operations over named tensors, as bindings to other languages get them.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//!
//! y = x, rotated by its position, times M               M = diag(±1) · Hadamard
//! codes = e4m3(y / scale)                               scale = max |y| / 448 of each block of rows of a head
//! ```
//!
//! In place of a block of rows, a group of heads or the tensor may have the scale. With per-channel scales, y = x -
//! mean of its channel, and each channel has a scale.
//!
//! A binding has two traits to implement: [`Given`] finds its tensors by their names, and [`Values`] its options. An
//! operation is a type with the trait [`Call`]: [`Call::numbers`] reads its options, [`Call::given`] its tensors.
//! Together they determine the call's problem and plan. [`CpuCall`] computes it on the CPU. A tensor is a type of
//! elements, a shape, strides and an address in the memory of a GPU or of the CPU.

// Arguments of a call, and the reasons for refusing them.
mod caught;
mod error;
mod options;
mod place;
mod tensor;
mod tensors;

// The operations.
mod attention;
mod cached;
mod call;
mod combine;
mod fp8;
mod gradients;
mod quantize;
mod table;

// Where they are computed.
mod cpu;
mod devices;

pub use attention::{Attention, Bits, Numbers};
pub use cached::Cached;
pub use call::{At, Call};
pub use caught::caught;
pub use combine::Combination;
pub use cpu::{CpuCall, Memory, threads};
pub use devices::{open_device, use_archive};
pub use error::{Error, ErrorKind};
pub use fp8::Fp8Attention;
pub use gradients::Gradients;
pub use options::{Bounds, Options, Values};
pub use place::Place;
pub use quantize::{Quantization, Scales};
pub use table::Table;
pub use tensor::{Access, DIMS, Element, Tensor};
pub use tensors::{Given, Tensors};
