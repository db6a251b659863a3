//! Operations that can be named on the command line.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{
    gemm, gemm_cluster, gemm_fp8, gemm_pipeline, gemm_simple, gemm_split_k, row_softmax, tile_copy,
    transpose, vector_add,
};
use fa3_ir::Program;
use fa3_sched::{backward, cached, forward};
use fa3_types::{Problem, ProblemError, ScoreError};

use super::backward::BackwardArgs;
use super::forward::ForwardArgs;
use super::ladder::{CopyArgs, GemmArgs, GridArgs, MatrixArgs, SizeArgs, SplitArgs, VectorArgs};
use super::reference::{Plain, Reference};
use crate::args::cache::CacheError;

/// An operation and its problem.
#[derive(Debug, clap::Subcommand)]
#[command(rename_all = "snake_case")]
pub(super) enum Operation {
    /// O = softmax(Q K^T) V, the forward pass of attention
    #[command(alias = "fwd")]
    Forward(ForwardArgs),
    /// dQ, dK and dV from dO and dLSE, the backward pass of attention
    #[command(alias = "bwd")]
    Backward(BackwardArgs),
    /// z = x + y, one element per thread
    VectorAdd(VectorArgs),
    /// y = softmax(x) of each row, one row per warp
    RowSoftmax(MatrixArgs<1, 1>),
    /// y = x by tensor copies, one 64 x 64 tile per CTA
    TileCopy(CopyArgs),
    /// y = x transposed, one 64 x 64 tile per CTA
    Transpose(MatrixArgs<8, 8>),
    /// C = A B^T by one warpgroup per tile, without overlap of loads and products
    GemmSimple(GemmArgs<2>),
    /// C = A B^T by one warpgroup per tile, loads ahead of products
    GemmPipeline(GemmArgs<2>),
    /// C = A B^T by a producer and two consumers, persistent
    Gemm {
        #[command(flatten)]
        gemm: GemmArgs<8>,
        #[command(flatten)]
        grid: GridArgs<1>,
    },
    /// C = A B^T by clusters of two CTAs that load for each other
    GemmCluster {
        #[command(flatten)]
        gemm: GemmArgs<8>,
        #[command(flatten)]
        grid: GridArgs<2>,
    },
    /// C = C + A B^T, split-K: parts of K are added by copies
    GemmSplitK {
        #[command(flatten)]
        gemm: GemmArgs<4>,
        #[command(flatten)]
        parts: SplitArgs,
    },
    /// C = A B^T of e4m3, with two-level accumulation
    #[command(name = "gemm_fp8")]
    GemmFp8 {
        #[command(flatten)]
        size: SizeArgs<8, 16>,
        #[command(flatten)]
        grid: GridArgs<1>,
    },
}

/// Why an operation has no program.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OperationError {
    #[error("{rows} x {cols} elements are more than {limit}")]
    Elements { rows: u32, cols: u32, limit: u32 },
    #[error("nothing is to be computed: {problem}")]
    Empty { problem: Box<Problem> },
    #[error(transparent)]
    Problem(#[from] ProblemError),
    #[error(transparent)]
    Score(#[from] ScoreError),
    #[error(transparent)]
    Plan(#[from] forward::PlanError),
    #[error(transparent)]
    BackwardPlan(#[from] backward::PlanError),
    #[error(transparent)]
    Cache(#[from] CacheError),
    #[error(transparent)]
    CachePlan(#[from] cached::PlanError),
}

impl Operation {
    /// The reference that the operation's results are checked against.
    pub(super) fn reference(&self) -> Result<Reference, OperationError> {
        Ok(match self {
            Operation::Forward(forward) => forward.reference()?,
            Operation::Backward(backward) => backward.reference()?,
            Operation::VectorAdd(_) => Reference::Plain(Plain::Sum),
            Operation::RowSoftmax(_) => Reference::Plain(Plain::Softmax),
            Operation::TileCopy(_) => Reference::Plain(Plain::Copy),
            Operation::Transpose(_) => Reference::Plain(Plain::Transpose),
            Operation::GemmSimple(_)
            | Operation::GemmPipeline(_)
            | Operation::Gemm { .. }
            | Operation::GemmCluster { .. }
            | Operation::GemmSplitK { .. }
            | Operation::GemmFp8 { .. } => Reference::Plain(Plain::Product),
        })
    }

    pub(super) fn program(&self) -> Result<Program<Spec>, OperationError> {
        Ok(match self {
            Operation::Forward(forward) => forward.program()?,
            Operation::Backward(backward) => backward.program()?,
            Operation::VectorAdd(VectorArgs { n }) => vector_add::program(*n),
            Operation::RowSoftmax(MatrixArgs { rows, cols }) => {
                let (rows, cols, limit) = (*rows, *cols, u32::MAX);
                if rows.checked_mul(cols).is_none() {
                    return Err(OperationError::Elements { rows, cols, limit });
                }
                row_softmax::program(rows, cols)
            }
            Operation::TileCopy(copy) => tile_copy::program(copy.swizzle, copy.matrix.rows, copy.matrix.cols),
            Operation::Transpose(MatrixArgs { rows, cols }) => transpose::program(*rows, *cols),
            Operation::GemmSimple(gemm) => gemm_simple::program(gemm.elem(), gemm.size()),
            Operation::GemmPipeline(gemm) => gemm_pipeline::program(gemm.elem(), gemm.size()),
            Operation::Gemm { gemm, grid } => gemm::program(gemm.elem(), gemm.size(), grid.ctas),
            Operation::GemmCluster { gemm, grid } => {
                gemm_cluster::program(gemm.elem(), gemm.size(), grid.ctas)
            }
            Operation::GemmSplitK { gemm, parts } => {
                gemm_split_k::program(gemm.elem(), gemm.size(), parts.splits)
            }
            Operation::GemmFp8 { size, grid } => gemm_fp8::program(size.size(), grid.ctas),
        })
    }
}
