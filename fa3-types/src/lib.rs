//! Attention problems: their specification, their validation, and the arithmetic that all implementations share.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! Every other crate of the workspace starts from a [`Problem`]: tensor shapes and strides, sequence lengths, head
//! groups, mask, softmax scale and soft cap. A problem is validated once and correct by type afterwards.
//! [`Problem::new`] is the only place that says "bad shape". Nothing here computes attention, and nothing here knows a
//! device or an address.
//!
//! ```
//! use fa3_types::{Dtype, ProblemSpec, Shape};
//!
//! let q = Shape { batch: 2, seqlen: 512, heads: 8, head_dim: 128 };
//! let kv = Shape { heads: 2, ..q };
//! let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).causal().validate()?;
//! assert_eq!(problem.heads().group_size(), 4);
//! assert_eq!(problem.lse_shape(), [2, 8, 512]);
//!
//! let odd_heads = Shape { heads: 3, ..q };
//! let error = ProblemSpec::dense(Dtype::Bf16, q, odd_heads).validate().unwrap_err();
//! assert_eq!(error.to_string(), "heads_q 8 is not a multiple of heads_kv 3");
//! # Ok::<(), fa3_types::ProblemError>(())
//! ```
#![forbid(unsafe_code)]

// Shared arithmetic of host and kernel.
mod algebra;
mod apart;

// The parts of a problem.
mod dtype;
mod granularity;
mod heads;
mod intervals;
mod mask;
mod partials;
mod rotary;
mod scale_blocks;
mod score;
mod sequence_rows;
mod sequences;
mod tensor;
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
pub use fp8::{Fp8Problem, Fp8ProblemError, Fp8Spec, QkRotary};
pub use granularity::Granularity;
pub use heads::{HeadGrouping, Heads};
pub use intervals::{IntervalRows, Intervals, IntervalsOfRow};
pub use known::KnownProblem;
pub use mask::{Chunk, Lengths, Mask};
pub use partials::Partials;
pub use problem::{Feature, Known, Problem, UnknownFeature};
pub use quantize::{
    CHANNEL_GROUPS, CHANNEL_ROWS, QuantizeProblem, QuantizeProblemError, QuantizeSpec, Scaling, Signs,
};
pub use rotary::{Positions, RopeStyle, Rotary, rotate};
pub use scale_blocks::{ScaleBlocks, first_block};
pub use score::{SoftCap, SoftmaxScale, softcap};
pub use sequence_rows::SequenceRows;
pub use sequences::Sequences;
pub use spec::ProblemSpec;
pub use tensor::{Shape, Strides, TensorDesc};
pub use units::{Bytes, Elems};
pub use value_layout::ValueLayout;

/// The README's Rust code, as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
