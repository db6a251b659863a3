//! Rings whose stage i goes to and fro between two warpgroups or warps: one lends it, the other gives it back.

use std::panic::Location;

use super::{EmptySlot, FullSlot, Ring, Rounds, Stage};
use crate::lang::{B32, Tile, V, Var};

impl<'k, const N: usize> Ring<'k, N> {
    /// Of a ring whose stage i one warp alone lends, the place of the one of this number. A number that is computed is
    /// not checked.
    #[track_caller]
    pub fn lender_of_stage(&self, stage: V<'k, B32>) -> StageLender<'k, N> {
        self.builder.watch().divide(self.watched);
        StageLender { ring: self.clone(), stage, parity: self.builder.var("parity", 0) }
    }

    /// Of a ring whose stage i is lent to one warpgroup or warp alone, the place of the one of this number, which
    /// gives it back once in so many of these rounds, a power of 2. A number that is computed is not checked.
    #[track_caller]
    pub fn borrower_of_stage(
        &self,
        stage: V<'k, B32>,
        rounds: Rounds<'k>,
        once_in: u32,
    ) -> StageBorrower<'k, N> {
        self.builder.watch().divide(self.watched);
        StageBorrower { ring: self.clone(), stage, rounds, once_in }
    }
}

/// Lends a stage of a ring time after time. It has the stage at first.
#[derive(Debug)]
pub struct StageLender<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: V<'k, B32>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> StageLender<'k, N> {
    /// The stage, to be filled or not and lent by a commit. It must be here.
    #[track_caller]
    pub fn lend(&mut self) -> EmptySlot<'k, N> {
        let b = self.ring.builder;
        let due =
            b.watch().due(format!("a slot of ring {} is committed", self.ring.name), Location::caller());
        EmptySlot::new(self.ring.clone(), Stage::Number(self.stage), due)
    }

    /// Waits until the stage is given back. Its tiles, with what has been left there.
    #[track_caller]
    pub fn back(&mut self) -> [Tile<'_, 'k>; N] {
        let stage = Stage::Number(self.stage);
        let b = self.ring.builder;
        let _one = b.as_one();
        b.mbarrier_wait(self.ring.barrier(self.ring.empty, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        self.ring.tiles(stage)
    }
}

/// Borrows a stage of a ring time after time; each warp of those to which it is lent has one.
#[derive(Debug)]
pub struct StageBorrower<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: V<'k, B32>,
    rounds: Rounds<'k>,
    once_in: u32,
}

impl<'k, const N: usize> StageBorrower<'k, N> {
    /// Waits until the stage is lent. A release gives it back.
    #[track_caller]
    pub fn wait(&mut self) -> FullSlot<'k, N> {
        let stage = Stage::Number(self.stage);
        let b = self.ring.builder;
        let _one = b.as_one();
        b.mbarrier_wait(self.ring.barrier(self.ring.full, stage), self.rounds.parity(self.once_in, 0));
        FullSlot::new(self.ring.clone(), stage, Location::caller())
    }
}
