//! Problems: computations as plain data, without tensors.
//!
//! A specification is a caller's request. Its `validate` makes a problem of it, which is correct by type, or returns an
//! error with the numbers. The builders of this crate make both from arrays: [`Attention::problem`],
//! [`Attention::backward_problem`], [`Fp8::problem`], [`Quantize::problem`], [`Combine::problem`]. For tensors in a
//! GPU's memory, start with a specification: see `fa3::cuda`.
//!
//! ```
//! use fa3::problem::{Dtype, ProblemSpec, Shape};
//!
//! // (batch, seqlen, heads, head_dim); four query heads share one key/value head
//! let q = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 128 };
//! let problem = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: 2, ..q }).causal().validate()?;
//! assert_eq!(problem.lse_shape(), [2, 8, 4096]);
//! # Ok::<(), fa3::problem::ProblemError>(())
//! ```
//!
//! [`Attention::problem`]: crate::Attention::problem
//! [`Attention::backward_problem`]: crate::Attention::backward_problem
//! [`Fp8::problem`]: crate::Fp8::problem
//! [`Quantize::problem`]: crate::Quantize::problem
//! [`Combine::problem`]: crate::Combine::problem

pub mod hint;

pub use fa3_types::{
    AppendProblem, AppendProblemError, AppendRotary, AppendSpec, AppendedRows, BackwardProblem, BackwardSpec,
    CachedProblem, CachedProblemError, CachedSpec, CombineProblem, CombineProblemError, CombineSpec, Dtype,
    ExtraCache, Fp8Problem, Fp8ProblemError, Fp8Spec, KnownProblem, Partials, Positions, Problem,
    ProblemError, ProblemSpec, QkRotary, QuantizeProblem, QuantizeProblemError, QuantizeSpec, QueryPositions,
    Rotary, RotatedQueries, ScaleBlocks, SequenceBase, SequenceRows, Sequences, Shape, Signs, TensorDesc,
    TensorName, ValueLayout,
};
