//! The indices of the tiles that a CTA computes. Producer and consumers walk over the same tiles.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic, next_static};

/// The tile indices of a launch, and how they reach CTAs.
pub(crate) struct TileIndices<'k> {
    builder: &'k Builder,
    /// Number of tiles of the launch.
    count: U32<'k>,
    source: Fetch<'k>,
}

/// The [`Scheduler`], with its state in a kernel.
enum Fetch<'k> {
    OneTile,
    Static,
    Dynamic(Broadcast<'k>),
}

/// The producer fetches tile indices from the counter, and broadcasts each in one word, through a one-stage pipeline.
struct Broadcast<'k> {
    tile_counter: U64<'k>,
    pipeline: Pipeline<'k, 0>,
    word: Region,
    /// Whether a CTA fetches its first tile, too. Then a tile begins only after all tiles before it have begun.
    in_order: bool,
}

/// A value of the tile counter, which is fetched only once.
pub(super) struct CounterValue<'k> {
    counter: U64<'k>,
    /// The last value that a launch fetches, which resets the counter to 0.
    last: U32<'k>,
    fetched: Option<U32<'k>>,
}

impl<'k> CounterValue<'k> {
    /// A value of `counter` that has not been fetched yet.
    pub(super) fn new(counter: U64<'k>, last: U32<'k>) -> CounterValue<'k> {
        CounterValue { counter, last, fetched: None }
    }

    /// The value, which the first call fetches.
    #[track_caller]
    pub(super) fn fetch(&mut self, b: &'k Builder) -> U32<'k> {
        *self.fetched.get_or_insert_with(|| b.atomic_inc_u32(self.counter, self.last))
    }
}

impl<'k> TileIndices<'k> {
    /// The tiles of a launch, which `consumers` warps walk over beside the producer. `tile_counter` is the address of
    /// the tile counter under [`Scheduler::DynamicPersistent`].
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        scheduler: Scheduler,
        count: U32<'k>,
        tile_counter: Option<U64<'k>>,
        consumers: u32,
    ) -> TileIndices<'k> {
        let source = match (scheduler, tile_counter) {
            (Scheduler::DynamicPersistent, Some(tile_counter)) => Fetch::Dynamic(Broadcast {
                tile_counter,
                pipeline: b.pipeline("tile indices", 1, consumers, []),
                word: b.region("next tile", 4, 4),
                in_order: false,
            }),
            (Scheduler::OneTile, _) => Fetch::OneTile,
            (Scheduler::StaticPersistent | Scheduler::DynamicPersistent, _) => Fetch::Static,
        };
        TileIndices { builder: b, count, source }
    }

    /// Makes tiles begin in the order of their indices, so that a tile may wait for earlier ones, whatever else the GPU
    /// runs. Otherwise a CTA's first tile has the CTA's index, and may begin late. Only the dynamic scheduler needs
    /// this.
    pub(super) fn in_order(&mut self) {
        if let Fetch::Dynamic(broadcast) = &mut self.source {
            broadcast.in_order = true;
        }
    }

    /// Runs `body` with the index of every tile, in the one thread that fetches from the counter. `body` calls its
    /// second argument when the next index should be fetched: early, because the atomic takes about 1 µs, or late,
    /// because a late fetch balances load better.
    #[track_caller]
    pub(crate) fn produce(&self, body: impl FnOnce(U32<'k>, &mut dyn FnMut())) {
        let b = self.builder;
        let Fetch::Dynamic(Broadcast { tile_counter, pipeline, word, in_order }) = &self.source else {
            return self.consume(|tile| body(tile, &mut || ()));
        };
        let mut pipeline = pipeline.producer();
        let ctas = b.grid_x();
        // Each CTA fetches one index beyond the last tile. If tiles begin in order, it fetches its first tile, too.
        let (last, before) =
            if *in_order { (self.count + ctas - 1, b.copy(0)) } else { (self.count - 1, ctas) };
        let value = || CounterValue::new(*tile_counter, last);
        let mut send = |tile: U32<'k>| {
            let stage = pipeline.acquire();
            b.store(*word, tile);
            stage.commit();
            tile
        };
        let first = if *in_order { send(value().fetch(b)) } else { b.cta_x() };
        self.each(first, |tile| {
            let mut fetched = value();
            body(tile, &mut || _ = fetched.fetch(b));
            send(next_dynamic(fetched.fetch(b), before))
        });
    }

    /// Runs `body` with the index of every tile, in a consumer's warps.
    #[track_caller]
    pub(crate) fn consume(&self, body: impl FnOnce(U32<'k>)) {
        let b = self.builder;
        match &self.source {
            Fetch::OneTile => body(b.cta_x()),
            Fetch::Static => {
                let ctas = b.grid_x();
                self.each(b.cta_x(), |tile| {
                    body(tile);
                    next_static(tile, ctas)
                });
            }
            Fetch::Dynamic(Broadcast { pipeline, word, in_order, .. }) => {
                let mut pipeline = pipeline.consumer();
                let mut receive = || {
                    let stage = pipeline.wait();
                    // All lanes read the word, and take it from one lane, so that the compiler knows that lanes agree.
                    let tile = b.load::<B32>(*word).shfl_idx(0);
                    stage.release_unfenced();
                    tile
                };
                let first = if *in_order { receive() } else { b.cta_x() };
                self.each(first, |tile| {
                    body(tile);
                    receive()
                });
            }
        }
    }

    /// Runs `step` from index `first` on, until `step` returns an index beyond the last tile.
    #[track_caller]
    fn each(&self, first: U32<'k>, step: impl FnOnce(U32<'k>) -> U32<'k>) {
        let b = self.builder;
        let next = b.var("tile", first);
        b.repeat(|| {
            b.break_if(next.now().ge(self.count));
            next.set(step(next.get()));
        });
    }
}
