//! Attention of 16-bit tensors, computed in 8 bits: Q, K and V are quantized first (§3.3).

use crate::{
    Dtype, Feature, Known, Positions, Problem, ProblemError, ProblemSpec, QuantizeProblem,
    QuantizeProblemError, QuantizeSpec, RopeStyle, Rotary, Scaling, Signs, TensorDesc, TensorName,
    UnknownFeature, setters,
};

/// Rows that share a scale.
const ROWS: usize = 128;

/// The features that are computed in 8 bits. Sequences with `seqused` are not among them: the blocks that share a scale
/// must not depend on the rows in use.
const KNOWN: Known =
    Known::new("FP8", &[Feature::Window, Feature::Chunks, Feature::SoftCap, Feature::Sinks, Feature::Packed]);

/// Rotary embedding of Q and K, by the same tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QkRotary {
    /// The pairing of entries.
    pub style: RopeStyle,
    /// Leading entries of a row that rotate.
    pub rotary_dim: usize,
    /// Rows of the tables of cosines and sines, one for each position.
    pub table_rows: usize,
    /// The positions of the rows of Q.
    pub q_positions: Positions,
    /// The positions of keys.
    pub k_positions: Positions,
}

impl QkRotary {
    /// The rotation of Q.
    pub fn of_q(self) -> Rotary {
        self.at(self.q_positions)
    }

    /// The rotation of K.
    pub fn of_k(self) -> Rotary {
        self.at(self.k_positions)
    }

    fn at(self, positions: Positions) -> Rotary {
        let QkRotary { style, rotary_dim, table_rows, q_positions: _, k_positions: _ } = self;
        Rotary { style, rotary_dim, table_rows, positions }
    }
}

/// A caller's request, not yet checked: attention of f16 or bf16 tensors, and their quantization to e4m3.
///
/// ```text
/// q, k = e4m3(Q M / scales), e4m3(K M / scales)       M = diag(±1) · Hadamard, if there are signs
/// v    = e4m3(V / scales)                             a scale for each 128 rows of a head
/// ```
///
/// Q and K may be rotated before they are quantized, by consecutive or listed positions.
///
/// ```
/// use fa3_types::{Dtype, Fp8Spec, ProblemSpec, Shape};
///
/// let shape = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 128 };
/// let problem = Fp8Spec::new(ProblemSpec::dense(Dtype::Bf16, shape, shape).causal()).validate()?;
/// assert_eq!((problem.attention().dtype(), problem.codes().dtype()), (Dtype::Bf16, Dtype::E4m3));
/// assert_eq!(problem.codes().o(), problem.attention().o());
/// # Ok::<(), fa3_types::Fp8ProblemError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Fp8Spec {
    /// The attention, of f16 or bf16 tensors, dense or packed.
    pub attention: ProblemSpec,
    /// The rotation of Q and K, if any.
    pub rotary: Option<QkRotary>,
    /// The signs of incoherent processing of Q and K, if any.
    pub signs: Option<Signs>,
    /// Whether each channel of V has a mean and a scale. Otherwise each 128 keys of V share a scale.
    pub v_channels: bool,
}

impl Fp8Spec {
    /// The problem without incoherent processing, with a scale for each 128 rows.
    pub fn new(attention: ProblemSpec) -> Fp8Spec {
        Fp8Spec { attention, rotary: None, signs: None, v_channels: false }
    }

    setters! {
        /// Rotates rows of Q and K first.
        rotary(rotary: QkRotary) { rotary: Some(rotary) }

        /// Transforms rows of Q and K before they are quantized.
        signs(signs: Signs) { signs: Some(signs) }

        /// Gives each channel of V a mean and a scale.
        v_channels() { v_channels: true }
    }

    /// Calls [`Fp8Problem::new`].
    ///
    /// # Errors
    /// [`Fp8ProblemError`].
    pub fn validate(self) -> Result<Fp8Problem, Fp8ProblemError> {
        Fp8Problem::new(self)
    }
}

/// Everything that [`Fp8Problem::new`] rejects.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Fp8ProblemError {
    /// The attention is invalid, or cannot be computed in 8 bits.
    #[error(transparent)]
    Attention(#[from] ProblemError),
    /// The attention has a feature that is not computed in 8 bits.
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    /// A tensor cannot be quantized.
    #[error("{tensor}: {source}")]
    #[allow(missing_docs, reason = "the message names its fields")]
    Quantize { tensor: TensorName, source: QuantizeProblemError },
}

/// Attention in 8 bits that can be computed: three quantizations, and attention of their codes.
#[derive(Clone, Debug)]
pub struct Fp8Problem {
    attention: Problem,
    rotary: Option<QkRotary>,
    quantizations: [QuantizeProblem; 3],
    codes: Problem,
}

impl Fp8Problem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers.
    pub fn new(spec: Fp8Spec) -> Result<Fp8Problem, Fp8ProblemError> {
        let Fp8Spec { attention: spec, rotary, signs, v_channels } = spec;
        let attention = spec.clone().validate()?;
        KNOWN.check(&attention)?;
        let packed = [attention.seqs_q(), attention.seqs_k()].iter().any(|seqs| seqs.is_packed());
        let scaling = Scaling::Block { rows: ROWS };
        let quantize = |tensor, x: &TensorDesc, change: &dyn Fn(QuantizeSpec) -> QuantizeSpec| {
            let quantize =
                QuantizeSpec::new(*x, TensorDesc::contiguous(Dtype::E4m3, x.shape)).scaling(scaling);
            let seqs = if tensor == TensorName::Q { attention.seqs_q() } else { attention.seqs_k() };
            let quantize = if seqs.is_packed() { quantize.packed(seqs.count()) } else { quantize };
            change(quantize).validate().map_err(|source| Fp8ProblemError::Quantize { tensor, source })
        };
        let [of_q, of_k] = [rotary.map(QkRotary::of_q), rotary.map(QkRotary::of_k)]
            .map(|rotary| move |quantize: QuantizeSpec| QuantizeSpec { signs, rotary, ..quantize });
        let of_v = |quantize: QuantizeSpec| {
            let quantize = if packed { quantize } else { quantize.transposed() };
            if v_channels { quantize.scaling(Scaling::Channel) } else { quantize }
        };
        let quantizations = [
            quantize(TensorName::Q, attention.q(), &of_q)?,
            quantize(TensorName::K, attention.k(), &of_k)?,
            quantize(TensorName::V, attention.v(), &of_v)?,
        ];
        // The kernel of packed sequences transposes V itself.
        let spec = if packed { spec } else { spec.transposed_v() };
        let mut codes = spec.block_scales(ROWS);
        for x in [&mut codes.q, &mut codes.k, &mut codes.v] {
            *x = TensorDesc::contiguous(Dtype::E4m3, x.shape);
        }
        let codes = if v_channels { codes.v_channels() } else { codes };
        Ok(Fp8Problem { attention, rotary, quantizations, codes: codes.validate()? })
    }

    /// The attention, of 16-bit tensors.
    pub fn attention(&self) -> &Problem {
        &self.attention
    }

    /// The rotation of Q and K, if any.
    pub fn rotary(&self) -> Option<QkRotary> {
        self.rotary
    }

    /// The quantizations of Q, K and V. V of dense batches is transposed.
    pub fn quantizations(&self) -> &[QuantizeProblem; 3] {
        &self.quantizations
    }

    /// The attention of the codes. Its O is the O of [`Fp8Problem::attention`].
    pub fn codes(&self) -> &Problem {
        &self.codes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SequenceRows, Sequences, Shape};

    const Q: Shape = Shape { batch: 2, seqlen: 200, heads: 4, head_dim: 64 };
    const KV: Shape = Shape { seqlen: 300, heads: 2, ..Q };

    fn spec() -> Fp8Spec {
        Fp8Spec::new(ProblemSpec::dense(Dtype::F16, Q, KV).head_dim_v(32))
    }

    #[test]
    fn what_one_writes_the_other_reads() {
        let rows =
            [&[0, 24, 24, 200][..], &[0, 130, 130, 300]].map(|ends| SequenceRows::packed(ends).unwrap());
        let [of_q, of_k] = &rows;
        let packed = Fp8Spec::new(ProblemSpec::packed(Dtype::Bf16, (4, 2), 64, of_q, of_k));
        for spec in [spec(), spec().v_channels(), packed] {
            let problem = spec.validate().unwrap();
            let [q, k, v] = problem.quantizations();
            let codes = problem.codes();
            assert_eq!(
                [q.codes_bytes(), k.codes_bytes(), v.codes_bytes()],
                [codes.q().extent_bytes(), codes.k().extent_bytes(), codes.v_bytes()]
            );
            let scales = [q, k, v].map(|x| x.scales_shape().map(Vec::from));
            assert_eq!(scales, codes.descale_shapes().map(Some));
            assert_eq!(v.mean_shape(), codes.v_mean_shape());
        }
    }

    #[test]
    fn what_has_no_codes_is_refused() {
        let error = Fp8Spec::new(ProblemSpec::dense(Dtype::F32, Q, KV)).validate().unwrap_err();
        assert_eq!(error.to_string(), "q: x is f32, expected f16 or bf16");
        let narrow = ProblemSpec::dense(Dtype::F16, Q, KV).head_dim_v(24);
        let error = Fp8Spec::new(narrow).validate().unwrap_err();
        assert_eq!(error.to_string(), "v: x has head_dim 24, not a multiple of 16 up to 256");
        let used = Sequences::dense(2, 300).used();
        let error = Fp8Spec::new(ProblemSpec::dense(Dtype::F16, Q, KV).seqs_k(used)).validate().unwrap_err();
        let text = "FP8 cannot compute attention with sequences in use in part";
        assert_eq!(error.to_string(), text);
        let rows = SequenceRows::packed(&[0, 24]).unwrap();
        let packed = ProblemSpec::packed(Dtype::Bf16, (4, 2), 64, &rows, &rows);
        let source = QuantizeProblemError::PackedScaling { scaling: Scaling::Channel };
        let error = Fp8ProblemError::Quantize { tensor: TensorName::V, source };
        assert_eq!(Fp8Spec::new(packed).v_channels().validate().unwrap_err(), error);
        let (style, rotary_dim, table_rows) = (RopeStyle::HalfSplit, 32, 350);
        let (q_positions, k_positions) = (Positions::From(150), Positions::From(50));
        let rotary = QkRotary { style, rotary_dim, table_rows, q_positions, k_positions };
        assert!(spec().rotary(rotary).validate().is_ok());
        let of_k = |k_positions| spec().rotary(QkRotary { k_positions, ..rotary }).validate();
        let source = QuantizeProblemError::Positions { last: 350, rows: 350 };
        let error = Fp8ProblemError::Quantize { tensor: TensorName::K, source };
        assert_eq!(of_k(Positions::From(51)).unwrap_err(), error);
        // A list of positions is data, which a problem does not know.
        assert!(of_k(Positions::Listed).is_ok());
        let mut wrong = spec();
        wrong.attention.softmax_scale = Some(-1.0);
        assert_eq!(wrong.validate().unwrap_err(), ProblemError::SoftmaxScale { given: -1.0 }.into());
    }
}
