//! FlashAttention-3 for NVIDIA Hopper in [candle](candle_core), with gradients.
//!
//! The functions have candle-flash-attn's names and signatures: [`flash_attn`], [`flash_attn_windowed`],
//! [`flash_attn_varlen`] and others. [`Attention`] has all options in one place, including sinks. It returns LSE as
//! well, and computes over a KV cache ([`Cached`]), as decoding needs it.
//!
//! Tensors on the CPU are computed there, in f16, bf16 and f32. With the feature `cuda`, tensors on an H100 or H200 are
//! computed there, in f16 and bf16, on candle's own stream. They are not copied if the last stride is 1 and the others
//! are multiples of 8.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//!
//! // (batch, seqlen, heads, head_dim); four query heads share one key/value head
//! let q = Var::randn(0f32, 1., (1, 100, 8, 64), &Device::Cpu)?;
//! let k = Var::randn(0f32, 1., (1, 100, 2, 64), &Device::Cpu)?;
//! let v = Var::randn(0f32, 1., (1, 100, 2, 64), &Device::Cpu)?;
//! let o = fa3_candle::flash_attn(&q, &k, &v, 0.125, true)?;
//! let gradients = o.sqr()?.mean_all()?.backward()?;
//! assert_eq!(gradients.get(&k).unwrap().dims(), k.dims());
//! # Ok::<(), candle_core::Error>(())
//! ```
//!
//! A wrong call is an error that says why, with the numbers:
//!
//! ```
//! # use candle_core::{DType, Device, Tensor};
//! let tensor = |heads| Tensor::zeros((1, 8, heads, 64), DType::F32, &Device::Cpu);
//! let error = fa3_candle::flash_attn(&tensor(8)?, &tensor(3)?, &tensor(3)?, 0.125, false).unwrap_err();
//! assert!(error.to_string().starts_with("heads_q 8 is not a multiple of heads_kv 3"));
//! # Ok::<(), candle_core::Error>(())
//! ```

mod attention;
mod cached;
mod call;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod functions;
mod op;
mod packed;
mod rows;

pub use attention::Attention;
pub use cached::Cached;
pub use functions::{
    flash_attn, flash_attn_alibi, flash_attn_alibi_windowed, flash_attn_alibi_windowed_softcap,
    flash_attn_varlen, flash_attn_varlen_alibi, flash_attn_varlen_alibi_windowed,
    flash_attn_varlen_alibi_windowed_softcap, flash_attn_varlen_paged_windowed, flash_attn_varlen_windowed,
    flash_attn_windowed,
};
pub use packed::Packed;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
