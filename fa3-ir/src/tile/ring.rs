//! Rings: stages of shared memory that a producer fills by tensor copies and consumers empty.
//!
//! Stages and phases are in here and nowhere else. A kernel has tokens: [`Producer::acquire`] gives an
//! [`EmptySlot`], whose `commit` makes it the consumers' once its bytes have arrived; [`Consumer::wait`] gives a
//! [`FullSlot`], whose `release` makes it the producer's once every warp of every consumer has said so. A token that is
//! not given back in the block that got it is an error (V-25).

use std::panic::Location;

use crate::watch::DutyId;
use crate::{
    Arg, B16, B32, Builder, Coords, Fault, LoadOptions, Pred, Region, SharedAddr, Tile, TileMap, TileShape,
    V, Var,
};

/// A ring whose slots hold `N` tiles.
#[derive(Clone, Debug)]
pub struct Ring<const N: usize> {
    name: String,
    stages: u32,
    full: Region,
    empty: Region,
    tiles: [(Region, TileShape); N],
    /// CTAs that fill each other's slots.
    cluster: u32,
}

impl Builder {
    /// Declares a ring of `stages` slots with these tiles, which `consumers` warps empty.
    #[track_caller]
    pub fn ring<const N: usize>(
        &mut self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Ring<N> {
        self.ring_across(name, stages, consumers, tiles, 1)
    }

    /// The same in a cluster whose CTAs multicast into each other's slots: a slot is free when the consumers of
    /// all of them have released it.
    #[track_caller]
    pub fn cluster_ring<const N: usize>(
        &mut self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> Ring<N> {
        let cluster = self.launch().cluster;
        self.ring_across(name, stages, consumers, tiles, cluster)
    }

    #[track_caller]
    fn ring_across<const N: usize>(
        &mut self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
        cluster: u32,
    ) -> Ring<N> {
        if stages == 0 {
            self.fault(Fault::Limit {
                what: "stages of a ring",
                given: 0,
                min: 1,
                max: u32::MAX,
                multiple: 1,
            });
        }
        let full = self.mbarriers(&format!("{name} full"), stages, 1);
        let empty = self.mbarriers(&format!("{name} empty"), stages, consumers.saturating_mul(cluster));
        let tiles = self.as_one(|b| tiles.map(|(tile, shape)| (b.tiles(tile, stages, shape), shape)));
        Ring { name: name.to_owned(), stages, full, empty, tiles, cluster }
    }
}

impl<const N: usize> Ring<N> {
    /// The producer's place in the ring: all slots are empty.
    #[track_caller]
    pub fn producer(&self, b: &mut Builder) -> Producer<N> {
        // Waiting for the phase before the first returns at once.
        Producer { cursor: Cursor::new(self, b, 1) }
    }

    /// A consumer warp's place in the ring.
    #[track_caller]
    pub fn consumer(&self, b: &mut Builder) -> Consumer<N> {
        Consumer { cursor: Cursor::new(self, b, 0) }
    }

    /// The mbarrier of a stage.
    #[track_caller]
    fn barrier(&self, b: &mut Builder, of: Region, stage: Stage) -> SharedAddr {
        stage.place(b, of, 8)
    }

    #[track_caller]
    fn tile<'s>(&self, b: &mut Builder, index: usize, stage: Stage) -> Tile<'s> {
        let (region, shape) = self.tiles[index];
        Tile::new(shape, stage.place(b, region, shape.bytes()))
    }

    #[track_caller]
    fn tiles<'s>(&self, b: &mut Builder, stage: Stage) -> [Tile<'s>; N] {
        std::array::from_fn(|index| self.tile(b, index, stage))
    }
}

/// A stage of a ring: the only one, or one of several.
#[derive(Clone, Copy, Debug)]
enum Stage {
    Only,
    Number(V<B32>),
}

impl Stage {
    /// Where the stage's part of a region is, if each has `bytes`.
    #[track_caller]
    fn place(self, b: &mut Builder, region: Region, bytes: u32) -> SharedAddr {
        match self {
            Stage::Only => region.at(0),
            Stage::Number(stage) => {
                let start = b.address(region);
                b.mad_u32(stage, bytes, start).at(0)
            }
        }
    }
}

/// The stage that comes next, if there are several, and the parity of its phase.
#[derive(Debug)]
struct Cursor<const N: usize> {
    ring: Ring<N>,
    stage: Option<Var<B32>>,
    parity: Var<B32>,
}

impl<const N: usize> Cursor<N> {
    #[track_caller]
    fn new(ring: &Ring<N>, b: &mut Builder, parity: u32) -> Cursor<N> {
        let stage = if ring.stages > 1 { Some(b.var("stage", 0)) } else { None };
        Cursor { ring: ring.clone(), stage, parity: b.var("parity", parity) }
    }

    /// Waits until the next stage is `full`, or empty, and goes on to the one after it.
    #[track_caller]
    fn next(&self, b: &mut Builder, of: Region) -> Stage {
        let Some(next) = self.stage else {
            b.mbarrier_wait(of, self.parity);
            let parity = b.xor(self.parity, 1);
            b.set(self.parity, parity);
            return Stage::Only;
        };
        let stage = b.get(next);
        let barrier = self.ring.barrier(b, of, Stage::Number(stage));
        b.mbarrier_wait(barrier, self.parity);
        let after = b.add(stage, 1);
        let wraps = b.eq_b32(after, self.ring.stages);
        let (first, flip) = (b.select(wraps, 0, after), b.select(wraps, 1, 0));
        let parity = b.xor(self.parity, flip);
        b.set(next, first);
        b.set(self.parity, parity);
        Stage::Number(stage)
    }
}

/// Fills a ring; one thread has it.
#[derive(Debug)]
pub struct Producer<const N: usize> {
    cursor: Cursor<N>,
}

impl<const N: usize> Producer<N> {
    /// Waits until the next slot is empty.
    #[track_caller]
    pub fn acquire(&mut self, b: &mut Builder) -> EmptySlot<N> {
        let source = Location::caller();
        let ring = self.cursor.ring.clone();
        let (full, tiles) = b.as_one(|b| {
            let stage = self.cursor.next(b, ring.empty);
            (ring.barrier(b, ring.full, stage), ring.tiles(b, stage))
        });
        let due = b.watch.due(format!("a slot of ring {} is committed", ring.name), source);
        EmptySlot { ring: ring.name, tiles, full, bytes: 0, due }
    }
}

/// A slot that its producer fills.
#[must_use = "a slot must be committed"]
#[derive(Debug)]
pub struct EmptySlot<const N: usize> {
    ring: String,
    tiles: [Tile<'static>; N],
    full: SharedAddr,
    bytes: u32,
    due: DutyId,
}

impl<const N: usize> EmptySlot<N> {
    /// Begins to load tile `index`. Belongs in the block that acquired the slot (V-25): its bytes are counted once.
    #[track_caller]
    pub fn load(&mut self, b: &mut Builder, index: usize, map: &TileMap, coords: impl Coords) {
        self.load_with(b, index, map, coords, LoadOptions::default());
    }

    /// The same with options.
    #[track_caller]
    pub fn load_with(
        &mut self,
        b: &mut Builder,
        index: usize,
        map: &TileMap,
        coords: impl Coords,
        options: LoadOptions,
    ) {
        let Some(tile) = self.counted(b, index) else { return };
        b.as_one(|b| b.load_tile(tile, map, coords, self.full, options));
    }

    /// Tile `index`, with its bytes added to what the slot expects.
    #[track_caller]
    fn counted(&mut self, b: &mut Builder, index: usize) -> Option<Tile<'static>> {
        let source = b.served().unwrap_or(Location::caller());
        b.watch.part(self.due, format!("a tile of ring {} is loaded", self.ring), source);
        let Some(&tile) = self.tiles.get(index) else {
            b.fault(Fault::Unknown { what: "tile of a slot", index: index as u32, count: N });
            return None;
        };
        self.bytes = self.bytes.saturating_add(tile.shape().bytes());
        Some(tile)
    }

    /// Begins to load rows of tile `index`, block `part` of as many as `map` copies, into the slots of all CTAs of
    /// `mask`; the other CTAs load the rest of this one's.
    #[track_caller]
    pub fn load_part(
        &mut self,
        b: &mut Builder,
        index: usize,
        map: &TileMap,
        coords: impl Coords,
        part: impl Arg<Ty = B32>,
        mask: impl Arg<Ty = B16>,
    ) {
        let Some(tile) = self.counted(b, index) else { return };
        b.as_one(|b| {
            let block = tile.row_block(b, part, map.shape().rows);
            b.load_tile(block, map, coords, self.full, LoadOptions::default().multicast(mask));
        });
    }

    /// Hands the slot over: consumers may read it when all that was loaded has arrived.
    #[track_caller]
    pub fn commit(self, b: &mut Builder) {
        b.watch.done(self.due, Location::caller());
        b.mbarrier_arrive_expect(self.full, self.bytes);
    }
}

/// Empties a ring; each consumer warp has one.
#[derive(Debug)]
pub struct Consumer<const N: usize> {
    cursor: Cursor<N>,
}

impl<const N: usize> Consumer<N> {
    /// Waits until the next slot is full.
    #[track_caller]
    pub fn wait(&mut self, b: &mut Builder) -> FullSlot<N> {
        let ring = self.cursor.ring.clone();
        let (stage, tiles) = b.as_one(|b| {
            let stage = self.cursor.next(b, ring.full);
            (stage, ring.tiles(b, stage))
        });
        FullSlot::new(b, ring, stage, tiles, Location::caller())
    }
}

/// A slot that a consumer reads.
#[must_use = "a slot must be released"]
#[derive(Debug)]
pub struct FullSlot<const N: usize> {
    ring: Ring<N>,
    stage: Stage,
    tiles: [Tile<'static>; N],
    due: DutyId,
}

impl<const N: usize> FullSlot<N> {
    fn new(
        b: &mut Builder,
        ring: Ring<N>,
        stage: Stage,
        tiles: [Tile<'static>; N],
        source: crate::Source,
    ) -> FullSlot<N> {
        let due = b.watch.due(format!("a slot of ring {} is released", ring.name), source);
        FullSlot { ring, stage, tiles, due }
    }

    /// Its tiles.
    pub fn tiles(&self) -> [Tile<'_>; N] {
        self.tiles
    }

    /// Keeps the slot for a later round of the loop.
    #[track_caller]
    pub fn hold(self, b: &mut Builder) -> HeldSlot<N> {
        let source = Location::caller();
        b.watch.done(self.due, source);
        let stage = match self.stage {
            Stage::Only => None,
            Stage::Number(stage) => Some(b.var("held", stage)),
        };
        let due = b.watch.due(format!("the held slot of ring {} is taken", self.ring.name), source);
        HeldSlot { ring: self.ring, stage, due }
    }

    /// Gives the slot back. This warp has read it: products are complete.
    #[track_caller]
    pub fn release(self, b: &mut Builder) {
        b.watch.done(self.due, Location::caller());
        b.as_one(|b| b.once_per_warp(|b| self.arrive(b)));
    }

    /// Gives the slot back where `condition` holds: in a loop, when the last round has read it. On every way through the
    /// kernel it must hold once before [`FullSlot::released`], and in all lanes of a warp or in none; that it does, only a run
    /// can show. Products that read the slot must have been waited for: the borrow does not say so here.
    #[track_caller]
    pub fn release_if(&self, b: &mut Builder, condition: impl Arg<Ty = Pred>) {
        b.as_one(|b| {
            let one = b.elect();
            let one = b.and_pred(one, condition);
            b.guarded(one, |b| self.arrive(b));
        });
    }

    /// Says that [`FullSlot::release_if`] has given the slot back.
    #[track_caller]
    pub fn released(self, b: &mut Builder) {
        b.watch.done(self.due, Location::caller());
    }

    /// The same after ordinary loads from it (`ldmatrix`, `ld.shared`), which copies do not wait for unless a fence
    /// says so.
    #[track_caller]
    pub fn release_loaded(self, b: &mut Builder) {
        b.fence(crate::FenceInst::ProxyAsyncShared);
        b.warp_sync();
        self.release(b);
    }

    /// One thread's arrival at the slot's empty mbarriers.
    #[track_caller]
    fn arrive(&self, b: &mut Builder) {
        let empty = self.ring.barrier(b, self.ring.empty, self.stage);
        match self.ring.cluster {
            1 => b.mbarrier_arrive(empty),
            ctas => (0..ctas).for_each(|cta| {
                let remote = b.map_address(empty, cta);
                b.mbarrier_arrive_remote(remote);
            }),
        }
    }
}

/// A full slot that a loop carries from one round to the next.
#[must_use = "the last slot must be taken and released"]
#[derive(Debug)]
pub struct HeldSlot<const N: usize> {
    ring: Ring<N>,
    /// None if the ring has only one.
    stage: Option<Var<B32>>,
    due: DutyId,
}

impl<const N: usize> HeldSlot<N> {
    /// Holds `next` instead, and gives what was held.
    #[track_caller]
    pub fn replace(&mut self, b: &mut Builder, next: FullSlot<N>) -> FullSlot<N> {
        b.watch.done(next.due, Location::caller());
        if next.ring.full != self.ring.full {
            b.misfit("a held slot", format!("ring {}", next.ring.name), format!("ring {}", self.ring.name));
        }
        let old = self.slot(b, Location::caller());
        if let (Some(held), Stage::Number(next)) = (self.stage, next.stage) {
            b.set(held, next);
        }
        old
    }

    /// Gives what is held.
    #[track_caller]
    pub fn take(self, b: &mut Builder) -> FullSlot<N> {
        b.watch.done(self.due, Location::caller());
        self.slot(b, Location::caller())
    }

    #[track_caller]
    fn slot(&self, b: &mut Builder, source: crate::Source) -> FullSlot<N> {
        let stage = match self.stage {
            None => Stage::Only,
            Some(stage) => Stage::Number(b.get(stage)),
        };
        let ring = self.ring.clone();
        let tiles = b.as_one(|b| ring.tiles(b, stage));
        FullSlot::new(b, ring, stage, tiles, source)
    }
}

/// mbarriers.
impl Builder {
    /// Initialises the mbarriers declared so far, in one thread, and lets every thread of the CTA, and of its cluster,
    /// wait for that. Belongs in the prologue.
    #[track_caller]
    pub fn init_mbarriers(&mut self) {
        let barriers = self.mbarrier_regions();
        let cluster = self.launch().cluster;
        self.as_one(|b| {
            b.once_per_role(|b| {
                for (region, count, arrivals) in barriers {
                    (0..count).for_each(|index| b.mbarrier_init(region.at(8 * index as i32), arrivals));
                }
                b.fence(crate::FenceInst::MbarrierInit);
            });
            if cluster > 1 { b.cluster_sync() } else { b.sync_cta() }
        });
    }
}
