//! Rings: pipelines of stages in shared memory (CUTLASS: `PipelineTmaAsync`), which a producer fills by TMA copies and
//! consumers empty.
//!
//! Only this module handles stages and phases. A kernel has tokens for stages: [`Producer::acquire`] returns an
//! [`EmptySlot`], whose `commit` passes the stage to the consumers once its bytes have arrived. [`Consumer::wait`]
//! returns a [`FullSlot`], whose `release` passes it back to the producer once every warp of every consumer has
//! released it. A token that is not given back in the block that got it is an error (V-25).

mod copied;
mod cursor;
mod empty;
mod held;
mod rounds;
mod stage;

use std::panic::Location;

use crate::lang::{Arg, B32, Builder, Pred, Tile, TileShape, V};
use crate::watch::{DutyId, RingId};
use crate::{Fault, FenceInst, Region, SharedAddr, Source};

pub use copied::{CopiedRing, Copier, Fencer};
use cursor::Cursor;
pub use empty::EmptySlot;
pub use held::HeldSlot;
pub use rounds::Rounds;
pub use stage::Lender;

/// A ring whose stages hold `N` tiles.
#[derive(Clone, Debug)]
pub struct Ring<'k, const N: usize> {
    builder: &'k Builder,
    name: String,
    stages: u32,
    /// The number of its first stage, if the ring is one stage of another ring.
    first: Option<V<'k, B32>>,
    full: Region,
    empty: Region,
    tiles: [(Region, TileShape); N],
    /// Number of CTAs that fill each other's stages.
    cluster: u32,
    watched: RingId,
}

impl Builder {
    /// Declares a ring of `stages` stages with these tiles, which `consumers` warps empty.
    #[track_caller]
    pub fn ring<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Ring<'_, N> {
        self.ring_across(name, stages, [1, consumers], tiles, 1)
    }

    /// Declares a ring whose stages `producers` warps fill by ordinary stores.
    #[track_caller]
    pub fn stored_ring<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        [producers, consumers]: [u32; 2],
        tiles: [(&str, TileShape); N],
    ) -> Ring<'_, N> {
        self.ring_across(name, stages, [producers, consumers], tiles, 1)
    }

    /// Declares a ring in a cluster whose CTAs multicast into each other's stages: a stage is empty when the consumers
    /// of all of these CTAs have released it.
    #[track_caller]
    pub fn cluster_ring<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Ring<'_, N> {
        let cluster = self.launch().cluster;
        self.ring_across(name, stages, [1, consumers], tiles, cluster)
    }

    #[track_caller]
    fn ring_across<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        [producers, consumers]: [u32; 2],
        tiles: [(&str, TileShape); N],
        cluster: u32,
    ) -> Ring<'_, N> {
        if stages == 0 {
            self.fault(Fault::Limit {
                what: "stages of a ring",
                given: 0,
                min: 1,
                max: u32::MAX,
                multiple: 1,
            });
        }
        let full = self.mbarriers(&format!("{name} full"), stages, producers);
        let empty = self.mbarriers(&format!("{name} empty"), stages, consumers.saturating_mul(cluster));
        let _one = self.as_one();
        let tiles = tiles.map(|(tile, shape)| (self.tiles(tile, stages, shape), shape));
        let watched = self.watch().ring(name.to_owned(), consumers);
        Ring {
            builder: self,
            name: name.to_owned(),
            stages,
            first: None,
            full,
            empty,
            tiles,
            cluster,
            watched,
        }
    }
}

impl<'k, const N: usize> Ring<'k, N> {
    /// The producer's position in the ring: all stages are empty.
    #[track_caller]
    pub fn producer(&self) -> Producer<'k, N> {
        // A wait for the phase before the first returns at once.
        Producer { cursor: Cursor::new(self, 1) }
    }

    /// Like [`Ring::producer`], for a producer that fills one stage in each of these rounds.
    #[track_caller]
    pub fn producer_by(&self, rounds: Rounds<'k>) -> Producer<'k, N> {
        Producer { cursor: Cursor::by(self, rounds, 1) }
    }

    /// The tiles of stage `index`, for data that stays there whatever else the stage holds. Nothing that fills a stage
    /// may write there. Warps that fill stages store such data before they commit their first stage, whose fence covers
    /// these stores, too. Other threads store it in the prologue, with a fence.
    #[track_caller]
    pub fn tiles_of(&self, index: u32) -> [Tile<'k, 'k>; N] {
        if index >= self.stages {
            let count = self.stages as usize;
            self.builder.fault(Fault::Unknown { what: "slot of a ring", index, count });
        }
        let known = Stage::Known(index.min(self.stages.saturating_sub(1)));
        self.tiles(self.first.map_or(known, Stage::Number))
    }

    /// The stage of a ring that has only one.
    fn only_stage(&self) -> Stage<'k> {
        self.first.map_or(Stage::Known(0), Stage::Number)
    }

    /// A consumer warp's position in the ring.
    #[track_caller]
    pub fn consumer(&self) -> Consumer<'k, N> {
        Consumer { cursor: Cursor::new(self, 0) }
    }

    /// Like [`Ring::consumer`], for a consumer that empties one stage in each of these rounds.
    #[track_caller]
    pub fn consumer_by(&self, rounds: Rounds<'k>) -> Consumer<'k, N> {
        Consumer { cursor: Cursor::by(self, rounds, 0) }
    }

    /// The mbarrier of a stage.
    #[track_caller]
    fn barrier(&self, of: Region, stage: Stage<'k>) -> SharedAddr {
        self.address(of, 8, stage)
    }

    #[track_caller]
    fn tiles(&self, stage: Stage<'k>) -> [Tile<'k, 'k>; N] {
        self.tiles
            .map(|(region, shape)| Tile::new(self.builder, shape, self.address(region, shape.bytes(), stage)))
    }

    /// The address of the stage's part of a region that has `bytes` for each stage.
    #[track_caller]
    fn address(&self, region: Region, bytes: u32, stage: Stage<'k>) -> SharedAddr {
        match stage {
            Stage::Known(stage) => region.at((stage * bytes) as i32),
            Stage::Number(stage) => {
                let start = self.builder.address(region);
                stage.mad(bytes, start).at(0)
            }
        }
    }
}

/// A stage of a ring: a number that is known when the kernel is built, or one that the kernel computes.
#[derive(Clone, Copy, Debug)]
enum Stage<'k> {
    Known(u32),
    Number(V<'k, B32>),
}

/// Fills a ring. One thread uses it, or, in a [`Builder::stored_ring`], each of the warps that store.
#[derive(Debug)]
pub struct Producer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
}

impl<'k, const N: usize> Producer<'k, N> {
    /// Waits until the next stage is empty.
    #[track_caller]
    pub fn acquire(&mut self) -> EmptySlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let b = ring.builder;
        let due = b.watch().due(format!("a slot of ring {} is committed", ring.name), Location::caller());
        let _one = b.as_one();
        let stage = self.cursor.next(ring.empty);
        EmptySlot::new(ring, stage, due)
    }

    /// Waits in a whole warp until the next stage is empty; one of its threads fills it by loads. The compiler still
    /// knows which numbers are the same in all lanes.
    #[track_caller]
    pub fn fill_by_warp(&mut self, fill: impl FnOnce(EmptySlot<'k, N>)) {
        let ring = self.cursor.ring.clone();
        let (b, at) = (ring.builder, Location::caller());
        let _one = b.as_one();
        let stage = self.cursor.next(ring.empty);
        b.once_per_warp(|| {
            let due = b.watch().due(format!("a slot of ring {} is committed", ring.name), at);
            fill(EmptySlot::new(ring, stage, due));
        });
    }
}

/// Empties a ring; each consumer warp has one.
#[derive(Debug)]
pub struct Consumer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
}

impl<'k, const N: usize> Consumer<'k, N> {
    /// Waits until the next stage is full.
    #[track_caller]
    pub fn wait(&mut self) -> FullSlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let _one = ring.builder.as_one();
        let stage = self.cursor.next(ring.full);
        FullSlot::new(ring, stage, Location::caller())
    }

    /// Whether the next stage is full now. Lanes may see different answers.
    #[track_caller]
    pub fn is_full(&self) -> V<'k, Pred> {
        let ring = &self.cursor.ring;
        let _one = ring.builder.as_one();
        self.cursor.test(ring.full)
    }
}

/// A full stage, which a consumer reads.
#[must_use = "a slot must be released"]
#[derive(Debug)]
pub struct FullSlot<'k, const N: usize> {
    ring: Ring<'k, N>,
    stage: Stage<'k>,
    tiles: [Tile<'k, 'k>; N],
    due: DutyId,
}

impl<'k> FullSlot<'k, 1> {
    /// Its tile.
    pub fn tile(&self) -> Tile<'_, 'k> {
        let [tile] = self.tiles;
        tile
    }
}

impl<'k, const N: usize> FullSlot<'k, N> {
    #[track_caller]
    fn new(ring: Ring<'k, N>, stage: Stage<'k>, source: Source) -> FullSlot<'k, N> {
        let tiles = ring.tiles(stage);
        let due = ring.builder.watch().due(format!("a slot of ring {} is released", ring.name), source);
        FullSlot { ring, stage, tiles, due }
    }

    /// Its tiles.
    pub fn tiles(&self) -> [Tile<'_, 'k>; N] {
        self.tiles
    }

    /// Releases the stage. This warp must have read it: products are complete.
    #[track_caller]
    pub fn release(self) {
        let b = self.ring.builder;
        b.watch().done(self.due, Location::caller());
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.once_per_warp(|| self.arrive());
    }

    /// Releases the stage where `condition` holds: in a loop, when the last round has read it. On every path through
    /// the kernel the condition must hold exactly once before [`FullSlot::released`], and in all lanes of a warp or in
    /// none; the simulator checks that. Products that read the stage must have been waited for, which the borrow
    /// checker does not enforce here.
    #[track_caller]
    pub fn release_if(&self, condition: impl Arg<Ty = Pred>) {
        let b = self.ring.builder;
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.guarded(b.elect() & condition, || self.arrive());
    }

    /// Says that [`FullSlot::release_if`] has released the stage.
    #[track_caller]
    pub fn released(self) {
        self.ring.builder.watch().done(self.due, Location::caller());
    }

    /// Releases the stage after ordinary loads from it (`ldmatrix`, `ld.shared`), with the fence without which copies
    /// do not wait for such loads.
    #[track_caller]
    pub fn release_loaded(self) {
        self.fence_loads();
        self.release();
    }

    /// Releases without that fence: ordinary stores fill the stage, or another warp's fence lies between.
    #[track_caller]
    pub fn release_unfenced(self) {
        let b = self.ring.builder;
        let _one = b.as_one();
        b.warp_sync();
        self.release();
    }

    /// The fence of [`FullSlot::release_loaded`], for a warp that waits for something else before it releases the
    /// stage.
    #[track_caller]
    pub fn fence_loads(&self) {
        let b = self.ring.builder;
        let _one = b.as_one();
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
    }

    /// Records that the warps that run this release the stage.
    fn by_these_warps(&self, source: Source) {
        let (b, ring) = (self.ring.builder, self.ring.watched);
        let warps = b.warps();
        b.watch().release(ring, warps, source);
    }

    /// Arrives, in one thread, at the stage's empty mbarriers.
    #[track_caller]
    fn arrive(&self) {
        let (b, empty) = (self.ring.builder, self.ring.barrier(self.ring.empty, self.stage));
        match self.ring.cluster {
            1 => b.mbarrier_arrive(empty),
            ctas => (0..ctas).for_each(|cta| b.mbarrier_arrive_remote(b.map_address(empty, cta))),
        }
    }
}
