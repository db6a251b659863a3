#![doc = include_str!("../README.md")]

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
mod pass;
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
