//! Quantization of a tensor to e4m3: the problem, validated.

mod scaling;

use std::fmt;

pub use scaling::{CHANNEL_GROUPS, CHANNEL_ROWS, Scaling};

use crate::{
    Bytes, Dim, Dtype, Positions, ProblemError, Rotary, ScaleBlocks, Sequences, Shape, TensorDesc,
    TensorName, ValueLayout, problem::check_sequences, rotary::ROTARY_MULTIPLE, setters,
};

/// The largest head dimension of a quantization.
const HEAD_DIM_LIMIT: usize = 256;

/// The head dimension is a multiple of this.
const HEAD_DIM_MULTIPLE: usize = Dtype::E4m3.row_multiple();

/// The signs of incoherent processing: bit i of word i / 32 is set where entry i is negated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Signs {
    /// Before the transform of the leading entries.
    pub leading: [u32; HEAD_DIM_LIMIT / 32],
    /// Between the transforms of the leading and of the trailing entries; unused if head_dim is a power of two.
    pub between: [u32; HEAD_DIM_LIMIT / 32],
}

/// A caller's request, not yet checked: plain data that [`QuantizeProblem::new`] takes.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block
/// ```
///
/// or, with [`Scaling::Channel`], y = x - the mean of its channel, and the scale belongs to the channel.
///
/// A constructor takes the tensors, setters change the defaults.
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
#[must_use]
#[non_exhaustive]
pub struct QuantizeSpec {
    /// The tensor, f16 or bf16.
    pub x: TensorDesc,
    /// The tensor of codes, e4m3, of the same shape. Contiguous if transposed.
    pub codes: TensorDesc,
    /// The layout of the codes in memory.
    pub layout: ValueLayout,
    /// The source of the scales.
    pub scaling: Scaling,
    /// The rotation, if any.
    pub rotary: Option<Rotary>,
    /// The signs of incoherent processing, if any. Q and K take the same signs.
    pub signs: Option<Signs>,
    /// The number of packed sequences, if the tensor is packed. Then no block has rows of two sequences. The sequences'
    /// first rows are data.
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

    setters! {
        /// Transposes the codes, as FP8 products read V.
        transposed() { layout: ValueLayout::Transposed }

        /// Rotates each row first.
        rotary(rotary: Rotary) { rotary: Some(rotary) }

        /// Transforms each row before it is quantized.
        signs(signs: Signs) { signs: Some(signs) }

        /// Sets the source of the scales.
        scaling(scaling: Scaling) { scaling }

        /// Says that the tensor, of batch 1, has `sequences` packed sequences. Rows behind the last sequence have codes
        /// 0.
        packed(sequences: usize) { packed: Some(sequences) }
    }

    /// Calls [`QuantizeProblem::new`].
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
    #[error("scales of channels exclude rotation and transform, which mix channels")]
    MixedChannels,
    #[error("rotary_dim {given} is not a positive multiple of {ROTARY_MULTIPLE} up to head_dim {head_dim}")]
    RotaryDim { given: usize, head_dim: usize },
    #[error("the last row is at position {last}, the tables of cosines and sines have {rows} rows")]
    Positions { last: usize, rows: usize },
    #[error("packed sequences have scales for blocks of rows, not {scaling}")]
    PackedScaling { scaling: Scaling },
}

/// A quantization that can be computed: shapes agree, strides are usable, positions lie within the tables. Later layers
/// check none of this again.
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
        codes.shape.check(TensorName::Codes, x.shape)?;
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

    /// The layout of the codes in memory.
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

    /// The signs of incoherent processing, if any.
    pub fn signs(&self) -> Option<Signs> {
        self.0.signs
    }

    /// The source of the scales.
    pub fn scaling(&self) -> Scaling {
        self.0.scaling
    }

    /// The number of packed sequences, if the tensor is packed.
    pub fn packed(&self) -> Option<usize> {
        self.0.packed
    }

    /// Shape of the tensor of scales, f32 and contiguous: (batch, heads, blocks) for blocks, which [`ScaleBlocks`]
    /// numbers in packed sequences; (batch, groups, 1) for groups of heads; (1, 1, 1) for the tensor; (batch, heads,
    /// head_dim) for channels. `None` if the scale is given.
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

/// Checks that sequences can be packed into this tensor.
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

/// Checks that codes of this tensor can be transposed.
fn check_transposed(codes: TensorDesc) -> Result<(), QuantizeProblemError> {
    let shape = codes.shape;
    if let Some((dim, given, expected)) = ValueLayout::other_stride(&codes) {
        return Err(QuantizeProblemError::CodesStride { dim, given, expected });
    }
    // Extents of 0 count as 1: ndarray multiplies the other extents even if an array is empty.
    let shape = Shape { batch: shape.batch.max(1), seqlen: shape.seqlen.max(1), ..shape };
    if ValueLayout::transposed_bytes(shape).0 > i64::MAX as u64 {
        let shape = Shape { seqlen: ValueLayout::keys_of_row(shape.seqlen), ..shape };
        return Err(ProblemError::TooLarge { tensor: TensorName::Codes, shape }.into());
    }
    Ok(())
}

fn check_rotary(rotary: Rotary, shape: Shape, packed: bool) -> Result<(), QuantizeProblemError> {
    let Rotary { style: _, rotary_dim, table_rows, positions } = rotary;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(ROTARY_MULTIPLE) || rotary_dim > shape.head_dim {
        return Err(QuantizeProblemError::RotaryDim { given: rotary_dim, head_dim: shape.head_dim });
    }
    let limit = i32::MAX as usize;
    if table_rows > limit {
        let (tensor, dim) = (TensorName::Cos, Dim::Seqlen);
        return Err(ProblemError::DimTooLarge { tensor, dim, given: table_rows, limit }.into());
    }
    let last = match positions {
        // Positions from a list are checked by the kernel; a table needs at least one row to be read.
        Positions::Listed => 0,
        // The lengths of packed sequences are data: as with listed positions, a row beyond the table has no position.
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
        if let Some(Rotary { style, rotary_dim, table_rows: _, positions: _ }) = self.rotary() {
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
mod tests;
