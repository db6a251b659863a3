//! The loads of a kernel without a producer: one thread of the consumers issues each load as soon as its stage is free.
//!
//! Blocks come in the producer's order, from the last to the first. When a tile begins, the thread loads as many blocks
//! as there are stages. Then it refills each stage as soon as its own warpgroup has released it.

use fa3_ir::lang::*;
use fa3_sched::forward::Loads;

use super::state::Fwd;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::tma_pipeline::{TmaPipeline, TmaProducer};

/// The loads that a kernel without a producer issues when a tile begins.
pub(super) struct SelfLoading<'k> {
    loader: Loader<'k>,
    q: TmaProducer<'k>,
    stages: u32,
}

/// K or V as a consumer sees it: its pipeline, and the loads that refill stages, if there is no producer.
pub(super) struct Kv<'k> {
    stages: Consumer<'k, 1>,
    stream: Option<Stream<'k>>,
}

/// The thread that issues loads, in a kernel without a producer.
#[derive(Clone, Copy)]
struct Loader<'k> {
    builder: &'k Builder,
    /// The thread's warp, in the last warpgroup. Before the warp refills a stage, it waits until every consumer has
    /// released the stage. Under ping-pong, the other warpgroups have had their turn by then, and none of them waits
    /// for this warp.
    warp: u32,
}

/// The blocks of a tile that are still to be loaded.
struct Stream<'k> {
    loader: Loader<'k>,
    blocks: TmaProducer<'k>,
    /// Number of keys of a block.
    keys: u32,
    /// First block that has been loaded, as have all blocks behind it. Only the thread that loads knows it.
    loaded: Var<'k, B32>,
    /// The tile being loaded; `None` before the first tile.
    work: Option<WorkTile<'k>>,
}

impl<'k> SelfLoading<'k> {
    /// Makes the loads of consumers; `None` if there is a producer.
    #[track_caller]
    pub(super) fn of(
        fwd: &Fwd<'k>,
        k: Consumer<'k, 1>,
        v: Consumer<'k, 1>,
    ) -> (Option<SelfLoading<'k>>, Kv<'k>, Kv<'k>) {
        let tile = &fwd.spec.tile;
        match tile.loads {
            Loads::Producer => (None, Kv { stages: k, stream: None }, Kv { stages: v, stream: None }),
            Loads::Consumers => {
                let loader = Loader { builder: fwd.builder, warp: 4 * (tile.consumers - 1) };
                let q = fwd.q.producer();
                let stream = |pipeline: &TmaPipeline<'k>| Some(Stream::new(loader, pipeline, tile.tile_n));
                let (k, v) =
                    (Kv { stages: k, stream: stream(&fwd.k) }, Kv { stages: v, stream: stream(&fwd.v) });
                (Some(SelfLoading { loader, q, stages: tile.stages }), k, v)
            }
        }
    }

    /// Issues the first loads of a tile that visits a block: Q, and as many blocks of K and V as there are stages.
    #[track_caller]
    pub(super) fn begin(&mut self, work: &WorkTile<'k>, k: &mut Kv<'k>, v: &mut Kv<'k>) {
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
    pub(super) fn wait(&mut self) -> FullStage<'k, 1> {
        self.stages.wait()
    }

    /// Whether the next block has been loaded.
    #[track_caller]
    pub(super) fn is_there(&self) -> V<'k, Pred> {
        self.stages.is_full()
    }

    /// Makes a holder for loops that keep one block while they read the next. The holder is empty at first.
    #[track_caller]
    pub(super) fn held_beside(&self) -> HeldStage<'k, 1> {
        self.stages.held_beside()
    }

    /// Releases a block's stage. If there is no producer, begins to load the next block into it.
    #[track_caller]
    pub(super) fn release(&mut self, stage: FullStage<'k, 1>) {
        stage.release();
        if let Some(stream) = &mut self.stream {
            stream.loader.alone(|| stream.next());
        }
    }
}

impl Loader<'_> {
    /// Runs `body` in the thread that issues loads.
    #[track_caller]
    fn alone(self, body: impl FnOnce()) {
        self.builder.once_in_warp(self.warp, body);
        // The thread may have waited long, and wgmma needs its warp converged.
        self.builder.warp_sync();
    }
}

impl<'k> Stream<'k> {
    #[track_caller]
    fn new(loader: Loader<'k>, pipeline: &TmaPipeline<'k>, keys: u32) -> Stream<'k> {
        let blocks = pipeline.producer();
        Stream { loader, blocks, keys, loaded: loader.builder.var("loaded", 0), work: None }
    }

    /// Begins a tile, no block of which has been loaded yet.
    #[track_caller]
    fn begin(&mut self, work: &WorkTile<'k>) {
        self.loaded.set(work.kv.end);
        self.work = Some(*work);
    }

    /// Loads the tile's next block, unless all are loaded.
    #[track_caller]
    fn next(&mut self) {
        let Some(WorkTile { batch, kv_head, kv, .. }) = self.work else { return };
        let loaded = self.loaded.get();
        self.loader.builder.if_uniform(loaded.gt(kv.first), || {
            let block = loaded - 1;
            self.loaded.set(block);
            self.blocks.load(kv_head, block * self.keys, batch); // A1:7-9
        });
    }
}
