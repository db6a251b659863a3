//! The loads of a kernel without a producer: one thread of the consumers begins them, each as soon as its slot is free.
//!
//! Blocks come in the producer's order, from the last to the first. As many as there are slots are loaded when a tile
//! begins; then each slot that this thread's warpgroup gives back is filled with the next block.

use fa3_ir::lang::*;
use fa3_sched::forward::Loads;

use super::state::Fwd;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::loader::{Feed, TmaLoader};

/// The loads that such a kernel begins with a tile.
pub(super) struct SelfLoading<'k> {
    loader: Loader<'k>,
    q: TmaLoader<'k>,
    stages: u32,
}

/// K or V as a consumer has it: its end of the ring, and the loads that refill it, if there is no producer.
pub(super) struct Kv<'k> {
    slots: Consumer<'k, 1>,
    stream: Option<Stream<'k>>,
}

/// The thread that loads.
#[derive(Clone, Copy)]
struct Loader<'k> {
    builder: &'k Builder,
    /// Its warp, one of the last warpgroup. The thread waits until every consumer has given a slot back: where they
    /// take turns, all others have had theirs then, and need no other to get there.
    warp: u32,
}

/// The blocks of a tile.
struct Stream<'k> {
    loader: Loader<'k>,
    blocks: TmaLoader<'k>,
    /// Keys of a block.
    keys: u32,
    /// From this block on all have been loaded, as the thread that loads knows.
    loaded: Var<'k, B32>,
    /// The tile being loaded, once one has begun.
    work: Option<Work<V<'k, B32>>>,
}

impl<'k> SelfLoading<'k> {
    /// The loads of consumers: none, if there is a producer.
    #[track_caller]
    pub(super) fn of(
        fwd: &Fwd<'k>,
        k: Consumer<'k, 1>,
        v: Consumer<'k, 1>,
    ) -> (Option<SelfLoading<'k>>, Kv<'k>, Kv<'k>) {
        let tile = &fwd.spec.tile;
        match tile.loads {
            Loads::Producer => (None, Kv { slots: k, stream: None }, Kv { slots: v, stream: None }),
            Loads::Consumers => {
                let loader = Loader { builder: fwd.builder, warp: 4 * (tile.consumers - 1) };
                let q = fwd.q.loader();
                let stream = |feed: &Feed<'k>| Some(Stream::new(loader, feed, tile.tile_n));
                let (k, v) =
                    (Kv { slots: k, stream: stream(&fwd.k) }, Kv { slots: v, stream: stream(&fwd.v) });
                (Some(SelfLoading { loader, q, stages: tile.stages }), k, v)
            }
        }
    }

    /// Begins a tile that visits a block: Q, and as much of K and V as there are slots for.
    #[track_caller]
    pub(super) fn begin(&mut self, work: &Work<V<'k, B32>>, k: &mut Kv<'k>, v: &mut Kv<'k>) {
        let (Some(k), Some(v)) = (&mut k.stream, &mut v.stream) else { return };
        self.loader.alone(|| {
            k.begin(work);
            v.begin(work);
            k.next();
            self.q.load(work.head, work.row, work.batch); // A1:4-5
            for _ in 1..self.stages {
                k.next();
                v.next();
            }
            v.next();
        });
    }
}

impl<'k> Kv<'k> {
    /// Waits for the next block.
    #[track_caller]
    pub(super) fn wait(&mut self) -> FullSlot<'k, 1> {
        self.slots.wait()
    }

    /// Whether the next block is there now.
    #[track_caller]
    pub(super) fn is_there(&self) -> V<'k, Pred> {
        self.slots.is_full()
    }

    /// Holds no block yet; a round reads one beside the next.
    #[track_caller]
    pub(super) fn held_beside(&self) -> HeldSlot<'k, 1> {
        self.slots.held_beside()
    }

    /// Gives a block's slot back; if there is no producer, begins to load the next block into it.
    #[track_caller]
    pub(super) fn release(&mut self, slot: FullSlot<'k, 1>) {
        slot.release();
        if let Some(stream) = &mut self.stream {
            stream.loader.alone(|| stream.next());
        }
    }
}

impl Loader<'_> {
    /// Runs `body` in the thread that loads.
    #[track_caller]
    fn alone(self, body: impl FnOnce()) {
        self.builder.once_in_warp(self.warp, body);
        // The thread may have waited long; products need its warp together.
        self.builder.warp_sync();
    }
}

impl<'k> Stream<'k> {
    #[track_caller]
    fn new(loader: Loader<'k>, feed: &Feed<'k>, keys: u32) -> Stream<'k> {
        let blocks = feed.loader();
        Stream { loader, blocks, keys, loaded: loader.builder.var("loaded", 0), work: None }
    }

    /// Nothing of this tile is loaded yet.
    #[track_caller]
    fn begin(&mut self, work: &Work<V<'k, B32>>) {
        self.loaded.set(work.kv.end);
        self.work = Some(*work);
    }

    /// Loads the next block, if there is one.
    #[track_caller]
    fn next(&mut self) {
        let Some(Work { batch, kv_head, kv, .. }) = self.work else { return };
        let loaded = self.loaded.get();
        self.loader.builder.if_uniform(loaded.gt(kv.first), || {
            let block = loaded - 1;
            self.loaded.set(block);
            self.blocks.load(kv_head, block * self.keys, batch); // A1:7-9
        });
    }
}
