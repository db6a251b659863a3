//! Specification of an attention problem.

use crate::{
    Dtype, ExtraCache, Granularity, KnownProblem, LseForm, Mask, Problem, ProblemError, ScoreForm,
    SequenceRows, Sequences, Shape, TensorDesc, TokenScales, ValueLayout, setters,
};

/// A caller's request, not yet checked: plain data that [`Problem::new`] takes.
///
/// Constructors take the tensors, setters change the defaults. No setter undoes another. Fields can also be read and
/// changed directly.
///
/// ```
/// use fa3_types::{Dtype, ProblemSpec, SequenceRows, Shape, TensorDesc};
///
/// // Q in the middle of a tensor of 3 x 8 heads, of 100 rows the first 60 in use.
/// let shape = Shape { batch: 1, seqlen: 100, heads: 8, head_dim: 64 };
/// let contiguous = TensorDesc::contiguous(Dtype::Bf16, shape);
/// let mut q = contiguous;
/// q.strides.seqlen *= 3;
/// let rows = SequenceRows::dense(1, 100);
/// let spec = ProblemSpec::new(q, contiguous, contiguous, contiguous).causal();
/// assert_eq!(spec.with_rows(rows.clone().with_used(&[60])?, rows)?.lengths(0).q, 60);
/// # Ok::<(), fa3_types::ProblemError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct ProblemSpec {
    /// Queries (batch, seqlen_q, heads_q, head_dim).
    pub q: TensorDesc,
    /// Keys (batch, seqlen_k, heads_kv, head_dim), of the type of Q, or e4m3 with 16-bit Q.
    pub k: TensorDesc,
    /// Values (batch, seqlen_k, heads_kv, head_dim_v), of the type of K.
    pub v: TensorDesc,
    /// The layout of V. If V is transposed, the strides of `v` are contiguous ones.
    pub v_layout: ValueLayout,
    /// Granularities of the scales of e4m3 Q, K and V: all heads, or all blocks, of 64 or 128 rows of Q and of 128 rows
    /// of K and V. In either case V may have channels.
    pub scales: [Granularity; 3],
    /// Scales of the rows of e4m3 K and V, beside Q of 16 bits, in place of scales of heads.
    pub token_scales: Option<TokenScales>,
    /// The part of the queries that is multiplied by values, in [latent attention](Problem::qv): of O's shape and Q's
    /// type.
    pub qv: Option<TensorDesc>,
    /// Output (batch, seqlen_q, heads_q, head_dim_v).
    pub o: TensorDesc,
    /// The sequences of Q and O.
    pub seqs_q: Sequences,
    /// The sequences of K and V.
    pub seqs_k: Sequences,
    /// The mask, or the error of making it.
    pub mask: Result<Mask, ProblemError>,
    /// Factor on Q·Kᵀ; 1/√head_dim if `None`, 1/√(head_dim + head_dim_v) with `qv`.
    pub softmax_scale: Option<f64>,
    /// Bound of the soft cap; no cap if `None`.
    pub softcap: Option<f64>,
    /// The function of scores; see [`Problem::score`].
    pub score: Option<ScoreForm>,
    /// Whether each query head has an attention sink: a logit in the softmax's denominator alone. Its values are data:
    /// f32 (heads_q).
    pub sink: bool,
    /// The second cache of keys and values, whose listed rows follow the ones of K and V.
    pub extra: Option<ExtraCache>,
    /// The form of LSE.
    pub lse: LseForm,
    /// Whether the largest score of each row is a result: see [`Problem::has_max_logits`].
    pub max_logits: bool,
}

impl ProblemSpec {
    /// A problem of these tensors, dense: the sequences' lengths are the shapes' seqlen. No mask, no soft cap, the
    /// scale 1/√head_dim.
    pub fn new(q: TensorDesc, k: TensorDesc, v: TensorDesc, o: TensorDesc) -> ProblemSpec {
        let dense = |x: &TensorDesc| Sequences::dense(x.shape.batch, x.shape.seqlen);
        let (seqs_q, seqs_k) = (dense(&q), dense(&k));
        ProblemSpec {
            q,
            k,
            v,
            v_layout: ValueLayout::Rows,
            scales: [Granularity::Head; 3],
            token_scales: None,
            qv: None,
            o,
            seqs_q,
            seqs_k,
            mask: Ok(Mask::None),
            softmax_scale: None,
            softcap: None,
            score: None,
            sink: false,
            extra: None,
            lse: LseForm::default(),
            max_logits: false,
        }
    }

    /// Contiguous dense tensors with V of K's shape. The sequences' lengths are the shapes' seqlen.
    pub fn dense(dtype: Dtype, q: Shape, kv: Shape) -> ProblemSpec {
        let [q, k, o] = [(dtype, q), (dtype, kv), (dtype.default_output(), q)]
            .map(|(dtype, shape)| TensorDesc::contiguous(dtype, shape));
        ProblemSpec::new(q, k, k, o)
    }

    /// Contiguous packed tensors (total, heads, head_dim) with exactly these rows, and V of K's shape.
    pub fn packed(
        dtype: Dtype,
        heads: (usize, usize),
        head_dim: usize,
        rows_q: &SequenceRows,
        rows_k: &SequenceRows,
    ) -> ProblemSpec {
        let q = Shape { batch: 1, seqlen: rows_q.end(), heads: heads.0, head_dim };
        let kv = Shape { batch: 1, seqlen: rows_k.end(), heads: heads.1, head_dim };
        ProblemSpec::dense(dtype, q, kv).seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences())
    }

    setters! {
        /// Sets the layout of the sequences of Q and O in their tensors.
        seqs_q(sequences: Sequences) { seqs_q: sequences }

        /// Sets the layout of the sequences of K and V in their tensors.
        seqs_k(sequences: Sequences) { seqs_k: sequences }

        /// Says that e4m3 V is transposed.
        transposed_v() { v_layout: ValueLayout::Transposed }

        /// Gives each row and head of e4m3 or int8 K and V its own scales: see [`Problem::token_scales`].
        ///
        /// ```
        /// use fa3_types::{Dtype, ProblemSpec, Sequences, Shape, TokenScales};
        ///
        /// // 100 pages of 16 rows.
        /// let q = Shape { batch: 3, seqlen: 1, heads: 32, head_dim: 128 };
        /// let cache = Shape { batch: 100, seqlen: 16, heads: 8, ..q };
        /// let spec = ProblemSpec::dense(Dtype::Bf16, q, cache).e4m3_keys();
        /// let spec = spec.token_scales(TokenScales::contiguous(cache)).seqs_k(Sequences::paged(3, 40).used());
        /// assert_eq!(spec.validate()?.token_scales().unwrap().k.shape.dims(), [100, 16, 8, 1]);
        /// # Ok::<(), fa3_types::ProblemError>(())
        /// ```
        token_scales(scales: TokenScales) { token_scales: Some(scales) }

        /// Adds the product of `qv` and the values to the scores: see [`Problem::qv`].
        ///
        /// ```
        /// use fa3_types::{Dtype, ProblemSpec, Shape, TensorDesc};
        ///
        /// // 16 heads of 64 rotated columns, and of 512 that are multiplied by the latent vectors, which are V.
        /// let q = Shape { batch: 2, seqlen: 1, heads: 16, head_dim: 64 };
        /// let qv = TensorDesc::contiguous(Dtype::Bf16, Shape { head_dim: 512, ..q });
        /// let kv = Shape { seqlen: 1000, heads: 1, ..q };
        /// let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).head_dim_v(512).qv(qv).validate()?;
        /// assert_eq!(problem.joined().head_dim(), 576);
        /// # Ok::<(), fa3_types::ProblemError>(())
        /// ```
        qv(qv: TensorDesc) { qv: Some(qv) }

        /// Sets the softmax scale.
        softmax_scale(scale: f64) { softmax_scale: Some(scale) }

        /// Sets the soft cap.
        softcap(cap: f64) { softcap: Some(cap) }

        /// Sets the function of scores. [`KnownProblem::with_score`] gives a problem its tables as well.
        score(form: ScoreForm) { score: Some(form) }

        /// Gives each query head a sink.
        sink() { sink: true }

        /// Adds a second cache, whose listed rows follow the ones of K and V.
        ///
        /// ```
        /// use fa3_types::{Dtype, ExtraCache, ProblemSpec, Sequences, Shape, TensorDesc};
        ///
        /// // Each of 3 tokens has its own list of 2048 rows of a cache of 100 pages of 64 rows, and of 128 of another
        /// // cache. Only the first ones of each of those lists count.
        /// let q = Shape { batch: 3, seqlen: 1, heads: 16, head_dim: 576 };
        /// let cache = Shape { batch: 100, seqlen: 64, heads: 1, ..q };
        /// let rows = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 7, ..cache });
        /// let values = TensorDesc { shape: Shape { head_dim: 512, ..rows.shape }, ..rows };
        /// let extra = ExtraCache { k: rows, v: values, sequences: Sequences::listed(3, 128).used() };
        /// let spec = ProblemSpec::dense(Dtype::Bf16, q, cache).head_dim_v(512).extra(extra);
        /// let problem = spec.seqs_k(Sequences::listed(3, 2048)).validate()?;
        /// assert_eq!(problem.gathered().k().shape.seqlen, 2048 + 128);
        /// # Ok::<(), fa3_types::ProblemError>(())
        /// ```
        extra(extra: ExtraCache) { extra: Some(extra) }
        /// Sets the form of LSE.
        lse_form(form: LseForm) { lse: form }

        /// Makes the largest score of each row a result.
        max_logits() { max_logits: true }
    }

    /// Gives V and O, contiguous, their own head dimension.
    pub fn head_dim_v(mut self, head_dim_v: usize) -> ProblemSpec {
        self.v = TensorDesc::contiguous(self.v.dtype, Shape { head_dim: head_dim_v, ..self.v.shape });
        self.o = TensorDesc::contiguous(self.o.dtype, Shape { head_dim: head_dim_v, ..self.o.shape });
        self
    }

    /// Makes K and V e4m3, contiguous, for any type of Q.
    pub fn e4m3_keys(mut self) -> ProblemSpec {
        [self.k, self.v] = [self.k, self.v].map(|x| TensorDesc::contiguous(Dtype::E4m3, x.shape));
        self
    }

    /// Makes K and V int8, contiguous, beside Q of 16 bits, and gives each row and head of them a scale.
    pub fn int8_keys(mut self) -> ProblemSpec {
        [self.k, self.v] = [self.k, self.v].map(|x| TensorDesc::contiguous(Dtype::Int8, x.shape));
        self.token_scales = Some(TokenScales::contiguous(self.k.shape));
        self
    }

    /// Gives each block of `rows` rows of Q a scale, and each 128 rows of K and of V. Channels of V keep theirs.
    pub fn block_scales(mut self, q_rows: usize) -> ProblemSpec {
        let [q, k, v] = [q_rows, 128, 128].map(|rows| Granularity::Block { rows });
        let v = if self.scales[2] == Granularity::Channel { Granularity::Channel } else { v };
        self.scales = [q, k, v];
        self
    }

    /// Gives each channel of V a scale and a mean, in place of each head or block: V = mean + scale · code.
    pub fn v_channels(mut self) -> ProblemSpec {
        self.scales[2] = Granularity::Channel;
        self
    }

    /// Hides keys in addition to the ones hidden already: masks intersect. Validation refuses chunks of two sizes.
    pub fn mask(mut self, mask: Mask) -> ProblemSpec {
        self.mask = self.mask.and_then(|other| other.and(mask));
        self
    }

    /// Applies [`Mask::Causal`].
    pub fn causal(self) -> ProblemSpec {
        self.mask(Mask::Causal)
    }

    /// Calls [`Problem::new`].
    ///
    /// # Errors
    /// See [`ProblemError`].
    pub fn validate(self) -> Result<Problem, ProblemError> {
        Problem::new(self)
    }

    /// Calls [`Problem::new`], then [`Problem::known`].
    ///
    /// # Errors
    /// See [`ProblemError`].
    pub fn known(self) -> Result<KnownProblem, ProblemError> {
        Problem::new(self)?.known()
    }

    /// The problem with these rows for its sequences. They replace the sequences set before.
    ///
    /// # Errors
    /// See [`ProblemError`].
    pub fn with_rows(
        mut self,
        rows_q: SequenceRows,
        rows_k: SequenceRows,
    ) -> Result<KnownProblem, ProblemError> {
        (self.seqs_q, self.seqs_k) = (rows_q.sequences(), rows_k.sequences());
        KnownProblem::new(Problem::new(self)?, rows_q, rows_k)
    }
}
