#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod names;
mod setters;

// Shared arithmetic of host and kernel.
mod algebra;
mod apart;

// The parts of a problem.
mod dtype;
mod extra_cache;
mod granularity;
mod heads;
mod intervals;
mod lse_form;
mod mask;
mod partials;
mod rotary;
mod scale_blocks;
mod score;
mod score_expr;
mod sequence_rows;
mod sequences;
mod tensor;
mod token_scales;
mod units;
mod value_layout;

// Whole problems, validated.
mod append;
mod backward;
mod cached;
mod combine;
mod error;
mod flops;
mod fp8;
mod known;
mod problem;
mod quantize;
mod spec;

pub use algebra::{Int, Real};
pub use apart::are_apart;
pub use append::{
    AppendProblem, AppendProblemError, AppendRotary, AppendSpec, AppendedRows, QueryPositions,
    RotatedQueries, SequenceBase,
};
pub use backward::{BackwardProblem, BackwardSpec};
pub use cached::{CachedProblem, CachedProblemError, CachedSpec};
pub use combine::{CombineProblem, CombineProblemError, CombineSpec};
pub use dtype::{Dtype, UnknownDtype};
pub use error::{Dim, ProblemError, TensorName};
pub use extra_cache::ExtraCache;
pub use fp8::{Fp8Problem, Fp8ProblemError, Fp8Spec, QkRotary};
pub use granularity::Granularity;
pub use heads::{HeadGrouping, Heads};
pub use intervals::{BlockSide, IntervalRows, Intervals, IntervalsOfRow};
pub use known::KnownProblem;
pub use lse_form::LseForm;
pub use mask::{Chunk, Lengths, Mask};
pub use partials::Partials;
pub use problem::{Feature, Known, Problem, SCALED_COLUMNS, UnknownFeature};
pub use quantize::{
    CHANNEL_GROUPS, CHANNEL_ROWS, QuantizeProblem, QuantizeProblemError, QuantizeSpec, Scaling, Signs,
};
pub use rotary::{Positions, RopeStyle, Rotary, rotate};
pub use scale_blocks::{ScaleBlocks, first_block};
pub use score::{SoftCap, SoftmaxScale, softcap};
pub use score_expr::{
    Dual, HostReal, LineAxis, OpenScore, ReadBy, ScoreBlock, ScoreError, ScoreExpr, ScoreForm, ScoreFunction,
    ScoreGradients, ScoreIndex, ScoreInputs, ScoreProduct, ScoreRead, ScoreReal, ScoreRow, ScoreRows,
    ScoreSlope, ScoreTable, ScoreTile, ScoreValue, TableRead,
};
pub use sequence_rows::SequenceRows;
pub use sequences::Sequences;
pub use spec::ProblemSpec;
pub use tensor::{Shape, Strides, TensorDesc};
pub use token_scales::TokenScales;
pub use units::{Bytes, Elems};
pub use value_layout::ValueLayout;
