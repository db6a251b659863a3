//! The reasons why this crate rejects quantized tensors or requests, with the numbers.

use fa3_types::{Dim, TensorName, UnknownFeature};

/// The reasons why this crate rejects a tensor or a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum QuantError {
    #[error("the tensor has batch {given}, but its sequences need {expected}")]
    Batch { given: usize, expected: usize },
    #[error("sequence {sequence} ends at row {end}, past the {rows} rows of the tensor")]
    SequenceEnd { sequence: usize, end: usize, rows: usize },
    #[error("the tensor has {dim} 0")]
    ZeroDim { dim: Dim },
    #[error("a block of 0 rows cannot hold a scale")]
    EmptyBlock,
    #[error("{given} scales were given where {expected} are needed")]
    ScaleCount { given: usize, expected: usize },
    #[error("scales of channels go with means: use Channels")]
    ChannelScales,
    #[error("means of channels are of shape {mean:?}, scales or the tensor's channels of {scale:?}")]
    ChannelShape { mean: (usize, usize, usize), scale: (usize, usize, usize) },
    #[error("scale {index} is {given}, not positive, normal and finite")]
    Scale { index: usize, given: f32 },
    #[error("rotary_dim {given} is not positive and even")]
    RotaryDim { given: usize },
    #[error("rotary base {given} is not positive and finite")]
    RotaryBase { given: f64 },
    #[error("cosines are {cos:?} and sines {sin:?}, expected (positions, rotary_dim / 2) for both")]
    RopeTable { cos: (usize, usize), sin: (usize, usize) },
    #[error("rotary_dim {rotary_dim} is larger than head_dim {head_dim}")]
    RotaryDimTooLarge { rotary_dim: usize, head_dim: usize },
    #[error("{given} first positions were given for {sequences} sequences")]
    PositionCount { given: usize, sequences: usize },
    #[error("positions of {given} rows were given for a tensor of {rows}")]
    PositionRows { given: usize, rows: usize },
    #[error("the transform is of head_dim {given}, the tensor of {expected}")]
    TransformDim { given: usize, expected: usize },
    #[error("{tensor} has {dim} {given}, the problem has {expected}")]
    DimMismatch { tensor: TensorName, dim: Dim, given: usize, expected: usize },
    #[error("{tensor} was quantized with other sequences than the problem's")]
    Sequences { tensor: TensorName },
    #[error("the number of keys between promotions is {given}, not a positive multiple of {multiple}")]
    PromotionKeys { given: usize, multiple: usize },
    #[error("the key block has {given} rows, not a positive multiple of {multiple}")]
    KeyBlock { given: usize, multiple: usize },
    #[error("{tensor} has a scale every {rows} rows, not a multiple of the key block's {key_block}")]
    BlockMismatch { tensor: TensorName, rows: usize, key_block: usize },
    #[error("{given} sinks are given, the problem has {expected}")]
    Sinks { given: usize, expected: usize },
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    #[error("{tensor} has more than one scale; standard attention takes one scale a tensor")]
    NotPerTensor { tensor: TensorName },
}
