//! Attention of candle's tensors, as a builder.

use candle_core::{Device, Result, Tensor};
use fa3::Mask;

use crate::Packed;
use crate::call::has_readable_rows;
use crate::error::Error;
use crate::op;

/// Attention, and what of it is not default. The functions of this crate are made of it.
///
/// ```text
/// O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
/// ```
///
/// Q is (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim), V (batch, seqlen_k, heads_kv,
/// head_dim_v); heads_q is a multiple of heads_kv, and query head h reads key/value head h / (heads_q / heads_kv).
/// They are f16, bf16 or, on the CPU, f32, all of one type, which is that of O.
///
/// Gradients of Q, K and V come from those of O and LSE, by candle's `backward`.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fa3_candle::Attention;
///
/// let tensor = |heads| Tensor::randn(0f32, 1., (2, 100, heads, 64), &Device::Cpu);
/// let (q, k, v) = (Var::from_tensor(&tensor(8)?)?, tensor(2)?, tensor(2)?);
/// let attention = Attention::new(0.125).causal().window(Some(20), None).softcap(30.);
/// let (o, lse) = attention.forward_with_lse(&q, &k, &v)?;
/// assert_eq!((o.dims(), lse.dims()), (&[2, 100, 8, 64][..], &[2, 8, 100][..]));
///
/// let gradients = (o.sqr()?.sum_all()? + lse.sum_all()?)?.backward()?;
/// assert_eq!(gradients.get(&q).unwrap().dims(), q.dims());
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use = "nothing is computed before `forward`"]
pub struct Attention {
    pub(crate) softmax_scale: f32,
    window: [Option<usize>; 2],
    pub(crate) softcap: Option<f32>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the CPU is always deterministic"))]
    pub(crate) deterministic: bool,
}

impl Attention {
    /// Attention over all keys with this factor on Q·Kᵀ, which is customarily 1/√head_dim.
    pub fn new(softmax_scale: f32) -> Attention {
        Attention { softmax_scale, window: [None; 2], softcap: None, deterministic: false }
    }

    /// Lets each query see no keys after its own position, the last query standing at the last key.
    pub fn causal(self) -> Attention {
        self.window(None, Some(0))
    }

    /// Lets each query see at most `left` keys before its own position and `right` after it; `None` is unbounded.
    /// Windows and [`Attention::causal`] intersect.
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Attention {
        for (bound, given) in self.window.iter_mut().zip([left, right]) {
            *bound = match (*bound, given) {
                (Some(bound), Some(given)) => Some(bound.min(given)),
                (bound, given) => bound.or(given),
            };
        }
        self
    }

    /// Bounds scaled scores s to ±cap by cap · tanh(s / cap), as Gemma 2 does.
    pub fn softcap(mut self, cap: f32) -> Attention {
        self.softcap = Some(cap);
        self
    }

    /// Makes gradients on a GPU the same bits in every run, which may be slower. On the CPU they always are.
    pub fn deterministic(mut self) -> Attention {
        self.deterministic = true;
        self
    }

    /// Computes O (batch, seqlen_q, heads_q, head_dim_v). Rows that see no key are 0.
    ///
    /// # Errors
    /// Tensors that make no sense together, with the numbers; on a GPU what its kernels do not take, and the driver's.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.run(q, k, v, None).map(|pass| pass.o)
    }

    /// Computes O and LSE, f32 (batch, heads_q, seqlen_q), which is -inf in rows that see no key. Gradients of both
    /// take one backward pass.
    ///
    /// # Errors
    /// Those of [`Attention::forward`].
    pub fn forward_with_lse(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.run(q, k, v, None)?.with_lse()
    }

    /// Computes O (total_q, heads_q, head_dim_v) of packed sequences: Q is (total_q, heads_q, head_dim), K (total_k,
    /// heads_kv, head_dim) and V (total_k, heads_kv, head_dim_v). Each sequence sees itself alone. Rows behind the last
    /// one are 0.
    ///
    /// # Errors
    /// Those of [`Attention::forward`]; lists on another device than Q; on the CPU lists that make no sense.
    pub fn forward_varlen(&self, q: &Tensor, k: &Tensor, v: &Tensor, packed: &Packed) -> Result<Tensor> {
        self.run(q, k, v, Some(packed)).map(|pass| pass.o)
    }

    /// Computes O and LSE, f32 (heads_q, total_q), of packed sequences.
    ///
    /// # Errors
    /// Those of [`Attention::forward_varlen`].
    pub fn forward_varlen_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        packed: &Packed,
    ) -> Result<(Tensor, Tensor)> {
        self.run(q, k, v, Some(packed))?.with_lse()
    }

    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor, packed: Option<&Packed>) -> Result<op::Computed> {
        if let Device::Metal(_) = q.device() {
            return Err(Error::Device { given: q.device().location() }.into());
        }
        packed.map_or(Ok(()), |packed| packed.check_device(q.device()))?;
        op::run(self, [readable(q)?, readable(k)?, readable(v)?], packed)
    }

    /// The keys that a query sees. A bound that no tensor has as many rows to notice is none.
    pub(crate) fn mask(&self) -> Mask {
        let [left, right] = self.window.map(|bound| u32::try_from(bound?).ok());
        Mask::window(left, right)
    }
}

/// The tensor, or a copy of it if it is on a GPU and its rows lie as kernels do not read them.
pub(crate) fn readable(x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cuda() || has_readable_rows(x.layout()) { Ok(x.clone()) } else { x.force_contiguous() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_intersect() {
        let attention = Attention::new(1.);
        assert_eq!(attention.mask(), Mask::None);
        assert_eq!(attention.clone().causal().mask(), Mask::Causal);
        let both = attention.clone().causal().window(Some(3), Some(5)).window(Some(4), None);
        assert_eq!(both.mask(), Mask::window(Some(3), Some(0)));
        // No tensor has so many rows.
        assert_eq!(attention.window(Some(usize::MAX), Some(1 << 32)).mask(), Mask::None);
    }
}
