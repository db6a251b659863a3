//! A tensor on its way to e4m3: what is done to it, validated.

mod scaling;

use std::fmt;

pub use scaling::{CHANNEL_GROUPS, CHANNEL_ROWS, Scaling};

use crate::{
    Bytes, Dim, Dtype, Positions, ProblemError, RopeStyle, Rotary, ScaleBlocks, Sequences, Shape, TensorDesc,
    TensorName, ValueLayout, problem::check_sequences,
};

/// The largest head dimension that is quantized.
const HEAD_DIM_LIMIT: usize = 256;

/// Rows of codes have a multiple of so many bytes.
const HEAD_DIM_MULTIPLE: usize = Dtype::E4m3.row_multiple();

/// Rotation pairs and codes come in chunks of so many.
const ROTARY_MULTIPLE: usize = 16;

/// The signs of incoherent processing: bit i of word i / 32 is set where entry i is negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signs {
    /// Before the transform of the leading entries.
    pub leading: [u32; HEAD_DIM_LIMIT / 32],
    /// Between that and the transform of the trailing ones; unused if head_dim is a power of two.
    pub between: [u32; HEAD_DIM_LIMIT / 32],
}

/// A caller's request, not yet checked: plain data that [`QuantizeProblem::new`] takes.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block
/// ```
///
/// or, with [`Scaling::Channel`], y = x - mean of its channel, with the scale of its channel.
///
/// A constructor gives the tensors, and setters what is not default.
///
/// ```
/// use fa3_types::{Dtype, Positions, QuantizeSpec, RopeStyle, Rotary, Scaling, Shape};
///
/// let shape = Shape { batch: 2, seqlen: 1000, heads: 8, head_dim: 128 };
/// let rotary =
///     Rotary { style: RopeStyle::HalfSplit, rotary_dim: 128, table_rows: 4096, positions: Positions::From(0) };
/// let problem =
///     QuantizeSpec::contiguous(Dtype::Bf16, shape).rotary(rotary).scaling(Scaling::Block { rows: 64 }).validate()?;
/// assert_eq!(problem.scales_shape(), Some([2, 8, 16]));
/// # Ok::<(), fa3_types::QuantizeProblemError>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct QuantizeSpec {
    /// The tensor, f16 or bf16.
    pub x: TensorDesc,
    /// Where its codes go, e4m3, of the same shape. Contiguous if they are transposed.
    pub codes: TensorDesc,
    /// How the codes lie in memory.
    pub layout: ValueLayout,
    /// Where scales come from.
    pub scaling: Scaling,
    /// The rotation, if any.
    pub rotary: Option<Rotary>,
    /// The signs of incoherent processing, if there is any. Q and K take the same ones.
    pub signs: Option<Signs>,
    /// How many sequences are packed into the tensor, if it is packed: then no block has rows of two of them. Where
    /// they begin is data.
    pub packed: Option<usize>,
}

impl QuantizeSpec {
    /// Quantization alone, with a scale for each 128 rows.
    pub fn new(x: TensorDesc, codes: TensorDesc) -> QuantizeSpec {
        let (layout, scaling) = (ValueLayout::Rows, Scaling::Block { rows: 128 });
        QuantizeSpec { x, codes, layout, scaling, rotary: None, signs: None, packed: None }
    }

    /// A quantization of contiguous tensors.
    pub fn contiguous(dtype: Dtype, shape: Shape) -> QuantizeSpec {
        let [x, codes] = [dtype, Dtype::E4m3].map(|dtype| TensorDesc::contiguous(dtype, shape));
        QuantizeSpec::new(x, codes)
    }

    /// Transposes the codes, as products read V.
    #[must_use]
    pub fn transposed(self) -> QuantizeSpec {
        QuantizeSpec { layout: ValueLayout::Transposed, ..self }
    }

    /// Rotates each row first.
    #[must_use]
    pub fn rotary(self, rotary: Rotary) -> QuantizeSpec {
        QuantizeSpec { rotary: Some(rotary), ..self }
    }

    /// Transforms each row before it is quantized.
    #[must_use]
    pub fn signs(self, signs: Signs) -> QuantizeSpec {
        QuantizeSpec { signs: Some(signs), ..self }
    }

    /// Says where scales come from.
    #[must_use]
    pub fn scaling(self, scaling: Scaling) -> QuantizeSpec {
        QuantizeSpec { scaling, ..self }
    }

    /// Says that the tensor, of batch 1, has so many sequences, one after the other. Rows of no sequence have codes 0.
    #[must_use]
    pub fn packed(self, sequences: usize) -> QuantizeSpec {
        QuantizeSpec { packed: Some(sequences), ..self }
    }

    /// [`QuantizeProblem::new`].
    ///
    /// # Errors
    /// [`QuantizeProblemError`].
    pub fn validate(self) -> Result<QuantizeProblem, QuantizeProblemError> {
        QuantizeProblem::new(self)
    }
}

/// Everything that [`QuantizeProblem::new`] rejects. One sentence each, with the offending numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum QuantizeProblemError {
    #[error(transparent)]
    Tensor(#[from] ProblemError),
    #[error("x is {given}, expected f16 or bf16")]
    Input { given: Dtype },
    #[error("codes are {given}, expected e4m3")]
    Codes { given: Dtype },
    #[error("x has head_dim {given}, not a multiple of {HEAD_DIM_MULTIPLE} up to {HEAD_DIM_LIMIT}")]
    HeadDim { given: usize },
    #[error("codes have stride {given} in {dim}, expected {expected}: transposed, they are contiguous")]
    CodesStride { dim: Dim, given: i64, expected: i64 },
    #[error("scales of blocks of {given} rows, expected 64 or 128")]
    BlockRows { given: usize },
    #[error("a scale for each {given} heads, of which the tensor has {heads}")]
    ScaleHeads { given: usize, heads: usize },
    #[error("the scale {given} is outside 2^-64 to 2^64")]
    Scale { given: f32 },
    #[error("channels have scales of their own only without rotation and transform, which mix them")]
    MixedChannels,
    #[error("rotary_dim {given} is not a positive multiple of {ROTARY_MULTIPLE} up to head_dim {head_dim}")]
    RotaryDim { given: usize, head_dim: usize },
    #[error("the last row is at position {last}, the tables of cosines and sines have {rows} rows")]
    Positions { last: usize, rows: usize },
    #[error("packed sequences have scales for blocks of rows, not {scaling}")]
    PackedScaling { scaling: Scaling },
}

/// A quantization that can be computed: shapes agree, strides are usable, positions lie within the tables. Later layers
/// check nothing of this again.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeProblem(QuantizeSpec);

impl QuantizeProblem {
    /// Validates `spec`.
    ///
    /// # Errors
    /// The first violation found, with its numbers: see [`QuantizeProblemError`].
    pub fn new(spec: QuantizeSpec) -> Result<QuantizeProblem, QuantizeProblemError> {
        let QuantizeSpec { x, codes, layout, scaling, rotary, signs, packed } = spec;
        if !matches!(x.dtype, Dtype::F16 | Dtype::Bf16) {
            return Err(QuantizeProblemError::Input { given: x.dtype });
        }
        if codes.dtype != Dtype::E4m3 {
            return Err(QuantizeProblemError::Codes { given: codes.dtype });
        }
        x.check(TensorName::X)?;
        codes.check(TensorName::Codes)?;
        let head_dim = x.shape.head_dim;
        if head_dim > HEAD_DIM_LIMIT || !head_dim.is_multiple_of(HEAD_DIM_MULTIPLE) {
            return Err(QuantizeProblemError::HeadDim { given: head_dim });
        }
        x.check_rows(TensorName::X)?;
        let dims = [Dim::Batch, Dim::Seqlen, Dim::Heads, Dim::HeadDim];
        for ((dim, given), expected) in dims.into_iter().zip(codes.shape.dims()).zip(x.shape.dims()) {
            if given != expected {
                let tensor = TensorName::Codes;
                return Err(ProblemError::DimMismatch { tensor, dim, given, expected }.into());
            }
        }
        codes.check_rows(TensorName::Codes)?;
        codes.check_distinct(TensorName::Codes)?;
        if layout == ValueLayout::Transposed {
            check_transposed(codes)?;
        }
        scaling.check(x.shape.heads)?;
        if scaling == Scaling::Channel && (rotary.is_some() || signs.is_some()) {
            return Err(QuantizeProblemError::MixedChannels);
        }
        if let Some(sequences) = packed {
            check_packed(&spec, sequences)?;
        }
        if let Some(rotary) = rotary {
            check_rotary(rotary, x.shape, packed.is_some())?;
        }
        let [x, codes] = [x, codes].map(TensorDesc::canonical);
        Ok(QuantizeProblem(QuantizeSpec { x, codes, ..spec }))
    }

    /// The tensor (batch, seqlen, heads, head_dim).
    pub fn x(&self) -> &TensorDesc {
        &self.0.x
    }

    /// Its codes, of the same shape.
    pub fn codes(&self) -> &TensorDesc {
        &self.0.codes
    }

    /// How the codes lie in memory.
    pub fn layout(&self) -> ValueLayout {
        self.0.layout
    }

    /// Bytes that the codes take.
    pub fn codes_bytes(&self) -> Bytes {
        match self.layout() {
            ValueLayout::Rows => self.codes().extent_bytes(),
            ValueLayout::Transposed => ValueLayout::transposed_bytes(self.codes().shape),
        }
    }

    /// The rotation, if any.
    pub fn rotary(&self) -> Option<Rotary> {
        self.0.rotary
    }

    /// The signs of incoherent processing, if there is any.
    pub fn signs(&self) -> Option<Signs> {
        self.0.signs
    }

    /// Where scales come from.
    pub fn scaling(&self) -> Scaling {
        self.0.scaling
    }

    /// How many sequences are packed into the tensor, if it is packed.
    pub fn packed(&self) -> Option<usize> {
        self.0.packed
    }

    /// Shape of the tensor of scales, f32 and contiguous: (batch, heads, blocks), of packed sequences as
    /// [`ScaleBlocks`] says; of several heads or a tensor (batch,
    /// groups of heads, 1) or (1, 1, 1); of channels (batch, heads, head_dim). `None` if the scale is given.
    pub fn scales_shape(&self) -> Option<[usize; 3]> {
        let Shape { batch, seqlen, heads, head_dim } = self.x().shape;
        match self.scaling() {
            Scaling::Block { rows } => {
                let blocks = match self.packed() {
                    Some(sequences) => ScaleBlocks::packed(seqlen, sequences, rows),
                    None => ScaleBlocks::dense(seqlen, rows),
                };
                Some([batch, heads, blocks.count()])
            }
            Scaling::Heads { heads: of_scale } => Some([batch, heads / of_scale, 1]),
            Scaling::Tensor => Some([1, 1, 1]),
            Scaling::Given(_) => None,
            Scaling::Channel => Some([batch, heads, head_dim]),
        }
    }

    /// Shape of the tensor of means, f32 and contiguous: (batch, heads, head_dim). `None` unless channels have scales.
    pub fn mean_shape(&self) -> Option<[usize; 3]> {
        self.scales_shape().filter(|_| self.scaling() == Scaling::Channel)
    }
}

/// Sequences can be packed into this tensor.
fn check_packed(spec: &QuantizeSpec, sequences: usize) -> Result<(), QuantizeProblemError> {
    check_sequences(TensorName::X, &spec.x, Sequences::packed(sequences))?;
    if spec.layout == ValueLayout::Transposed {
        return Err(ProblemError::TransposedV { dtype: Dtype::E4m3, packed: true }.into());
    }
    match spec.scaling {
        Scaling::Block { .. } => Ok(()),
        scaling @ (Scaling::Heads { .. } | Scaling::Tensor | Scaling::Given(_) | Scaling::Channel) => {
            Err(QuantizeProblemError::PackedScaling { scaling })
        }
    }
}

/// Codes of this tensor can be transposed.
fn check_transposed(codes: TensorDesc) -> Result<(), QuantizeProblemError> {
    let (given, shape) = (codes.canonical().strides, codes.shape);
    let expected = shape.contiguous_strides();
    let strides = [
        (Dim::Batch, given.batch, expected.batch),
        (Dim::Seqlen, given.seqlen, expected.seqlen),
        (Dim::Heads, given.heads, expected.heads),
    ];
    if let Some((dim, given, expected)) = strides.into_iter().find(|(_, given, expected)| given != expected) {
        return Err(QuantizeProblemError::CodesStride { dim, given, expected });
    }
    // Extents of 0 do not count: arrays multiply the others, however empty they are.
    let shape = Shape { batch: shape.batch.max(1), seqlen: shape.seqlen.max(1), ..shape };
    if ValueLayout::transposed_bytes(shape).0 > i64::MAX as u64 {
        let shape = Shape { seqlen: ValueLayout::keys_of_row(shape.seqlen), ..shape };
        return Err(ProblemError::TooLarge { tensor: TensorName::Codes, shape }.into());
    }
    Ok(())
}

fn check_rotary(rotary: Rotary, shape: Shape, packed: bool) -> Result<(), QuantizeProblemError> {
    let Rotary { style: RopeStyle::Interleaved | RopeStyle::HalfSplit, rotary_dim, table_rows, positions } =
        rotary;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(ROTARY_MULTIPLE) || rotary_dim > shape.head_dim {
        return Err(QuantizeProblemError::RotaryDim { given: rotary_dim, head_dim: shape.head_dim });
    }
    let limit = i32::MAX as usize;
    if table_rows > limit {
        let (tensor, dim) = (TensorName::Cos, Dim::Seqlen);
        return Err(ProblemError::DimTooLarge { tensor, dim, given: table_rows, limit }.into());
    }
    let last = match positions {
        // Any list may be given with a table of one row; without rows there would be nothing to read.
        Positions::Listed => 0,
        // Lengths are data: rows behind the table have no position, as listed ones.
        Positions::From(first) if packed => first,
        Positions::From(first) => first.saturating_add(shape.seqlen.saturating_sub(1)),
    };
    if last >= table_rows {
        return Err(QuantizeProblemError::Positions { last, rows: table_rows });
    }
    Ok(())
}

impl fmt::Display for QuantizeProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.x().dtype, self.x().shape)?;
        if let Some(Rotary { style, rotary_dim, .. }) = self.rotary() {
            let style = match style {
                RopeStyle::Interleaved => "interleaved",
                RopeStyle::HalfSplit => "half-split",
            };
            write!(f, ", {style} rotary embedding of {rotary_dim}")?;
        }
        if self.signs().is_some() {
            write!(f, ", Hadamard")?;
        }
        write!(f, ", {}", self.scaling())?;
        if let Some(sequences) = self.packed() {
            write!(f, ", {sequences} packed sequences")?;
        }
        match self.layout() {
            ValueLayout::Rows => Ok(()),
            ValueLayout::Transposed => write!(f, ", transposed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { batch: 2, seqlen: 100, heads: 3, head_dim: 96 };
    const ROTARY: Rotary = Rotary {
        style: RopeStyle::Interleaved,
        rotary_dim: 32,
        table_rows: 110,
        positions: Positions::From(10),
    };

    fn spec() -> QuantizeSpec {
        QuantizeSpec::contiguous(Dtype::F16, SHAPE)
    }

    fn refused(spec: QuantizeSpec) -> QuantizeProblemError {
        spec.validate().unwrap_err()
    }

    #[test]
    fn blocks_have_scales_and_a_given_scale_has_none() {
        let shape = |spec: QuantizeSpec| spec.validate().unwrap().scales_shape();
        assert_eq!(shape(spec()), Some([2, 3, 1]));
        assert_eq!(shape(spec().scaling(Scaling::Block { rows: 64 })), Some([2, 3, 2]));
        assert_eq!(shape(spec().scaling(Scaling::Given(0.5))), None);
    }

    #[test]
    fn packed_sequences_have_scales_of_blocks() {
        let one = || QuantizeSpec::contiguous(Dtype::F16, Shape { batch: 1, ..SHAPE });
        let packed = one().packed(4).validate().unwrap();
        assert_eq!((packed.packed(), packed.scales_shape()), (Some(4), Some([1, 3, 5])));
        assert_eq!(packed.to_string(), "f16 (1, 100, 3, 96), a scale for each 128 rows, 4 packed sequences");
        let (tensor, dim) = (TensorName::X, Dim::Batch);
        let batch = ProblemError::DimMismatch { tensor, dim, given: 2, expected: 1 };
        assert_eq!(refused(spec().packed(4)), batch.into());
        for scaling in [Scaling::Tensor, Scaling::Channel, Scaling::Given(1.0), Scaling::Heads { heads: 1 }] {
            let error = refused(one().scaling(scaling).packed(4));
            assert_eq!(error, QuantizeProblemError::PackedScaling { scaling });
        }
        let transposed = ProblemError::TransposedV { dtype: Dtype::E4m3, packed: true };
        assert_eq!(refused(one().transposed().packed(4)), transposed.into());
        // The longest sequence is data.
        let rotary = |first| Rotary { positions: Positions::From(first), ..ROTARY };
        assert!(one().packed(4).rotary(rotary(109)).validate().is_ok());
        let beyond = QuantizeProblemError::Positions { last: 110, rows: 110 };
        assert_eq!(refused(one().packed(4).rotary(rotary(110))), beyond);
    }

    #[test]
    fn heads_may_share_a_scale() {
        let shape = |spec: QuantizeSpec| spec.validate().unwrap().scales_shape();
        let of_heads = |heads| spec().scaling(Scaling::Heads { heads });
        let of_tensor = spec().scaling(Scaling::Tensor);
        assert_eq!([1, 3].map(|heads| shape(of_heads(heads))), [Some([2, 3, 1]), Some([2, 1, 1])]);
        assert_eq!(shape(of_tensor), Some([1, 1, 1]));
        for given in [0, 2, 6] {
            assert_eq!(refused(of_heads(given)), QuantizeProblemError::ScaleHeads { given, heads: 3 });
        }
        let texts = [of_heads(1), of_heads(3), of_tensor].map(|spec| spec.validate().unwrap().to_string());
        assert_eq!(texts[0], "f16 (2, 100, 3, 96), a scale for each head");
        assert!(texts[1].ends_with(", a scale for each 3 heads") && texts[2].ends_with(", a scale for all"));
    }

    #[test]
    fn channels_have_scales_and_means() {
        let of_channels = spec().scaling(Scaling::Channel);
        let problem = of_channels.validate().unwrap();
        assert_eq!((problem.scales_shape(), problem.mean_shape()), (Some([2, 3, 96]), Some([2, 3, 96])));
        assert_eq!(spec().validate().unwrap().mean_shape(), None);
        assert_eq!(problem.to_string(), "f16 (2, 100, 3, 96), a scale and a mean for each channel");
        let signs = Signs { leading: [1; 8], between: [2; 8] };
        for mixed in [of_channels.rotary(ROTARY), of_channels.signs(signs)] {
            assert_eq!(refused(mixed), QuantizeProblemError::MixedChannels);
        }
    }

    #[test]
    fn bad_requests_are_refused() {
        let x = QuantizeSpec::contiguous(Dtype::F32, SHAPE);
        assert_eq!(refused(x), QuantizeProblemError::Input { given: Dtype::F32 });
        let codes = QuantizeSpec { codes: spec().x, ..spec() };
        assert_eq!(refused(codes), QuantizeProblemError::Codes { given: Dtype::F16 });
        let other = QuantizeSpec::contiguous(Dtype::F16, Shape { heads: 4, ..SHAPE });
        let (tensor, dim) = (TensorName::Codes, Dim::Heads);
        let mismatch = ProblemError::DimMismatch { tensor, dim, given: 4, expected: 3 };
        assert_eq!(refused(QuantizeSpec { codes: other.codes, ..spec() }), mismatch.into());
        for given in [1, 17, 24, 72, 255, 257, 264, 272] {
            let spec = QuantizeSpec::contiguous(Dtype::F16, Shape { head_dim: given, ..SHAPE });
            assert_eq!(refused(spec), QuantizeProblemError::HeadDim { given });
        }
        let text = QuantizeProblemError::HeadDim { given: 17 }.to_string();
        assert_eq!(text, "x has head_dim 17, not a multiple of 16 up to 256");
        let mut odd = spec();
        odd.codes.strides.batch += 8;
        let (tensor, dim, given) = (TensorName::Codes, Dim::Batch, odd.codes.strides.batch);
        assert_eq!(refused(odd), ProblemError::StrideMultiple { tensor, dim, given, multiple: 16 }.into());
        assert_eq!(
            refused(spec().scaling(Scaling::Block { rows: 32 })),
            QuantizeProblemError::BlockRows { given: 32 }
        );
        for given in [0.0, -1.0, f32::INFINITY, 1e20, 1e-20] {
            assert_eq!(refused(spec().scaling(Scaling::Given(given))), QuantizeProblemError::Scale { given });
        }
        assert!(matches!(
            refused(spec().scaling(Scaling::Given(f32::NAN))),
            QuantizeProblemError::Scale { .. }
        ));
    }

    #[test]
    fn transposed_codes_are_contiguous_and_whole_rows_of_keys() {
        let bytes = |spec: QuantizeSpec| spec.validate().unwrap().codes_bytes().0;
        assert_eq!(bytes(spec()), 2 * 100 * 3 * 96);
        assert_eq!(bytes(spec().transposed()), 2 * 3 * 96 * 128);
        let mut gaps = spec();
        gaps.codes.strides.heads = 112;
        gaps.codes.strides.seqlen = 3 * 112;
        gaps.codes.strides.batch = 100 * 3 * 112;
        assert!(gaps.validate().is_ok());
        let (dim, given, expected) = (Dim::Batch, 33600, 28800);
        assert_eq!(refused(gaps.transposed()), QuantizeProblemError::CodesStride { dim, given, expected });
        // Strides that lead nowhere mean nothing.
        let mut one = QuantizeSpec::contiguous(Dtype::F16, Shape { batch: 1, ..SHAPE }).transposed();
        one.codes.strides.batch = 16;
        assert!(one.validate().is_ok());
        // 2^60 bytes in rows, 2^66 of whole rows of keys.
        let shape = Shape { batch: 1 << 30, seqlen: 1, heads: 1 << 25, head_dim: 16 };
        let large = QuantizeSpec::contiguous(Dtype::F16, shape);
        assert!(large.validate().is_ok());
        let (tensor, shape) = (TensorName::Codes, Shape { seqlen: 128, ..shape });
        assert_eq!(refused(large.transposed()), ProblemError::TooLarge { tensor, shape }.into());
    }

    #[test]
    fn rotations_need_a_table_for_every_position() {
        assert!(spec().rotary(ROTARY).validate().is_ok());
        for given in [0, 24, 112] {
            let error = refused(spec().rotary(Rotary { rotary_dim: given, ..ROTARY }));
            assert_eq!(error, QuantizeProblemError::RotaryDim { given, head_dim: 96 });
        }
        let beyond = Rotary { positions: Positions::From(11), ..ROTARY };
        assert_eq!(refused(spec().rotary(beyond)), QuantizeProblemError::Positions { last: 110, rows: 110 });
        let listed = Rotary { positions: Positions::Listed, table_rows: 1, ..ROTARY };
        assert!(spec().rotary(listed).validate().is_ok());
        let none = Rotary { table_rows: 0, ..listed };
        assert_eq!(refused(spec().rotary(none)), QuantizeProblemError::Positions { last: 0, rows: 0 });
    }

    #[test]
    fn it_says_what_it_does() {
        let problem = spec().rotary(ROTARY).signs(Signs { leading: [1; 8], between: [2; 8] });
        assert_eq!(
            problem.validate().unwrap().to_string(),
            "f16 (2, 100, 3, 96), interleaved rotary embedding of 32, Hadamard, a scale for each 128 rows"
        );
        assert_eq!(
            spec().scaling(Scaling::Given(0.5)).transposed().validate().unwrap().to_string(),
            "f16 (2, 100, 3, 96), scale 0.5, transposed"
        );
    }
}
