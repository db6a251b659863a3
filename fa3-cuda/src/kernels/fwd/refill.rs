//! The loads of a kernel without a producer: one thread of the consumers begins them, each as soon as its slot is free.
//!
//! Blocks come in the producer's order, from the last to the first. As many as there are slots are loaded when a tile begins; then
//! each slot that this thread's warpgroup gives back is filled with the next block.

use fa3_ir::{B32, Builder, Ring, TileMap, V, Var};

use super::Fwd;
use super::geometry::Work;
use super::producer::Feed;

/// What consumers load: nothing, if there is a producer.
pub(super) struct Refill<'f>(Option<Loader<'f>>);

struct Loader<'f> {
    q: Feed<'f>,
    k: Stream<'f>,
    v: Stream<'f>,
    stages: u32,
    /// The warp of the thread that loads, one of the last warpgroup. The thread waits until every consumer has given a slot back: where
    /// they take turns, all others have had theirs then, and need no other to get there.
    warp: u32,
}

/// K or V of a tile, block after block.
struct Stream<'f> {
    feed: Feed<'f>,
    /// Keys of a block.
    keys: u32,
    /// From this block on all have been loaded, as the thread that loads knows.
    loaded: Var<B32>,
}

impl<'f> Refill<'f> {
    /// Of a kernel with a producer.
    pub(super) fn none() -> Refill<'f> {
        Refill(None)
    }

    /// Of a kernel without one.
    #[track_caller]
    pub(super) fn new(b: &mut Builder, fwd: &'f Fwd) -> Refill<'f> {
        let tile = &fwd.spec.tile;
        let stream = |b: &mut Builder, from| Stream::new(b, from, tile.tile_n);
        Refill(Some(Loader {
            q: Feed::new(b, &fwd.q),
            k: stream(b, &fwd.k),
            v: stream(b, &fwd.v),
            stages: tile.stages,
            warp: 4 * (tile.consumers - 1),
        }))
    }

    /// Begins a tile that visits a block: Q, and as much of K and V as there are slots for.
    #[track_caller]
    pub(super) fn begin(&mut self, b: &mut Builder, work: &Work<V<B32>>) {
        self.alone(b, |b, Loader { q, k, v, stages, .. }| {
            b.set(k.loaded, work.kv.end);
            b.set(v.loaded, work.kv.end);
            k.next(b, work);
            q.load(b, work.head, work.row, work.batch); // A1:4-5
            for _ in 1..*stages {
                k.next(b, work);
                v.next(b, work);
            }
            v.next(b, work);
        });
    }

    /// Loads the next block of K, if there is one: this warpgroup has given back a slot.
    #[track_caller]
    pub(super) fn k(&mut self, b: &mut Builder, work: &Work<V<B32>>) {
        self.alone(b, |b, loader| loader.k.next(b, work));
    }

    /// The same of V.
    #[track_caller]
    pub(super) fn v(&mut self, b: &mut Builder, work: &Work<V<B32>>) {
        self.alone(b, |b, loader| loader.v.next(b, work));
    }

    /// Runs `body` in the thread that loads.
    #[track_caller]
    fn alone(&mut self, b: &mut Builder, body: impl FnOnce(&mut Builder, &mut Loader<'f>)) {
        if let Refill(Some(loader)) = self {
            b.once_in_warp(loader.warp, |b| body(b, loader));
            // The thread may have waited long; products need its warp together.
            b.warp_sync();
        }
    }
}

impl<'f> Stream<'f> {
    #[track_caller]
    fn new(b: &mut Builder, from: &'f (TileMap, Ring<1>), keys: u32) -> Stream<'f> {
        Stream { feed: Feed::new(b, from), keys, loaded: b.var("loaded", 0) }
    }

    #[track_caller]
    fn next(&mut self, b: &mut Builder, work: &Work<V<B32>>) {
        let loaded = b.get(self.loaded);
        let more = b.gt_u32(loaded, work.kv.first);
        b.if_uniform(more, |b| {
            let block = b.sub(loaded, 1);
            b.set(self.loaded, block);
            let row = b.mul(block, self.keys);
            self.feed.load(b, work.kv_head, row, work.batch); // A1:7-9
        });
    }
}
