//! Rings whose stage i belongs to one warpgroup or warp alone, which fills it or empties it time after time.

use std::panic::Location;

use super::{EmptySlot, FullSlot, Ring, Stage};
use crate::Region;
use crate::lang::{B32, V, Var};

impl<'k, const N: usize> Ring<'k, N> {
    /// Of a ring whose stage i is emptied by one warpgroup or warp alone, the place of the one of this number: that
    /// stage, time after time. A number that is computed is not checked.
    #[track_caller]
    pub fn consumer_of_stage(&self, stage: V<'k, B32>) -> StageConsumer<'k, N> {
        StageConsumer(Only::new(self, stage, 0))
    }

    /// Of a ring whose stage i is filled by one warpgroup or warp alone, the place of the one of this number: that
    /// stage, time after time. A number that is computed is not checked.
    #[track_caller]
    pub fn producer_of_stage(&self, stage: V<'k, B32>) -> StageProducer<'k, N> {
        // Waiting for the phase before the first returns at once.
        StageProducer(Only::new(self, stage, 1))
    }
}

/// The only stage of a ring that somebody uses, and the parity of its phase.
#[derive(Debug)]
struct Only<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: V<'k, B32>,
    parity: Var<'k, B32>,
}

impl<'k, const N: usize> Only<'k, N> {
    #[track_caller]
    fn new(ring: &Ring<'k, N>, stage: V<'k, B32>, parity: u32) -> Only<'k, N> {
        Only { ring: ring.clone(), stage, parity: ring.builder.var("parity", parity) }
    }

    /// Waits until it is `full`, or empty, again.
    #[track_caller]
    fn again(&self, of: Region) -> Stage<'k> {
        let (ring, stage) = (&self.ring, Stage::Number(self.stage));
        ring.builder.mbarrier_wait(ring.barrier(of, stage), self.parity);
        self.parity.update(|parity| parity ^ 1);
        stage
    }
}

/// Fills one stage of a ring, by ordinary stores; each warp of those whose stage it is has one.
#[derive(Debug)]
pub struct StageProducer<'k, const N: usize>(Only<'k, N>);

impl<'k, const N: usize> StageProducer<'k, N> {
    /// Waits until the stage is empty again.
    #[track_caller]
    pub fn acquire(&mut self) -> EmptySlot<'k, N> {
        let StageProducer(only) = self;
        let b = only.ring.builder;
        let due =
            b.watch().due(format!("a slot of ring {} is committed", only.ring.name), Location::caller());
        let _one = b.as_one();
        let stage = only.again(only.ring.empty);
        EmptySlot::new(only.ring.clone(), stage, due)
    }
}

/// Empties one stage of a ring; each warp of those whose stage it is has one.
#[derive(Debug)]
pub struct StageConsumer<'k, const N: usize>(Only<'k, N>);

impl<'k, const N: usize> StageConsumer<'k, N> {
    /// Waits until the stage is full again.
    #[track_caller]
    pub fn wait(&mut self) -> FullSlot<'k, N> {
        let StageConsumer(only) = self;
        let _one = only.ring.builder.as_one();
        let stage = only.again(only.ring.full);
        FullSlot::new(only.ring.clone(), stage, Location::caller())
    }
}
