//! Rings: pipelines of stages in shared memory, which a producer fills by TMA copies and consumers empty.
//!
//! Stages and phases are handled here and nowhere else. A kernel has tokens: [`Producer::acquire`] returns an
//! [`EmptySlot`], whose `commit` passes it to the consumers once its bytes have arrived. [`Consumer::wait`] returns a
//! [`FullSlot`], whose `release` passes it back to the producer once every warp of every consumer has released it. A
//! token that is not given back in the block that got it is an error (V-25).

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

/// A ring whose slots hold `N` tiles.
#[derive(Clone, Debug)]
pub struct Ring<'k, const N: usize> {
    builder: &'k Builder,
    name: String,
    stages: u32,
    /// The number of its first stage, if it is one stage of another ring.
    first: Option<V<'k, B32>>,
    full: Region,
    empty: Region,
    tiles: [(Region, TileShape); N],
    /// CTAs that fill each other's slots.
    cluster: u32,
    watched: RingId,
}

impl Builder {
    /// Declares a ring of `stages` slots with these tiles, which `consumers` warps empty.
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

    /// Declares a ring whose slots `producers` warps fill by ordinary stores.
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

    /// Declares a ring in a cluster whose CTAs multicast into each other's slots: a slot is free when the consumers of
    /// all of them have released it.
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
    /// The producer's place in the ring: all slots are empty.
    #[track_caller]
    pub fn producer(&self) -> Producer<'k, N> {
        // Waiting for the phase before the first returns at once.
        Producer { cursor: Cursor::new(self, 1) }
    }

    /// Like [`Ring::producer`], for a producer that fills a slot in each of these rounds.
    #[track_caller]
    pub fn producer_by(&self, rounds: Rounds<'k>) -> Producer<'k, N> {
        Producer { cursor: Cursor::by(self, rounds, 1) }
    }

    /// The tiles of slot `index`, for what stays in them whatever the slot holds. Nothing that fills a slot may write
    /// there. Warps that fill slots store it before they commit their first slot, whose fence is for these stores, too.
    /// Other threads store it in the prologue, with a fence.
    #[track_caller]
    pub fn tiles_of(&self, index: u32) -> [Tile<'k, 'k>; N] {
        if index >= self.stages {
            let count = self.stages as usize;
            self.builder.fault(Fault::Unknown { what: "slot of a ring", index, count });
        }
        let known = Stage::Known(index.min(self.stages.saturating_sub(1)));
        self.tiles(self.first.map_or(known, Stage::Number))
    }

    /// The stage of a ring that has no other.
    fn only_stage(&self) -> Stage<'k> {
        self.first.map_or(Stage::Known(0), Stage::Number)
    }

    /// A consumer warp's place in the ring.
    #[track_caller]
    pub fn consumer(&self) -> Consumer<'k, N> {
        Consumer { cursor: Cursor::new(self, 0) }
    }

    /// Like [`Ring::consumer`], for a consumer that empties a slot in each of these rounds.
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

    /// Where the stage's part of a region is, if each has `bytes`.
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

/// A stage of a ring: one that is known, as is the only one there is, or one of several.
#[derive(Clone, Copy, Debug)]
enum Stage<'k> {
    Known(u32),
    Number(V<'k, B32>),
}

/// Fills a ring; one thread has it, or of a [`Builder::stored_ring`] each of the warps that store.
#[derive(Debug)]
pub struct Producer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
}

impl<'k, const N: usize> Producer<'k, N> {
    /// Waits until the next slot is empty.
    #[track_caller]
    pub fn acquire(&mut self) -> EmptySlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let b = ring.builder;
        let due = b.watch().due(format!("a slot of ring {} is committed", ring.name), Location::caller());
        let _one = b.as_one();
        let stage = self.cursor.next(ring.empty);
        EmptySlot::new(ring, stage, due)
    }

    /// Waits until the next slot is empty, in a whole warp, one of whose threads fills it by loads. Numbers that all
    /// lanes have stay what the compiler knows of them.
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
    /// Waits until the next slot is full.
    #[track_caller]
    pub fn wait(&mut self) -> FullSlot<'k, N> {
        let ring = self.cursor.ring.clone();
        let _one = ring.builder.as_one();
        let stage = self.cursor.next(ring.full);
        FullSlot::new(ring, stage, Location::caller())
    }

    /// Whether the next slot is full now. Lanes may see different things.
    #[track_caller]
    pub fn is_full(&self) -> V<'k, Pred> {
        let ring = &self.cursor.ring;
        let _one = ring.builder.as_one();
        self.cursor.test(ring.full)
    }
}

/// A slot that a consumer reads.
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

    /// Gives the slot back. This warp has read it: products are complete.
    #[track_caller]
    pub fn release(self) {
        let b = self.ring.builder;
        b.watch().done(self.due, Location::caller());
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.once_per_warp(|| self.arrive());
    }

    /// Gives the slot back where `condition` holds: in a loop, when the last round has read it. On every path
    /// through the kernel it must hold exactly once before [`FullSlot::released`], and in all lanes of a warp or in
    /// none; the simulator checks that. Products that read the slot must have been waited for, which the borrow
    /// checker does not enforce here.
    #[track_caller]
    pub fn release_if(&self, condition: impl Arg<Ty = Pred>) {
        let b = self.ring.builder;
        self.by_these_warps(Location::caller());
        let _one = b.as_one();
        b.guarded(b.elect() & condition, || self.arrive());
    }

    /// Says that [`FullSlot::release_if`] has given the slot back.
    #[track_caller]
    pub fn released(self) {
        self.ring.builder.watch().done(self.due, Location::caller());
    }

    /// Releases the slot after ordinary loads from it (`ldmatrix`, `ld.shared`), which copies do not wait for unless a
    /// fence says so.
    #[track_caller]
    pub fn release_loaded(self) {
        self.fence_loads();
        self.release();
    }

    /// Releases without the fence: ordinary stores fill the slot, or another warp's fence lies between.
    #[track_caller]
    pub fn release_unfenced(self) {
        let b = self.ring.builder;
        let _one = b.as_one();
        b.warp_sync();
        self.release();
    }

    /// The fence for that, where there is something else to wait for before the slot is given back.
    #[track_caller]
    pub fn fence_loads(&self) {
        let b = self.ring.builder;
        let _one = b.as_one();
        b.fence(FenceInst::ProxyAsyncShared);
        b.warp_sync();
    }

    /// The warps that run this release the slot.
    fn by_these_warps(&self, source: Source) {
        let (b, ring) = (self.ring.builder, self.ring.watched);
        let warps = b.warps();
        b.watch().release(ring, warps, source);
    }

    /// One thread's arrival at the slot's empty mbarriers.
    #[track_caller]
    fn arrive(&self) {
        let (b, empty) = (self.ring.builder, self.ring.barrier(self.ring.empty, self.stage));
        match self.ring.cluster {
            1 => b.mbarrier_arrive(empty),
            ctas => (0..ctas).for_each(|cta| b.mbarrier_arrive_remote(b.map_address(empty, cta))),
        }
    }
}
