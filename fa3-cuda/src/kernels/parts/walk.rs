//! The way in which the CTAs of a forward kernel find their work tiles.

use fa3_ir::lang::*;
use fa3_sched::{SeqLens, Tiling, VisibleKeys};

use super::geometry::keys;
use super::lookup::Lookup;
use super::shares::Shares;
use crate::kernels::params::{InKernel, Pass, Side};

/// The arguments from which a launch's work tiles follow.
#[derive(Clone, Copy)]
pub(crate) enum Walk<S: Side> {
    /// The CTAs take tiles from a tile scheduler.
    Tiles(Lookup<S>),
    /// Each CTA takes an equal share of all keys (split-KV).
    Shares(Shares<S>),
}

impl<A: Side> Walk<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Walk<B> {
        match self {
            Walk::Tiles(lookup) => Walk::Tiles(lookup.pass(by)),
            Walk::Shares(shares) => Walk::Shares(shares.pass(by)),
        }
    }
}

impl<'k> Walk<InKernel<'k>> {
    /// The tile sizes and the mask.
    pub(crate) fn tiling(&self) -> &Tiling<U32<'k>> {
        match self {
            Walk::Tiles(lookup) => lookup.tiling(),
            Walk::Shares(shares) => &shares.tiling,
        }
    }

    /// The keys that query row `row` may see in a sequence of lengths `lens`; unspecified for a row beyond the end.
    #[track_caller]
    pub(crate) fn keys(&self, row: U32<'k>, lens: SeqLens<U32<'k>>) -> VisibleKeys<U32<'k>> {
        keys(self.tiling(), row, lens)
    }
}
