//! FlashAttention-3 for NVIDIA Hopper, in Rust.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! [`Attention`] describes the computation, [`Device`] the place:
//!
//! - on the CPU: every dtype, mask and layout, and gradients of all but e4m3;
//! - on a Hopper GPU: the problems that its kernels take.
//!
//! [`Device::best`] is the GPU, if one is usable. For tensors that are already on the GPU, see [`cuda`], and for
//! engines [docs/for-engines.md](https://github.com/fa3-rs/fa3/blob/main/docs/for-engines.md).
//!
#![cfg_attr(feature = "cuda", doc = "```")]
#![cfg_attr(not(feature = "cuda"), doc = "```ignore")]
//! use fa3::half::bf16;
//! use fa3::ndarray::Array4;
//! use fa3::{Attention, Device};
//!
//! // (batch, seqlen, heads, head_dim); two query heads share one key/value head
//! let q = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| bf16::from_f32(((s + h + d) % 7) as f32));
//! let k = Array4::from_shape_fn((1, 120, 1, 64), |(_, s, _, d)| bf16::from_f32(((s * d) % 5) as f32));
//! let v = Array4::from_shape_fn((1, 120, 1, 64), |(_, s, _, d)| bf16::from_f32((s + d) as f32));
//!
//! let (device, no_gpu) = Device::best();
//! if let Some(why) = no_gpu {
//!     println!("on {device}: {why}");
//! }
//! let output = Attention::new(&q, &k, &v).causal().forward(&device)?;
//! assert_eq!(output.o.dim(), (1, 100, 2, 64));
//! assert_eq!(output.lse.dim(), (1, 2, 100));
//! # Ok::<(), fa3::Error>(())
//! ```
//!
//! Add these lines to your `Cargo.toml` if you run on the CPU without `--release`. Then the CPU engine is optimised,
//! and the rest of your program is not: a causal call of 1 x 1024 x 8 x 128 in bf16 takes 0.25 s in place of 8 s on two
//! cores.
//!
//! ```toml
//! [profile.dev.package]
//! fa3.opt-level = 3
//! ```
//!
//! [`Attention::backward`] computes the gradients of Q, K and V from the gradients of O and LSE. With
//! [`Attention::deterministic`] they are the same bits in every run on a GPU, as they always are on the CPU:
//!
//! ```
//! # use fa3::ndarray::Array4;
//! # use fa3::{Attention, Device};
//! # let q = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| ((s + h + d) % 7) as f32);
//! # let kv = Array4::from_shape_fn((1, 120, 1, 64), |(_, s, _, d)| ((s * d) % 5) as f32);
//! # let device = Device::Cpu;
//! let attention = Attention::new(&q, &kv, &kv).causal().deterministic();
//! let output = attention.forward(&device)?;
//! let dout = Array4::ones((1, 100, 2, 64)); // of the sum of O
//! let gradients = attention.backward(&device, &output, &dout)?;
//! assert_eq!(gradients.dq.dim(), (1, 100, 2, 64));
//! assert_eq!(gradients.dk.dim(), (1, 120, 1, 64)); // summed over the two query heads
//! # Ok::<(), fa3::Error>(())
//! ```
//!
//! An invalid problem is an error with the numbers, and so is a problem that the device cannot compute:
//!
//! ```
//! use fa3::ndarray::Array4;
//! use fa3::{Attention, Device};
//!
//! let (q, k) = (Array4::<f32>::zeros((1, 8, 8, 64)), Array4::<f32>::zeros((1, 8, 3, 64)));
//! let error = Attention::new(&q, &k, &k).forward(&Device::Cpu).unwrap_err();
//! assert_eq!(error.to_string(), "heads_q 8 is not a multiple of heads_kv 3");
//!
//! let latent = Attention::new(&q, &q, &q).qv(&q);
//! let output = latent.forward(&Device::Cpu)?;
//! let error = latent.backward(&Device::Cpu, &output, &q).unwrap_err();
//! assert_eq!(error.to_string(), "there are no gradients of attention with qv");
//! # Ok::<(), fa3::Error>(())
//! ```
//!
//! [`Attention::packed`] takes sequences of different lengths, one after the other (varlen). Each has the results and
//! the gradients that it has alone:
//!
//! ```
//! # use fa3::ndarray::{Array4, s};
//! # use fa3::{Attention, Device};
//! // Three sequences of 30, 50 and 20 rows
//! let x = Array4::from_shape_fn((1, 100, 2, 64), |(_, s, h, d)| ((7 * s + 3 * h + d) as f32).sin());
//! let ends = [0, 30, 80, 100];
//! let packed = Attention::new(&x, &x, &x).packed(&ends, &ends).causal();
//! let output = packed.forward(&Device::Cpu)?;
//!
//! let second = x.slice(s![.., 30..80, .., ..]);
//! let alone = Attention::new(second, second, second).causal().forward(&Device::Cpu)?;
//! assert_eq!(output.o.slice(s![.., 30..80, .., ..]), alone.o);
//!
//! let gradients = packed.backward(&Device::Cpu, &output, &Array4::ones((1, 100, 2, 64)))?;
//! assert_eq!(gradients.dv.dim(), (1, 100, 2, 64));
//! # Ok::<(), fa3::Error>(())
//! ```
//!
//! [`CachedAttention`] computes over a [`KvCache`], dense or in pages, and first appends the rows of new tokens, with
//! rotary embedding: a decoding loop.
//!
//! ```
//! # use fa3::half::bf16;
//! # use fa3::ndarray::Array4;
//! # use fa3::{CachedAttention, Device, KvCache, NewRows, Rope, RopeStyle};
//! let zeros = Array4::from_elem((1, 512, 2, 64), bf16::ZERO); // up to 512 tokens of one sequence
//! let mut cache = KvCache::dense(zeros.clone(), zeros);
//! let table = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0)?.table(512);
//! for token in 0..3 {
//!     let q = Array4::from_elem((1, 1, 8, 64), bf16::from_f32(token as f32));
//!     let kv = Array4::from_elem((1, 1, 2, 64), bf16::ONE);
//!     let new = NewRows::new(&kv, &kv).rotary(&table);
//!     let output = CachedAttention::new(&q).causal().append_forward(&Device::Cpu, &mut cache, &new)?;
//!     assert_eq!(output.o.dim(), (1, 1, 8, 64));
//! }
//! assert_eq!(cache.cache_seqlens, [3]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`Attention::qv`] and [`CachedAttention::qv`] compute latent attention (MLA), in which a token's latent vector is
//! its value and most of its key. The cache has a token once: V has its latent columns, K its rotated columns.
//!
//! ```
//! # use fa3::half::bf16;
//! # use fa3::ndarray::Array4;
//! # use fa3::{Attention, CachedAttention, Device, KvCache, NewRows};
//! # let wave = |tokens: usize, heads: usize, columns: usize| {
//! #     let at = |s: usize, h: usize, d: usize| bf16::from_f32(((7 * s + 3 * h + d) as f32).sin());
//! #     Array4::from_shape_fn((1, tokens, heads, columns), |(_, s, h, d)| at(s, h, d))
//! # };
//! // 16 query heads share 64 latent and 16 rotated columns
//! let zeros = |columns| Array4::from_elem((1, 128, 1, columns), bf16::ZERO);
//! let mut cache = KvCache::dense(zeros(16), zeros(64));
//! let (q, qv) = (wave(20, 16, 16), wave(20, 16, 64));
//! let (rotated, latent) = (wave(20, 1, 16), wave(20, 1, 64));
//! let new = NewRows::new(&rotated, &latent);
//! let output = CachedAttention::new(&q).qv(&qv).causal().append_forward(&Device::Cpu, &mut cache, &new)?;
//! assert_eq!(output.o.dim(), (1, 20, 16, 64));
//! // The same without a cache
//! assert_eq!(output, Attention::new(&q, &rotated, &latent).qv(&qv).causal().forward(&Device::Cpu)?);
//! # Ok::<(), fa3::Error>(())
//! ```
//!
//! [`Attention::fp8`] computes in 8 bits what is in 16. [`Quantize`] takes a tensor to e4m3, with rotary embedding and
//! incoherent processing on the way, and [`Attention::of_quantized`] takes such tensors with their scales. [`Combine`] merges partial results of attention over disjoint sets of keys.
//!
//! This crate re-exports what its interface mentions: [`Mask`], [`E4m3`], [`Rope`], the crates [`ndarray`] and
//! [`half`], and in [`problem`] what is computed as plain data. The layers below are crates of their own: `fa3-types` (what a problem is),
//! `fa3-ref` (the oracle and the error law), `fa3-quant` (FP8), `fa3-sched` (tiles, orders, plans), `fa3-cuda`
//! (kernels and the driver).
//!
//! Without the feature `cuda`, which is on by default, attention runs on the CPU only, and no
//! bindings to a driver are built.
#![forbid(unsafe_code)]

mod attention;
mod backward;
mod cache;
mod combine;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod error;
mod fp8;
mod gradients;
mod output;
pub mod problem;
mod quantize;
mod scalar;
mod scales;

pub use attention::Attention;
pub use cache::{CacheError, CacheView, CacheViewMut, CachedAttention, KvCache, NewRows};
pub use combine::{Combine, Combined};
pub use device::Device;
pub use error::Error;
pub use fp8::Fp8;
pub use gradients::{Gradients, OutputGradients};
pub use output::Output;
pub use quantize::{Quantize, Quantized};
pub use scalar::Scalar;

pub use fa3_quant::{E4m3, QuantError, Rope, RopeStyle, RopeTable};
pub use fa3_types::{Mask, Scaling};
pub use {half, ndarray};

/// The README's Rust code, as a test.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../README.md")]
struct Readme;
