//! The works of a CTA, one after the other: the same ones for its producer and its consumers.
//!
//! Where all sequences are of one length, what reaches a role is a tile's number, and each role computes its work from
//! it ([`Tiles`]). Where they are in a table, the producer looks the work up, which takes two loads that depend on each
//! other, and sends all of it to the consumers. These read it twice, so that what they need at a tile's end takes no
//! registers until then.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic};

use super::geometry::{Geometry, Work};
use super::lookup::Lookup;
use super::table::Table;
use super::tiles::{Ticket, Tiles};
use crate::kernels::params::InKernel;

/// Bytes of a word, and of what is loaded at a time.
const WORD: i32 = 4;
const VECTOR: i32 = 16;

/// Works that may be sent before consumers have given the first one back: that of their tile, and the next one.
const SLOTS: u32 = 2;

/// The works of a launch, and how they reach CTAs.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum Works<'k> {
    /// By their tiles' numbers.
    Computed { tiles: Tiles<'k>, geometry: Geometry<V<'k, B32>> },
    /// From the producer, which looks them up.
    Sent(Sent<'k>),
}

/// Works that are drawn from a counter and sent through a ring.
pub(crate) struct Sent<'k> {
    builder: &'k Builder,
    table: Table<InKernel<'k>>,
    ticket: V<'k, B64>,
    ring: Ring<'k, 1>,
    /// Whether a CTA draws its first tile, too: see [`Tiles::in_order`].
    in_order: bool,
}

impl<'k> Works<'k> {
    /// Works, over which `consumers` warps walk besides the producer. Under [`Scheduler::DynamicPersistent`] `ticket`
    /// is the address of the counter of tickets, unless the lookup has it.
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        scheduler: Scheduler,
        lookup: &Lookup<InKernel<'k>>,
        ticket: Option<V<'k, B64>>,
        consumers: u32,
    ) -> Works<'k> {
        match *lookup {
            Lookup::Equal(geometry) => {
                let tiles = Tiles::declare(b, scheduler, geometry.tiles, ticket, consumers);
                Works::Computed { tiles, geometry }
            }
            Lookup::Listed { table, ticket } => Works::Sent(Sent {
                builder: b,
                table,
                ticket,
                // Of which a work takes a part.
                ring: b.ring("mail", SLOTS, consumers, [("work", TileShape::new(Elem::U32, 8, 4))]),
                in_order: false,
            }),
        }
    }

    /// The same works, begun in the order of their tiles' numbers: see [`Tiles::in_order`].
    pub(crate) fn in_order(self) -> Works<'k> {
        match self {
            Works::Computed { tiles, geometry } => Works::Computed { tiles: tiles.in_order(), geometry },
            Works::Sent(sent) => Works::Sent(Sent { in_order: true, ..sent }),
        }
    }

    /// Runs `body` with every work, in the one thread that fetches tickets: see [`Tiles::produce`]. What `body` needs of
    /// it in a loop, it may get again by its second argument, so that it takes no registers.
    #[track_caller]
    pub(crate) fn produce(
        &self,
        body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, &mut dyn FnMut()),
    ) {
        match self {
            Works::Computed { tiles, geometry } => tiles.produce(|tile, fetch_next| {
                let work = geometry.work(tile);
                body(work, &|| work, fetch_next);
            }),
            Works::Sent(sent) => sent.produce(body),
        }
    }

    /// Runs `body` with every work, in a consumer's warps. What `body` needs of it at its end, it may get again by its
    /// second argument.
    #[track_caller]
    pub(crate) fn consume(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>)) {
        match self {
            Works::Computed { tiles, geometry } => tiles.consume(|tile| {
                let work = geometry.work(tile);
                body(work, &|| work);
            }),
            Works::Sent(sent) => sent.consume(body),
        }
    }

    /// The same for roles that keep all of a work in registers: the producer may send another one at once.
    #[track_caller]
    pub(crate) fn consume_kept(&self, body: impl FnOnce(Work<V<'k, B32>>)) {
        match self {
            Works::Computed { .. } => self.consume(|work, _| body(work)),
            Works::Sent(sent) => sent.receive(|work, _, slot| {
                slot.release_unfenced();
                body(work);
            }),
        }
    }
}

impl<'k> Sent<'k> {
    /// A CTA's first tile is that of its own number; it draws the others. Each of them draws one ticket for which there
    /// is no tile, so that all of them draw as many as there are tiles. A CTA without a first tile draws none. In order,
    /// a CTA draws its first tile, too, and all of them one ticket more each.
    ///
    /// A producer has few registers. So words go to the slot as soon as they are known, and it reads them there.
    #[track_caller]
    fn produce(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, &mut dyn FnMut())) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut ring = self.ring.producer_by(rounds);
        let count = self.table.tiles(b);
        let draw =
            || Ticket::new(self.ticket, if self.in_order { count + b.grid_x() - 1 } else { count - 1 });
        let first = if self.in_order { draw().fetch(b) } else { b.cta_x() };
        let next = b.var("tile", first);
        b.repeat(|| {
            let slot = ring.acquire();
            let [at] = slot.tiles().map(|tile| tile.element(0, 0));
            let tile = next.get();
            let is_tile = tile.lt(count);
            b.if_else_uniform(
                is_tile,
                || self.table.look_up(b, tile, |number, word| b.store(at.at(WORD * number), word)),
                // A work without rows ends them.
                || (0..self.table.words()).for_each(|number| b.store(at.at(WORD * number), 0)),
            );
            slot.commit();
            rounds.next();
            b.break_if(!is_tile);
            let read = || self.table.work(|number| b.load(at.at(WORD * number)));
            let mut ticket = draw();
            body(read(), &read, &mut || _ = ticket.fetch(b));
            let before = if self.in_order { b.copy(0) } else { b.grid_x() };
            next.set(next_dynamic(ticket.fetch(b), before));
        });
    }

    #[track_caller]
    fn consume(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>)) {
        self.receive(|work, read, slot| {
            body(work, read);
            slot.release_unfenced();
        });
    }

    /// Runs `body` with every work, a function that reads it again, and its slot, which `body` gives back.
    #[track_caller]
    fn receive(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, FullSlot<'k, 1>)) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut ring = self.ring.consumer_by(rounds);
        b.repeat(|| {
            let slot = ring.wait();
            let at = slot.tile().element(0, 0);
            let read = || {
                // All lanes read them. The compiler cannot know that they agree; from one lane, it does.
                let vectors = [0, 1, 2].map(|vector| {
                    let words: [V<'k, B32>; 4] = b.load_vector(at.at(VECTOR * vector));
                    words.map(|word| word.shfl_idx(0))
                });
                self.table.work(|number| match vectors.get(number as usize / 4) {
                    Some(words) => words[number as usize % 4],
                    None => b.load::<B32>(at.at(WORD * number)).shfl_idx(0),
                })
            };
            let work = read();
            b.break_if(work.rows_of_o().eq(0));
            body(work, &read, slot);
            rounds.next();
        });
    }
}
