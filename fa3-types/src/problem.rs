//! An attention problem, validated.

use crate::{
    Bytes, Dim, Dtype, ExtraCache, Granularity, Heads, Lengths, LseForm, Mask, ProblemError, ProblemSpec,
    ScaleBlocks, ScoreForm, Sequences, Shape, SoftCap, SoftmaxScale, Strides, TensorDesc, TensorName,
    TokenScales, ValueLayout,
};

mod checks;
mod display;
mod features;
mod of_rows;

use checks::{check_counts, check_dtypes, check_qv, check_shapes};

pub(crate) use checks::check_sequences;
pub use features::{Feature, Known, UnknownFeature};

/// The largest head dimension of Q and K: 576, of latent attention (512 + 64 rotary).
const HEAD_DIM_LIMIT: usize = 576;

/// Columns of V that share a scale, where each row has its own scales ([`Problem::v_scales`]).
pub const SCALED_COLUMNS: usize = 128;
/// The largest head dimension of V and O.
const HEAD_DIM_V_LIMIT: usize = 512;

/// An attention problem that can be computed: shapes agree, strides are usable, numbers are finite. Later layers check
/// none of this again. A plan checks further demands of kernels, such as [`Problem::check_rows`].
///
/// The lengths of packed sequences, and of sequences with `seqused`, are not part of it. They are data, as Q, K and V
/// are, and [`KnownProblem`](crate::KnownProblem) has them beside the problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    q: TensorDesc,
    k: TensorDesc,
    v: TensorDesc,
    v_layout: ValueLayout,
    scales: [Granularity; 3],
    token_scales: Option<TokenScales>,
    qv: Option<TensorDesc>,
    o: TensorDesc,
    seqs_q: Sequences,
    seqs_k: Sequences,
    heads: Heads,
    mask: Mask,
    softmax_scale: SoftmaxScale,
    softcap: Option<SoftCap>,
    score: Option<ScoreForm>,
    sink: bool,
    extra: Option<ExtraCache>,
    lse: LseForm,
    max_logits: bool,
}

impl Problem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: see [`ProblemError`].
    pub fn new(spec: ProblemSpec) -> Result<Problem, ProblemError> {
        let ProblemSpec {
            q,
            k,
            v,
            v_layout,
            scales,
            token_scales,
            qv,
            o,
            seqs_q,
            seqs_k,
            mask,
            softmax_scale,
            softcap,
            score,
            sink,
            extra,
            lse,
            max_logits,
        } = spec;
        let tensors = [
            (TensorName::Q, &q, HEAD_DIM_LIMIT),
            (TensorName::K, &k, HEAD_DIM_LIMIT),
            (TensorName::V, &v, HEAD_DIM_V_LIMIT),
            (TensorName::O, &o, HEAD_DIM_V_LIMIT),
        ];
        let of_qv = qv.as_ref().map(|qv| (TensorName::Qv, qv, HEAD_DIM_V_LIMIT));
        for (tensor, desc, limit) in tensors.into_iter().chain(of_qv) {
            desc.check(tensor)?;
            let given = desc.shape.head_dim;
            if given > limit {
                return Err(ProblemError::DimTooLarge { tensor, dim: Dim::HeadDim, given, limit });
            }
        }
        check_dtypes([q.dtype, k.dtype, v.dtype, o.dtype], token_scales.is_some())?;
        check_shapes(q.shape, k.shape, v.shape, o.shape)?;
        qv.as_ref().map_or(Ok(()), |qv| check_qv(qv, &q, o.shape))?;
        let heads = Heads::new(q.shape.heads, k.shape.heads)?;
        check_sequences(TensorName::Q, &q, seqs_q)?;
        check_sequences(TensorName::K, &k, seqs_k)?;
        check_counts(seqs_q, seqs_k)?;
        v_layout.check(&v, q.dtype, seqs_k.is_packed() || seqs_k.is_cache())?;
        Granularity::check(scales, q.dtype, [seqs_q, seqs_k])?;
        token_scales.as_ref().map_or(Ok(()), |scales| scales.check([&q, &k], qv.is_some(), seqs_k))?;
        for ((tensor, x, seqs), scales) in
            [(TensorName::Q, &q, seqs_q), (TensorName::K, &k, seqs_k)].into_iter().zip(scales)
        {
            scales.check_count(tensor, x.shape, seqs)?;
        }
        o.check_distinct(TensorName::O)?;
        let softmax_scale = match softmax_scale {
            Some(given) => SoftmaxScale::new(given)?,
            None => SoftmaxScale::of_head_dim(q.shape.head_dim + qv.map_or(0, |qv| qv.shape.head_dim)),
        };
        let softcap = softcap.map(SoftCap::new).transpose()?;
        let [q, k, v, o] = [q, k, v, o].map(TensorDesc::canonical);
        let qv = qv.map(TensorDesc::canonical);
        let mut mask = mask?;
        if seqs_k.list().is_some() && mask != Mask::None {
            return Err(ProblemError::ListsAndMask { mask });
        }
        extra.as_ref().map_or(Ok(()), |extra| extra.check([&k, &v], seqs_k))?;
        if let Mask::Intervals { form, .. } = &mut mask {
            let packed = seqs_q.is_packed() || seqs_k.is_packed();
            form.check((seqs_q.count(), packed), [q.dtype, k.dtype], qv.is_some())?;
            *form = form.simplified(q.shape);
        }
        // No sequence is longer than its tensor.
        let mask = mask.simplified(Lengths { q: q.shape.seqlen, k: seqs_k.capacity(k.shape.seqlen) });
        Ok(Problem {
            q,
            k,
            v,
            v_layout,
            scales,
            token_scales: token_scales.map(TokenScales::canonical),
            qv,
            o,
            seqs_q,
            seqs_k,
            heads,
            mask,
            softmax_scale,
            softcap,
            score,
            sink,
            extra: extra.map(ExtraCache::canonical),
            lse: LseForm { without_sink: lse.without_sink && sink, ..lse },
            max_logits,
        })
    }

    /// A specification from which [`Problem::new`] makes an equal problem. It states numbers such as the softmax scale
    /// even where they are defaults.
    pub fn spec(&self) -> ProblemSpec {
        // No `..` here: a specification that lacks a property is one of another problem.
        let Problem {
            q,
            k,
            v,
            v_layout,
            scales,
            token_scales,
            qv,
            o,
            seqs_q,
            seqs_k,
            heads: _, // of Q and K
            mask,
            softmax_scale,
            softcap,
            ref score,
            sink,
            extra,
            lse,
            max_logits,
        } = *self;
        ProblemSpec {
            q,
            k,
            v,
            v_layout,
            scales,
            token_scales,
            qv,
            o,
            seqs_q,
            seqs_k,
            mask: Ok(mask),
            softmax_scale: Some(softmax_scale.natural()),
            softcap: softcap.map(SoftCap::bound),
            score: score.clone(),
            sink,
            extra,
            lse,
            max_logits,
        }
    }

    /// Checks the kernels' demands on the tensors: rows of a multiple of 16 bytes (4 elements of f32, 8 of f16 and
    /// bf16, 16 of e4m3) that begin at multiples of 16 bytes. Plans check it; other callers need not.
    ///
    /// # Errors
    /// [`ProblemError::HeadDimMultiple`] or [`ProblemError::StrideMultiple`].
    pub fn check_rows(&self) -> Result<(), ProblemError> {
        let tensors = [(TensorName::Q, &self.q), (TensorName::K, &self.k), (TensorName::V, &self.v)];
        let tensors = tensors.into_iter().chain(self.qv.as_ref().map(|qv| (TensorName::Qv, qv)));
        let tensors = tensors.chain(self.extra.iter().flat_map(ExtraCache::tensors));
        tensors.chain([(TensorName::O, &self.o)]).try_for_each(|(name, x)| x.check_rows(name))
    }

    /// This attention with contiguous tensors whose rows are padded with zeros to the multiple that
    /// [`Problem::check_rows`] asks for. LSE is unchanged, and O has additional columns of zeros.
    #[must_use]
    pub fn padded(&self) -> Problem {
        let [mut q, k, v] = [&self.q, &self.k, &self.v].map(TensorDesc::padded);
        if q.shape.head_dim < k.shape.head_dim {
            q = TensorDesc::contiguous(q.dtype, Shape { head_dim: k.shape.head_dim, ..q.shape });
        }
        let like_v =
            |x: TensorDesc| TensorDesc::contiguous(x.dtype, Shape { head_dim: v.shape.head_dim, ..x.shape });
        let extra = self.extra.map(ExtraCache::padded);
        Problem { q, k, v, qv: self.qv.map(like_v), o: like_v(self.o), extra, ..self.clone() }
    }

    /// This attention after the pages or the listed rows of its cache are gathered into contiguous keys and values: K
    /// and V (sequences, capacity, …), with `seqused`. Listed rows of a second cache follow the rows of the first one.
    /// A problem without a cache is copied.
    #[must_use]
    pub fn gathered(&self) -> Problem {
        if !self.seqs_k.is_cache() {
            return self.clone();
        }
        let (count, rows) = (self.seqs_k.count(), self.capacity());
        let gathered =
            |x: &TensorDesc| TensorDesc::contiguous(x.dtype, Shape { batch: count, seqlen: rows, ..x.shape });
        let (k, v) = (gathered(&self.k), gathered(&self.v));
        let token_scales = self.token_scales.map(|_| TokenScales::contiguous(k.shape));
        Problem {
            k,
            v,
            token_scales,
            seqs_k: Sequences::dense(count, rows).used(),
            extra: None,
            ..self.clone()
        }
    }

    /// The most keys of a sequence, of both caches.
    fn capacity(&self) -> usize {
        let extra = self.extra.map_or(0, |extra| extra.sequences.capacity(extra.k.shape.seqlen));
        self.seqs_k.capacity(self.k.shape.seqlen) + extra
    }

    /// This attention without `qv`, with joined columns: contiguous q' = [qv | q] and k' = [v | k] of head_dim_v +
    /// head_dim columns, where `qv` is [`Problem::qv`]. O and LSE are unchanged. A problem without `qv` is copied.
    #[must_use]
    pub fn joined(&self) -> Problem {
        let Some(qv) = &self.qv else { return self.clone() };
        let head_dim = qv.shape.head_dim + self.head_dim();
        let joined = |x: &TensorDesc| TensorDesc::contiguous(x.dtype, Shape { head_dim, ..x.shape });
        let extra = self.extra.map(|extra| ExtraCache { k: joined(&extra.k), ..extra });
        Problem { q: joined(&self.q), k: joined(&self.k), qv: None, extra, ..self.clone() }
    }

    /// Queries (batch, seqlen_q, heads_q, head_dim).
    pub fn q(&self) -> &TensorDesc {
        &self.q
    }

    /// Keys (batch, seqlen_k, heads_kv, head_dim).
    pub fn k(&self) -> &TensorDesc {
        &self.k
    }

    /// Values (batch, seqlen_k, heads_kv, head_dim_v).
    pub fn v(&self) -> &TensorDesc {
        &self.v
    }

    /// The layout of V in memory.
    pub fn v_layout(&self) -> ValueLayout {
        self.v_layout
    }

    /// Bytes from the first of the values to one past the last.
    pub fn v_bytes(&self) -> Bytes {
        match self.v_layout {
            ValueLayout::Rows => self.v.extent_bytes(),
            ValueLayout::Transposed => ValueLayout::transposed_bytes(self.v.shape),
        }
    }

    /// The part of the queries that is multiplied by values (batch, seqlen_q, heads_q, head_dim_v), in latent attention
    /// (MLA). There a token's latent vector is its value and most of its key:
    ///
    /// ```text
    /// S = softmax_scale · (Q Kᵀ + Qv Vᵀ)        softmax_scale = 1/√(head_dim + head_dim_v) unless given
    /// ```
    ///
    /// K and V of e4m3 are parts of one row and have one scale: the scale of K is a factor of both products, the scale
    /// of V a factor of O.
    pub fn qv(&self) -> Option<&TensorDesc> {
        self.qv.as_ref()
    }

    /// Output (batch, seqlen_q, heads_q, head_dim_v).
    pub fn o(&self) -> &TensorDesc {
        &self.o
    }

    /// Element type of Q, and of K and V unless [`Problem::converts_keys`] or [`Problem::v_scales`].
    pub fn dtype(&self) -> Dtype {
        self.q.dtype
    }

    /// Whether K and V are e4m3 or int8 and Q is not (mixed input). K and V are dequantized to Q's type before they are
    /// multiplied: exactly, or rounded once, if tokens have scales.
    pub fn converts_keys(&self) -> bool {
        self.k.dtype != self.q.dtype
    }

    /// The scales of V's rows, f32, if V is e4m3 beside K of 16 bits, as in FlashMLA's caches. Their shape is (batch,
    /// seqlen, heads_kv, groups), a scale for each group of [`SCALED_COLUMNS`] columns. The scales of a row are as far
    /// from the scales of the next as V's rows are. A code times its scale is rounded to Q's type, once.
    pub fn v_scales(&self) -> Option<TensorDesc> {
        (self.v.dtype != self.k.dtype).then(|| {
            let bytes = Dtype::F32.bytes() as i64;
            let Strides { batch, seqlen, heads, head_dim: _ } = self.v.strides;
            let strides =
                Strides { batch: batch / bytes, seqlen: seqlen / bytes, heads: heads / bytes, head_dim: 1 };
            let shape = Shape { head_dim: self.head_dim_v().div_ceil(SCALED_COLUMNS), ..self.v.shape };
            TensorDesc { dtype: Dtype::F32, shape, strides }.canonical()
        })
    }

    /// The scales of the rows of e4m3 or int8 K and V, beside Q of 16 bits: f32 (batch, seqlen_k, heads_kv, 1), with
    /// any strides. An element is its code times its row's scale, rounded to Q's type, once.
    pub fn token_scales(&self) -> Option<&TokenScales> {
        self.token_scales.as_ref()
    }

    /// Whether K and V have scales of heads, blocks or channels, because they are e4m3 without
    /// [`Problem::token_scales`].
    pub fn has_scales(&self) -> bool {
        self.k.dtype == Dtype::E4m3 && self.token_scales.is_none()
    }

    /// Head counts.
    pub fn heads(&self) -> Heads {
        self.heads
    }

    /// Head dimension of Q and K.
    pub fn head_dim(&self) -> usize {
        self.q.shape.head_dim
    }

    /// Head dimension of V and O.
    pub fn head_dim_v(&self) -> usize {
        self.v.shape.head_dim
    }

    /// The second cache of keys and values, if any. A sequence's keys are the listed rows of K, and behind them the
    /// listed rows of the second cache.
    pub fn extra(&self) -> Option<&ExtraCache> {
        self.extra.as_ref()
    }

    /// The mask in its simplest variant: a window that hides nothing in sequences this long is no window.
    pub fn mask(&self) -> Mask {
        self.mask
    }

    /// The softmax scale.
    pub fn softmax_scale(&self) -> SoftmaxScale {
        self.softmax_scale
    }

    /// The soft cap, if any.
    pub fn softcap(&self) -> Option<SoftCap> {
        self.softcap
    }

    /// The function of scores, if any. It takes scaled and capped scores; see
    /// [`ScoreFunction`](crate::ScoreFunction), which has the elements of its tables.
    pub fn score(&self) -> Option<&ScoreForm> {
        self.score.as_ref()
    }

    /// This problem with a function of scores.
    pub(crate) fn scored(self, form: ScoreForm) -> Problem {
        Problem { score: Some(form), ..self }
    }

    /// Whether each query head has an attention sink: a logit in the softmax's denominator that has no value. It is in
    /// natural units, neither scaled nor capped.
    ///
    /// ```text
    /// P = exp(S) / (exp(sink) + Σ_k exp(S))        LSE = ln (exp(sink) + Σ_k exp(S))
    /// ```
    ///
    /// A row that sees no key has O = 0 and LSE = sink. A sink of -inf has no effect.
    pub fn has_sink(&self) -> bool {
        self.sink
    }

    /// The form of LSE. It leaves out the sink only if there are sinks.
    pub fn lse_form(&self) -> LseForm {
        self.lse
    }

    /// Whether the largest score of each row is a result, `max_logits`, beside LSE and of its shape: scaled and capped,
    /// without the sink, and -inf for a row that sees no key. QK-clip takes the largest one of each head.
    pub fn has_max_logits(&self) -> bool {
        self.max_logits
    }

    /// The sequences of Q and O.
    pub fn seqs_q(&self) -> Sequences {
        self.seqs_q
    }

    /// The sequences of K and V.
    pub fn seqs_k(&self) -> Sequences {
        self.seqs_k
    }

    /// Number of sequences, packed or not.
    pub fn batch(&self) -> usize {
        self.seqs_q.count()
    }

    /// Estimate of the longest sequences: exact for dense ones, the hint or the mean for packed ones.
    pub fn longest(&self) -> Lengths {
        Lengths {
            q: self.seqs_q.longest_of(self.q.shape.seqlen),
            k: match self.extra {
                Some(_) => self.capacity(),
                None => self.seqs_k.longest_of(self.k.shape.seqlen),
            },
        }
    }

    /// Shape of the log-sum-exp tensor: (batch, heads_q, seqlen_q), batch 1 and seqlen_q total if packed.
    pub fn lse_shape(&self) -> [usize; 3] {
        let Shape { batch, seqlen, heads, .. } = self.q.shape;
        [batch, heads, seqlen]
    }

    /// Granularities of the scales of e4m3 Q, K and V: all heads or all blocks, except that V may have channels. With
    /// 16-bit Q, only heads of K and V have scales.
    pub fn scales(&self) -> [Granularity; 3] {
        self.scales
    }

    /// Whether blocks of Q and K have scales.
    pub fn has_block_scales(&self) -> bool {
        matches!(self.scales, [Granularity::Block { .. }, ..])
    }

    /// Whether channels of V have scales and means.
    pub fn has_v_channels(&self) -> bool {
        matches!(self.scales, [.., Granularity::Channel])
    }

    /// Shape of the means of V's channels: (batch, heads_kv, head_dim_v). `None` unless channels of V have scales.
    pub fn v_mean_shape(&self) -> Option<[usize; 3]> {
        self.has_v_channels().then(|| [self.v.shape.batch, self.heads.kv(), self.head_dim_v()])
    }

    /// Shapes of the scales of e4m3 Q, K and V. Scales of heads are (sequences, heads_kv): a head of Q has the scale of
    /// its KV head. Scales of blocks are (batch, heads, blocks), Q with its own heads; packed sequences have batch 1,
    /// and [`ScaleBlocks`](crate::ScaleBlocks) locates a sequence's scales. Scales of V's channels are (batch,
    /// heads_kv, head_dim_v).
    pub fn descale_shapes(&self) -> [Vec<usize>; 3] {
        let kv = self.heads.kv();
        let heads = [self.heads.q(), kv, kv];
        let (tensors, blocks) = ([&self.q, &self.k, &self.v], self.scale_blocks());
        std::array::from_fn(|at| match (blocks[at], self.scales[at]) {
            (Some(blocks), _) => vec![tensors[at].shape.batch, heads[at], blocks.count()],
            (None, Granularity::Channel) => vec![tensors[at].shape.batch, kv, tensors[at].shape.head_dim],
            (None, _) => vec![self.batch(), kv],
        })
    }

    /// The block scales of one head of Q, of K and of V, if scales belong to blocks.
    pub fn scale_blocks(&self) -> [Option<ScaleBlocks>; 3] {
        let [of_q, of_k, of_v] = self.scales;
        [
            of_q.blocks(self.q.shape, self.seqs_q),
            of_k.blocks(self.k.shape, self.seqs_k),
            of_v.blocks(self.v.shape, self.seqs_k),
        ]
    }
}

#[cfg(test)]
mod tests;
