//! Rings whose stage i goes back and forth between two warpgroups or warps: one hands it over, the other returns it.

use std::panic::Location;

use super::{EmptySlot, Ring};
use crate::lang::{B32, Tile, V, Var};

impl<'k, const N: usize> Ring<'k, N> {
    /// Stage `number` as a ring of its own, for a ring whose stages different warps fill or empty. A computed number is
    /// not checked.
    #[track_caller]
    pub fn stage(&self, number: V<'k, B32>) -> Ring<'k, N> {
        self.builder.watch().divide(self.watched);
        Ring { stages: 1, first: Some(number), ..self.clone() }
    }

    /// The state of a warp that hands the only stage of this ring to its consumer and gets it back with the consumer's
    /// results.
    #[track_caller]
    pub fn lender(&self) -> Lender<'k, N> {
        Lender { ring: self.clone(), parity: self.builder.var("parity", 0) }
    }
}

/// Hands over the only stage of a ring time after time. It has the stage at first.
#[derive(Debug)]
pub struct Lender<'k, const N: usize> {
    ring: Ring<'k, N>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> Lender<'k, N> {
    /// The stage, to be filled or not, and handed over by a commit. It must be here.
    #[track_caller]
    pub fn lend(&mut self) -> EmptySlot<'k, N> {
        let b = self.ring.builder;
        let due =
            b.watch().due(format!("a slot of ring {} is committed", self.ring.name), Location::caller());
        EmptySlot::new(self.ring.clone(), self.ring.only_stage(), due)
    }

    /// Waits until the stage is returned. Returns its tiles, with the consumer's results.
    #[track_caller]
    pub fn back(&mut self) -> [Tile<'_, 'k>; N] {
        let stage = self.ring.only_stage();
        let b = self.ring.builder;
        let _one = b.as_one();
        b.mbarrier_wait(self.ring.barrier(self.ring.empty, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        self.ring.tiles(stage)
    }
}
