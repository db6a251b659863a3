//! Rings whose stage i belongs to warpgroup i alone, which fills it or empties it time after time.

use std::panic::Location;

use super::{EmptySlot, FullSlot, Ring, Stage};
use crate::lang::{B32, V, Var};

impl<'k, const N: usize> Ring<'k, N> {
    /// Of a ring whose stage i is emptied by warpgroup i alone, the place of the one of this number: that stage, time
    /// after time. A number that is computed is not checked.
    #[track_caller]
    pub fn consumer_of_stage(&self, stage: V<'k, B32>) -> StageConsumer<'k, N> {
        StageConsumer { ring: self.clone(), stage, parity: self.builder.var("parity", 0) }
    }

    /// Of a ring whose stage i is filled by warpgroup i alone, the place of the one of this number: that stage, time
    /// after time. A number that is computed is not checked.
    #[track_caller]
    pub fn producer_of_stage(&self, stage: V<'k, B32>) -> StageProducer<'k, N> {
        StageProducer { ring: self.clone(), stage, parity: self.builder.var("parity", 1) }
    }
}

/// Fills one stage of a ring, by ordinary stores; each warp of the warpgroup whose stage it is has one.
#[derive(Debug)]
pub struct StageProducer<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: V<'k, B32>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> StageProducer<'k, N> {
    /// Waits until the stage is empty again.
    #[track_caller]
    pub fn acquire(&mut self) -> EmptySlot<'k, N> {
        let (ring, stage) = (self.ring.clone(), Stage::Number(self.stage));
        let b = ring.builder;
        let due = b.watch().due(format!("a slot of ring {} is committed", ring.name), Location::caller());
        let _one = b.as_one();
        b.mbarrier_wait(ring.barrier(ring.empty, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        EmptySlot::new(ring, stage, due)
    }
}

/// Empties one stage of a ring; each warp of the warpgroup whose stage it is has one.
#[derive(Debug)]
pub struct StageConsumer<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: V<'k, B32>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> StageConsumer<'k, N> {
    /// Waits until the stage is full again.
    #[track_caller]
    pub fn wait(&mut self) -> FullSlot<'k, N> {
        let (ring, stage) = (self.ring.clone(), Stage::Number(self.stage));
        let b = ring.builder;
        let _one = b.as_one();
        b.mbarrier_wait(ring.barrier(ring.full, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        FullSlot::new(ring, stage, Location::caller())
    }
}
