//! The tile scheduler: which tiles a CTA computes. Producer and consumers walk over the same tiles.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic, next_static};

/// The tiles of a launch and how they reach CTAs.
pub(crate) struct Tiles<'k> {
    builder: &'k Builder,
    /// Number of tiles.
    count: V<'k, B32>,
    source: Fetch<'k>,
}

/// The [`Scheduler`], with its state in a kernel.
enum Fetch<'k> {
    OneTile,
    Static,
    Dynamic(Broadcast<'k>),
}

/// The producer draws tile indices from the tile counter and broadcasts each in one word, through a pipeline of one
/// stage.
struct Broadcast<'k> {
    ticket: V<'k, B64>,
    ring: Ring<'k, 0>,
    word: Region,
    /// Whether a CTA draws its first tile, too, so that a tile begins only when all tiles before it have begun.
    in_order: bool,
}

/// The next value of the tile counter, which is fetched at most once.
pub(super) struct Ticket<'k> {
    counter: V<'k, B64>,
    /// The last value of a launch: fetching it resets the counter to 0.
    last: V<'k, B32>,
    fetched: Option<V<'k, B32>>,
}

impl<'k> Ticket<'k> {
    /// A value of this counter that has not been fetched yet.
    pub(super) fn new(counter: V<'k, B64>, last: V<'k, B32>) -> Ticket<'k> {
        Ticket { counter, last, fetched: None }
    }

    /// Fetches the value, the first time it is asked for.
    #[track_caller]
    pub(super) fn fetch(&mut self, b: &'k Builder) -> V<'k, B32> {
        *self.fetched.get_or_insert_with(|| b.atomic_inc_u32(self.counter, self.last))
    }
}

impl<'k> Tiles<'k> {
    /// The tiles of a launch, which `consumers` warps walk over beside the producer. Under
    /// [`Scheduler::DynamicPersistent`], `ticket` is the address of the tile counter.
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        scheduler: Scheduler,
        count: V<'k, B32>,
        ticket: Option<V<'k, B64>>,
        consumers: u32,
    ) -> Tiles<'k> {
        let source = match (scheduler, ticket) {
            (Scheduler::DynamicPersistent, Some(ticket)) => Fetch::Dynamic(Broadcast {
                ticket,
                ring: b.ring("mail", 1, consumers, []),
                word: b.region("next tile", 4, 4),
                in_order: false,
            }),
            (Scheduler::OneTile, _) => Fetch::OneTile,
            (Scheduler::StaticPersistent | Scheduler::DynamicPersistent, _) => Fetch::Static,
        };
        Tiles { builder: b, count, source }
    }

    /// Makes tiles begin in the order of their indices, so that a tile may wait for earlier ones, whatever else the GPU
    /// runs. Otherwise a CTA's first tile has the CTA's index, and may begin late. Under other schedulers nothing
    /// changes.
    pub(crate) fn in_order(mut self) -> Tiles<'k> {
        if let Fetch::Dynamic(broadcast) = &mut self.source {
            broadcast.in_order = true;
        }
        self
    }

    /// Runs `body` with the index of every tile, in the one thread that draws from the counter. `body` calls its second
    /// argument when the next index should be fetched: the atomic takes about 1 µs, but a late fetch balances load
    /// better.
    #[track_caller]
    pub(crate) fn produce(&self, body: impl FnOnce(V<'k, B32>, &mut dyn FnMut())) {
        let b = self.builder;
        let Fetch::Dynamic(Broadcast { ticket, ring, word, in_order }) = &self.source else {
            return self.consume(|tile| body(tile, &mut || ()));
        };
        let mut ring = ring.producer();
        let ctas = b.grid_x();
        // Each CTA draws one index beyond the last tile. In order, it draws its first tile, too.
        let (last, before) =
            if *in_order { (self.count + ctas - 1, b.copy(0)) } else { (self.count - 1, ctas) };
        let draw = || Ticket::new(*ticket, last);
        let mut send = |tile: V<'k, B32>| {
            let slot = ring.acquire();
            b.store(*word, tile);
            slot.commit();
            tile
        };
        let first = if *in_order { send(draw().fetch(b)) } else { b.cta_x() };
        self.each(first, |tile| {
            let mut ticket = draw();
            body(tile, &mut || _ = ticket.fetch(b));
            send(next_dynamic(ticket.fetch(b), before))
        });
    }

    /// Runs `body` with the index of every tile, in a consumer's warps.
    #[track_caller]
    pub(crate) fn consume(&self, body: impl FnOnce(V<'k, B32>)) {
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
            Fetch::Dynamic(Broadcast { ring, word, in_order, .. }) => {
                let mut ring = ring.consumer();
                let mut receive = || {
                    let slot = ring.wait();
                    // All lanes read the word. The compiler knows that they agree only if it comes from one lane.
                    let tile = b.load::<B32>(*word).shfl_idx(0);
                    slot.release_unfenced();
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

    /// Runs `step` from index `first` on, until `step` gives an index beyond the last tile.
    #[track_caller]
    fn each(&self, first: V<'k, B32>, step: impl FnOnce(V<'k, B32>) -> V<'k, B32>) {
        let b = self.builder;
        let next = b.var("tile", first);
        b.repeat(|| {
            b.break_if(next.now().ge(self.count));
            next.set(step(next.get()));
        });
    }
}
