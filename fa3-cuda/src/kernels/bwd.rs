//! The backward pass has one of three forms, of two or three kernels each. Sinks, and masks of intervals, add kernels.
//!
//! ```text
//! stats   D = rowsum(dO ∘ O) - dLSE                                          of every row
//! dkv     P = exp(S - LSE)   dV = Pᵀ dO   dS = P ∘ (dP - D)   dK = dSᵀ Q     one tile of keys after another
//! dq      P = exp(S - LSE)                dS = P ∘ (dP - D)   dQ = dS K      one tile of rows after another
//! ```
//!
//! with S = softmax_scale · Q Kᵀ and dP = dO Vᵀ; dQ and dK are multiplied by softmax_scale at the end. In this form no
//! CTA adds to memory that another CTA has written, so gradients have the same bits in every run.
//!
//! In the other two forms there is no dq kernel: the dkv kernel adds its part of dQ to sums in f32, as the paper's
//! Algorithm 3 (arXiv 2407.08608) does. If tiles add in any order, a further kernel rounds the sums at the end. If
//! tiles add from the last keys to the first (deterministic), dQ has the same bits in every run, and the last tile that
//! adds to a row writes dQ.
//!
//! A sink is one more column of P, whose gradient is dsink = Σ exp(sink - LSE) · (0 - D) over the rows. The last kernel
//! computes it from the statistics of rows. LSE includes the sink, so the other kernels need not know it.
//!
//! Where tables of a function of scores have gradients, the dq kernel also writes sums over the 16 rows of each warp,
//! and sums of keys and diagonals, which another kernel adds up. One more kernel for each table computes its gradient:
//! from these sums, or, if each score reads an element of its own, by products of its own.
//!
//! Under a mask of intervals, which blocks of rows see a tile of keys is data. Two kernels before dkv find these
//! blocks, and split tiles that many blocks see. A kernel after dkv adds up the gradients of the parts of each split
//! tile. Over packed sequences, dkv finds the blocks itself, and no tile is split.
//!
//! The dkv kernel computes Sᵀ and dPᵀ, so that Pᵀ stays in its registers as an operand of the next product. In this
//! kernel keys are rows and queries are columns, and the mask is transposed.

// The launch: parameters, buffers and program.
mod arguments;
pub mod buffers;
mod params;
mod program;
mod scratch;
mod spec;

// The kernels.
mod bias;
mod dkv;
mod dq;
mod dq_accum;
mod dtable;
mod lines;
mod pairs;
mod q_blocks;
mod reduce;
mod sink;
mod split_tiles;
mod stats;

// Code that kernels share.
mod elements;
mod gradients;
mod hidden;
mod interval_columns;
mod line_sums;
mod read_sums;
mod row_stats;

pub use super::parts::lookup::SequenceForm;
pub use super::parts::row_blocks::RowsForm;
pub use bias::BiasSpec;
pub use dtable::TableSpec;
pub use lines::LinesSpec;
pub use program::program;
pub use spec::{BwdSpec, Cleared, PartSpec, QBlocksSpec, ReduceSpec, RoundSpec, StatsSpec};

use fa3_ir::lang::Kernel;

use super::KernelSpec;

impl KernelSpec for BwdSpec {
    /// Builds the kernel of a spec that comes from a plan.
    fn kernel(&self) -> Kernel {
        match self {
            BwdSpec::Stats(spec) => stats::kernel(spec),
            BwdSpec::QBlocks(spec) => q_blocks::kernel(spec),
            BwdSpec::SplitTiles => split_tiles::kernel(),
            BwdSpec::Dkv(spec) => dkv::kernel(spec),
            BwdSpec::Reduce(spec) => reduce::kernel(spec),
            BwdSpec::Dq(spec) => dq::kernel(spec),
            BwdSpec::Round(spec) => dq_accum::kernel(spec),
            BwdSpec::Lines(spec) => lines::kernel(spec),
            BwdSpec::Bias(spec) => bias::kernel(spec),
            BwdSpec::Table(spec) => dtable::kernel(spec),
            BwdSpec::Sink(sequences) => sink::kernel(*sequences),
        }
    }
}
