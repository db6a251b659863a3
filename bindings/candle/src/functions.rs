//! The functions of candle-flash-attn, with its names and signatures.
#![allow(clippy::too_many_arguments, reason = "candle-flash-attn's signatures")]

use candle_core::{Result, Tensor};
use fa3::problem::TensorName;

use crate::error::Error;
use crate::rows::List;
use crate::{Attention, Cached, Packed};

/// Attention: `softmax(softmax_scale · Q Kᵀ) V`, in which a query sees all keys or, with `causal`, no key after its own
/// position. The last query is aligned with the last key.
///
/// Q is (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim), V (batch, seqlen_k, heads_kv,
/// head_dim_v), and the result (batch, seqlen_q, heads_q, head_dim_v). heads_q is a multiple of heads_kv. This is a
/// short form of [`Attention`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// let q = Tensor::randn(0f32, 1., (1, 100, 8, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let kv = Tensor::randn(0f32, 1., (1, 120, 2, 64), &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let o = fa3_candle::flash_attn(&q, &kv, &kv, 1. / 64f32.sqrt(), true)?;
/// assert_eq!(o.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// The errors of [`Attention::forward`].
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    windowed(softmax_scale, None, causal.then_some(0)).forward(q, k, v)
}

/// Attention in which a query sees at most `window_size_left` keys before its own position and `window_size_right`
/// after it; `None` is unbounded, and `(None, Some(0))` is causal. Everything else is as in [`flash_attn`].
///
/// # Errors
/// The errors of [`Attention::forward`].
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    windowed(softmax_scale, window_size_left, window_size_right).forward(q, k, v)
}

/// Attention with a soft cap: scaled scores s become softcap · tanh(s / softcap). A cap of 0 means no cap. Everything
/// else is as in [`flash_attn_windowed`].
///
/// # Errors
/// Slopes are given, which no kernel here supports; otherwise as in [`Attention::forward`].
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    refuse(alibi_slopes)?;
    capped(windowed(softmax_scale, window_size_left, window_size_right), softcap).forward(q, k, v)
}

/// Attention of packed sequences: Q is (total_q, heads_q, head_dim), K (total_k, heads_kv, head_dim), V (total_k,
/// heads_kv, head_dim_v), and the result (total_q, heads_q, head_dim_v). Sequence i is rows `seqlens_q[i] ..
/// seqlens_q[i + 1]` of Q and rows `seqlens_k[i] .. seqlens_k[i + 1]` of K and V, and sees itself alone. The lists are
/// u32 or i32. See [`Packed`] for `max_seqlen_q` and `max_seqlen_k`. Everything else is as in [`flash_attn`].
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// // Three sequences of 30, 50 and 20 rows.
/// let x = Tensor::randn(0f32, 1., (100, 2, 64), &Device::Cpu)?;
/// let seqlens = Tensor::new(&[0u32, 30, 80, 100], &Device::Cpu)?;
/// let o = fa3_candle::flash_attn_varlen(&x, &x, &x, &seqlens, &seqlens, 50, 50, 0.125, true)?;
/// assert_eq!(o.dims(), x.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// As in [`Packed::new`] and [`Attention::forward_varlen`].
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let packed = Packed::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    windowed(softmax_scale, None, causal.then_some(0)).forward_varlen(q, k, v, &packed)
}

/// Attention of packed sequences (see [`flash_attn_varlen`]) in a window (see [`flash_attn_windowed`]).
///
/// # Errors
/// As in [`Packed::new`] and [`Attention::forward_varlen`].
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let packed = Packed::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    windowed(softmax_scale, window_size_left, window_size_right).forward_varlen(q, k, v, &packed)
}

/// Attention of packed sequences (see [`flash_attn_varlen`]) in a window and with a soft cap (see
/// [`flash_attn_alibi_windowed_softcap`]).
///
/// # Errors
/// Slopes are given, which no kernel here supports; otherwise as in [`Packed::new`] and [`Attention::forward_varlen`].
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    refuse(alibi_slopes)?;
    let packed = Packed::new(seqlens_q, seqlens_k, max_seqlen_q, max_seqlen_k)?;
    let attention = windowed(softmax_scale, window_size_left, window_size_right);
    capped(attention, softcap).forward_varlen(q, k, v, &packed)
}

/// Attention of packed queries over keys and values in pages, in a window (see [`flash_attn_windowed`]) and with an
/// optional soft cap. K and V are (blocks, page_block_size, heads_kv, head_dim). Row i of `block_table` (sequences,
/// blocks), u32 or i32, lists the blocks of sequence i in order. `seqlens_k` gives the number of rows of each sequence:
/// `seqlens_k[i + 1] - seqlens_k[i]`.
///
/// It is a short form of [`Attention::forward_cached`]: pages are read where they lie in memory, and there are no
/// gradients. On a GPU, the host reads `seqlens_k` if it is i32.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// // A new token for each of two sequences, which have 20 and 5 rows in 4 blocks of 16.
/// let q = Tensor::randn(0f32, 1., (2, 4, 64), &Device::Cpu)?;
/// let pool = Tensor::randn(0f32, 1., (4, 16, 2, 64), &Device::Cpu)?;
/// let table = Tensor::new(&[[3u32, 1], [0, 0]], &Device::Cpu)?;
/// let seqlens = |ends: [u32; 3]| Tensor::new(&ends, &Device::Cpu);
/// let (of_q, of_k) = (seqlens([0, 1, 2])?, seqlens([0, 20, 25])?);
/// let o = fa3_candle::flash_attn_varlen_paged_windowed(
///     &q, &pool, &pool, &of_q, &of_k, &table, None, 1, 20, 0.125, None, Some(0), 16, None,
/// )?;
/// assert_eq!(o.dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// `mm_prefix_ranges` are given, which no kernel here supports; blocks have other sizes; or the errors of [`Cached`]
/// and [`Attention::forward_cached`].
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if let Some(ranges) = mm_prefix_ranges {
        return Err(Error::PrefixRanges { shape: ranges.shape().clone() }.into());
    }
    for (tensor, x) in [(TensorName::K, k), (TensorName::V, v)] {
        if x.rank() != 4 || x.dims()[1] != page_block_size {
            return Err(Error::Pages { tensor, shape: x.shape().clone(), page_rows: page_block_size }.into());
        }
    }
    let lengths = List::ends("seqlens_k", seqlens_k)?.lengths()?;
    let cached = Cached::new(&lengths, max_seqlen_k)?.page_table(block_table)?;
    let cached = cached.packed_queries(seqlens_q, max_seqlen_q)?;
    let attention = windowed(softmax_scale, window_size_left, window_size_right);
    capped(attention, softcap.unwrap_or(0.)).forward_cached(q, k, v, &cached)
}

/// Defines those functions of candle-flash-attn that always take ALiBi slopes.
macro_rules! refusing {
    ($($name:ident($($argument:ident: $type:ty),+);)+) => {$(
        /// Refuses `alibi_slopes`, which no kernel here supports. The function exists so that programs that call it
        /// still compile.
        ///
        /// # Errors
        /// Always.
        pub fn $name(
            _q: &Tensor,
            _k: &Tensor,
            _v: &Tensor,
            alibi_slopes: &Tensor,
            $($argument: $type),+
        ) -> Result<Tensor> {
            refused(alibi_slopes)
        }
    )+};
}

refusing! {
    flash_attn_alibi(_softmax_scale: f32, _causal: bool);
    flash_attn_alibi_windowed(
        _softmax_scale: f32, _window_size_left: Option<usize>, _window_size_right: Option<usize>
    );
    flash_attn_varlen_alibi(
        _seqlens_q: &Tensor, _seqlens_k: &Tensor, _max_seqlen_q: usize, _max_seqlen_k: usize,
        _softmax_scale: f32, _causal: bool
    );
    flash_attn_varlen_alibi_windowed(
        _seqlens_q: &Tensor, _seqlens_k: &Tensor, _max_seqlen_q: usize, _max_seqlen_k: usize,
        _softmax_scale: f32, _window_size_left: Option<usize>, _window_size_right: Option<usize>
    );
}

fn windowed(softmax_scale: f32, left: Option<usize>, right: Option<usize>) -> Attention {
    Attention::new(softmax_scale).window(left, right)
}

fn capped(attention: Attention, softcap: f32) -> Attention {
    if softcap == 0. { attention } else { attention.softcap(softcap) }
}

/// # Errors
/// [`Error::AlibiSlopes`] if there are slopes.
fn refuse(alibi_slopes: Option<&Tensor>) -> Result<()> {
    alibi_slopes.map_or(Ok(()), |slopes| refused(slopes).map(drop))
}

fn refused(slopes: &Tensor) -> Result<Tensor> {
    Err(Error::AlibiSlopes { shape: slopes.shape().clone() }.into())
}
