//! The works of a CTA, one after the other: the same ones for its producer and its consumers.
//!
//! Where all sequences are of one length, what reaches a role is a tile's number, and each role computes its work from
//! it ([`Tiles`]). Where they are in a table, the producer looks the work up, which takes two loads that depend on each
//! other, and sends all of it to the consumers.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic};

use super::geometry::{Geometry, Work};
use super::lookup::Lookup;
use super::table::{Table, Words};
use super::tiles::{Ticket, Tiles};
use crate::kernels::params::InKernel;

/// Bytes that are loaded at a time.
const VECTOR: i32 = 16;

/// The works of a launch, and how they reach CTAs.
pub(crate) enum Works<'k> {
    /// By their tiles' numbers.
    Computed { tiles: Tiles<'k>, geometry: Geometry<V<'k, B32>> },
    /// From the producer, which looks them up.
    Sent(Sent<'k>),
}

/// Works that are drawn from a counter and sent in words that are a slot of the ring.
pub(crate) struct Sent<'k> {
    builder: &'k Builder,
    table: Table<InKernel<'k>>,
    ticket: V<'k, B64>,
    ring: Ring<'k, 0>,
    words: Region,
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
                ring: b.ring("mail", 1, consumers, []),
                words: b.region("next work", 3 * VECTOR as u32, VECTOR as u32),
            }),
        }
    }

    /// Runs `body` with every work, in the one thread that fetches tickets: see [`Tiles::produce`].
    #[track_caller]
    pub(crate) fn produce(&self, body: impl FnOnce(Work<V<'k, B32>>, &mut dyn FnMut())) {
        match self {
            Works::Computed { tiles, geometry } => {
                tiles.produce(|tile, fetch_next| body(geometry.work(tile), fetch_next));
            }
            Works::Sent(sent) => sent.produce(body),
        }
    }

    /// Runs `body` with every work, in a consumer's warps.
    #[track_caller]
    pub(crate) fn consume(&self, body: impl FnOnce(Work<V<'k, B32>>)) {
        match self {
            Works::Computed { tiles, geometry } => tiles.consume(|tile| body(geometry.work(tile))),
            Works::Sent(sent) => sent.consume(body),
        }
    }
}

impl<'k> Sent<'k> {
    /// A CTA's first tile is that of its own number; it draws the others. Each of them draws one ticket for which there
    /// is no tile, so that all of them draw as many as there are tiles. A CTA without a first tile draws none.
    #[track_caller]
    fn produce(&self, body: impl FnOnce(Work<V<'k, B32>>, &mut dyn FnMut())) {
        let b = self.builder;
        let mut ring = self.ring.producer();
        let mut send = |words: Words<'k>| {
            let slot = ring.acquire();
            for (words, at) in words.into_iter().zip(0..) {
                b.store_vector(self.words.at(VECTOR * at), words);
            }
            slot.commit();
        };
        let (count, ctas) = (self.table.tiles(b), b.grid_x());
        let next = b.var("tile", b.cta_x());
        b.repeat(|| {
            b.break_if(next.now().ge(count));
            let words = self.table.look_up(b, next.get());
            send(words);
            let mut ticket = Ticket::new(self.ticket, count - 1);
            body(self.table.work(words), &mut || _ = ticket.fetch(b));
            next.set(next_dynamic(ticket.fetch(b), ctas));
        });
        // Without rows, it is none.
        send([[b.value(0); 4]; 3]);
    }

    #[track_caller]
    fn consume(&self, body: impl FnOnce(Work<V<'k, B32>>)) {
        let b = self.builder;
        let mut ring = self.ring.consumer();
        b.repeat(|| {
            let slot = ring.wait();
            // All lanes have read them. The compiler cannot know that they agree; from one lane, it does.
            let words: Words<'k> = [0, 1, 2]
                .map(|at| b.load_vector(self.words.at(VECTOR * at)).map(|word: V<'k, B32>| word.shfl_idx(0)));
            slot.release_unfenced();
            let work = self.table.work(words);
            b.break_if(work.rows_of_o().eq(0));
            body(work);
        });
    }
}
