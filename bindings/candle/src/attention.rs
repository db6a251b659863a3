//! Attention of candle's tensors, as a builder.

use candle_core::{DType, Device, Result, Tensor};
use fa3::Mask;

use crate::call::readable;
use crate::error::Error;
use crate::op;
use crate::rows::{Rows, check_device};
use crate::{Cached, Packed};

/// Attention, as a builder. The functions of this crate are short forms of this builder.
///
/// ```text
/// O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
/// ```
///
/// Q is (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim), V (batch, seqlen_k, heads_kv,
/// head_dim_v); heads_q is a multiple of heads_kv, and query head h reads key/value head h / (heads_q / heads_kv).
/// Q, K, V and O have one type: f16, bf16 or, on the CPU, f32.
///
/// Candle's `backward` computes gradients of Q, K, V and the sinks from the gradients of O and LSE. Attention over a
/// [`Cached`] has no gradients.
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
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `forward`"]
pub struct Attention {
    pub(crate) softmax_scale: f32,
    window: [Option<usize>; 2],
    pub(crate) softcap: Option<f32>,
    sink: Option<Tensor>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "the CPU is always deterministic"))]
    pub(crate) deterministic: bool,
}

impl Attention {
    /// Attention over all keys with this factor on Q·Kᵀ, which is customarily 1/√head_dim.
    pub fn new(softmax_scale: f32) -> Attention {
        Attention { softmax_scale, window: [None; 2], softcap: None, sink: None, deterministic: false }
    }

    /// Hides keys after each query's own position. The last query is aligned with the last key.
    pub fn causal(self) -> Attention {
        self.window(None, Some(0))
    }

    /// Lets each query see at most `left` keys before its own position and `right` keys after it; `None` is unbounded.
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

    /// Gives each query head an attention sink (heads_q), of any type, as in GPT-OSS. A sink is the logit of one more
    /// key that every row sees and whose value is 0. It is neither scaled nor capped, and adds to the softmax's
    /// denominator and to LSE. If the sinks have gradients, Q is copied.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fa3_candle::Attention;
    ///
    /// // Each of 3 keys has the weight 1, and so has the sink of the first head.
    /// let tensor = |x: f32| Tensor::full(x, (1, 3, 2, 8), &Device::Cpu);
    /// let (zeros, v) = (tensor(0.)?, tensor(1.)?);
    /// let attention = Attention::new(1.).sink(&Tensor::new(&[0f32, f32::NEG_INFINITY], &Device::Cpu)?);
    /// let o = attention.forward(&zeros, &zeros, &v)?;
    /// assert_eq!(o.narrow(1, 0, 1)?.narrow(3, 0, 1)?.flatten_all()?.to_vec1::<f32>()?, [0.75, 1.]);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn sink(mut self, sink: &Tensor) -> Attention {
        self.sink = Some(sink.clone());
        self
    }

    /// Makes gradients on a GPU have the same bits in every run, which may be slower. On the CPU, gradients always do.
    pub fn deterministic(mut self) -> Attention {
        self.deterministic = true;
        self
    }

    /// Computes O (batch, seqlen_q, heads_q, head_dim_v). Rows that see no key are 0.
    ///
    /// # Errors
    /// The tensors do not fit each other; on a GPU, no kernel supports the call; or the driver reports an error.
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.run([q, k, v], Rows::default()).map(|pass| pass.o)
    }

    /// Computes O and LSE, f32 (batch, heads_q, seqlen_q). In a row that sees no key, LSE is -inf, or the sink. One
    /// backward pass computes the gradients of both O and LSE.
    ///
    /// # Errors
    /// The errors of [`Attention::forward`].
    pub fn forward_with_lse(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        self.run([q, k, v], Rows::default())?.with_lse()
    }

    /// Computes O (total_q, heads_q, head_dim_v) of packed sequences: Q is (total_q, heads_q, head_dim), K (total_k,
    /// heads_kv, head_dim) and V (total_k, heads_kv, head_dim_v). Each sequence sees itself alone. Rows behind the last
    /// sequence are 0.
    ///
    /// # Errors
    /// The errors of [`Attention::forward`]; a list is on another device than Q; on the CPU, a list is invalid.
    pub fn forward_varlen(&self, q: &Tensor, k: &Tensor, v: &Tensor, packed: &Packed) -> Result<Tensor> {
        self.run([q, k, v], packed.0.clone()).map(|pass| pass.o)
    }

    /// Computes O and LSE, f32 (heads_q, total_q), of packed sequences.
    ///
    /// # Errors
    /// The errors of [`Attention::forward_varlen`].
    pub fn forward_varlen_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        packed: &Packed,
    ) -> Result<(Tensor, Tensor)> {
        self.run([q, k, v], packed.0.clone())?.with_lse()
    }

    /// Computes O of queries over a cache, whose K and V are described at [`Cached`]: Q and O are (batch, seqlen_q,
    /// heads_q, …), or (total_q, heads_q, …) if the queries are packed. The last query of a sequence is aligned with
    /// its last row in use. On a GPU, split-KV is used if there are few query rows, as in decoding.
    ///
    /// # Errors
    /// The errors of [`Attention::forward_varlen`].
    pub fn forward_cached(&self, q: &Tensor, k: &Tensor, v: &Tensor, cached: &Cached) -> Result<Tensor> {
        self.run([q, k, v], cached.0.clone()).map(|pass| pass.o)
    }

    /// Computes O and LSE of queries over a cache: LSE is f32 (batch, heads_q, seqlen_q), or (heads_q, total_q) if the
    /// queries are packed.
    ///
    /// # Errors
    /// The errors of [`Attention::forward_varlen`].
    pub fn forward_cached_with_lse(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        cached: &Cached,
    ) -> Result<(Tensor, Tensor)> {
        self.run([q, k, v], cached.0.clone())?.with_lse()
    }

    fn run(&self, inputs: [&Tensor; 3], rows: Rows) -> Result<op::Computed> {
        let device = inputs[0].device();
        if let Device::Metal(_) = device {
            return Err(Error::Device { given: device.location() }.into());
        }
        rows.check_device(device)?;
        let sink = self.sink.as_ref().map(|sink| {
            check_device("sink", sink, device)?;
            sink.to_dtype(DType::F32)?.contiguous()
        });
        let [q, k, v] = inputs.map(readable);
        op::run(self, [q?, k?, v?], rows, sink.transpose()?)
    }

    /// The mask. A bound of 2³² rows or more counts as unbounded, since no tensor has that many rows.
    pub(crate) fn mask(&self) -> Mask {
        let [left, right] = self.window.map(|bound| u32::try_from(bound?).ok());
        Mask::window(left, right)
    }
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
        // No tensor has 2³² rows.
        assert_eq!(attention.window(Some(usize::MAX), Some(1 << 32)).mask(), Mask::None);
    }
}
