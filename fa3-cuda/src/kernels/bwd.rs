//! The backward pass: two or three kernels, in one of three forms, and one more if query heads have sinks.
//!
//! ```text
//! stats   D = rowsum(dO ∘ O) - dLSE                                          of every row
//! dkv     P = exp(S - LSE)   dV = Pᵀ dO   dS = P ∘ (dP - D)   dK = dSᵀ Q     a tile of keys after the other
//! dq      P = exp(S - LSE)                dS = P ∘ (dP - D)   dQ = dS K      a tile of rows after the other
//! ```
//!
//! with S = softmax_scale · Q Kᵀ and dP = dO Vᵀ; dQ and dK are multiplied by softmax_scale at the end. No CTA adds to
//! what another one has written, so that gradients are the same bits in every run.
//!
//! In the other forms the dkv kernel computes its part of dQ, too, and adds it to sums in f32, as the paper's Algorithm
//! 3 (arXiv 2407.08608) does. If tiles add in any order, a kernel follows that rounds the sums. If they add from the
//! last keys to the first, dQ is the same bits in every run here, too, and the last tile to add to a row writes dQ.
//!
//! With sinks P has a column more, whose gradient is dsink = Σ exp(sink - LSE) · (0 - D) over the rows: the last
//! kernel computes it from the statistics of rows. LSE has the sink in it, so that P is right as it is.
//!
//! Under a mask of intervals, which blocks of rows see a tile of keys is data: two kernels before find these blocks,
//! and split tiles that many of them see. One behind adds up the gradients of their parts.
//!
//! The dkv kernel computes Sᵀ and dPᵀ: as an operand of the next product Pᵀ then stays in the registers in which it was
//! computed. To it keys are rows and queries columns, and the mask is transposed.

// What a launch is.
mod arguments;
pub mod buffers;
mod params;
mod program;
mod scratch;
mod spec;

// The kernels.
mod dkv;
mod dq;
mod join;
mod seeing;
mod sink;
mod splits;
mod stats;
mod sums;

// What kernels share.
mod gradients;
mod summaries;

pub use super::parts::lookup::SequenceForm;
pub use super::parts::row_blocks::RowsForm;
pub use program::program;
pub use spec::{BwdSpec, Cleared, JoinSpec, PartSpec, RoundSpec, SeeingSpec, StatsSpec};

use fa3_ir::lang::Kernel;

use super::KernelSpec;

impl KernelSpec for BwdSpec {
    /// Builds the kernel. The spec must be that of a plan.
    fn kernel(&self) -> Kernel {
        match self {
            BwdSpec::Stats(spec) => stats::kernel(spec),
            BwdSpec::Seeing(spec) => seeing::kernel(spec),
            BwdSpec::Splits => splits::kernel(),
            BwdSpec::Dkv(spec) => dkv::kernel(spec),
            BwdSpec::Join(spec) => join::kernel(spec),
            BwdSpec::Dq(spec) => dq::kernel(spec),
            BwdSpec::Round(spec) => sums::kernel(spec),
            BwdSpec::Sink(sequences) => sink::kernel(*sequences),
        }
    }
}
