//! Every kernel there is, by what its code depends on.

use fa3_ir::Kernel;

use super::bwd::{self, BwdSpec};
use super::fwd::{self, FwdSpec};
use super::transpose_v::{self, TransposeSpec};
use super::{ladder, quantize};

/// What a kernel is made from. Launches of equal specs share a kernel, so it is the key of the kernel cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Spec {
    /// The forward pass of attention.
    Forward(FwdSpec),
    /// The integers of its tiles as data.
    ForwardTiles(FwdSpec),
    /// V of e4m3 before it, transposed.
    TransposeV(TransposeSpec),
    /// A kernel of the backward pass of attention.
    Backward(BwdSpec),
    /// A tensor to e4m3.
    Quantize(quantize::Spec),
    /// Its scales, where they take another pass.
    Scales(quantize::scales::ScaleSpec),
    /// A kernel of the ladder.
    Ladder(ladder::Spec),
}

impl Spec {
    /// Builds the kernel.
    pub fn kernel(&self) -> Kernel {
        match self {
            Spec::Forward(spec) => fwd::kernel(spec),
            Spec::ForwardTiles(spec) => fwd::tiles_kernel(spec),
            Spec::TransposeV(spec) => transpose_v::kernel(spec),
            Spec::Backward(spec) => bwd::kernel(spec),
            Spec::Quantize(spec) => quantize::kernel(spec),
            Spec::Scales(spec) => quantize::scales::kernel(spec),
            Spec::Ladder(spec) => spec.kernel(),
        }
    }
}
