//! The work tiles of a CTA, in order (CUTLASS: the scheduler pipeline). Its producer and its consumers get equal work
//! tiles.
//!
//! Where all sequences have one length, a role gets a tile index and computes the work tile from it ([`Tiles`]). Where
//! sequences are in a table, the producer looks the work tile up, by two dependent loads, and sends all of its words to
//! the consumers. Consumers read the words again at a tile's end, so that these occupy no registers until then.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic};

use super::geometry::{Geometry, Work};
use super::intervals::IntervalTiles;
use super::lookup::Lookup;
use super::shares::{Shares, Start};
use super::table::Table;
use super::tiles::{Ticket, Tiles};
use super::work_tile_info::{Word, WorkTileInfo};
use crate::kernels::params::InKernel;

/// Bytes of a vector.
const VECTOR: i32 = 16;

/// Stages of the scheduler pipeline: the consumers' work tile, and the next one.
const SLOTS: u32 = 2;

/// The work tiles of a launch, and how they reach CTAs.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum Works<'k> {
    /// Computed by each role from a tile index.
    Computed { tiles: Tiles<'k>, geometry: Geometry<V<'k, B32>> },
    /// Sent by the producer, or by a warp beside it.
    Sent(Sent<'k>),
}

/// The scheduler pipeline, which carries work tiles.
pub(crate) struct Sent<'k> {
    builder: &'k Builder,
    source: WorkSource<'k>,
    ring: Ring<'k, 1>,
    /// The pipeline by which the producer asks for the next work tile, where a warp beside it finds work tiles.
    asks: Option<Ring<'k, 0>>,
}

/// The source of the work tiles that are sent.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
enum WorkSource<'k> {
    /// Tiles of a table, whose indices are drawn from the tile counter.
    Drawn(Drawn<'k>),
    /// The CTA's share of all keys (split-KV).
    Shared(Shares<InKernel<'k>>),
    /// Tiles whose blocks follow from the bounds of their rows.
    Found(IntervalTiles<'k>),
}

/// Tiles of a table, and the tile counter.
#[derive(Clone, Copy)]
pub(crate) struct Drawn<'k> {
    table: Table<InKernel<'k>>,
    ticket: V<'k, B64>,
    /// Whether a CTA draws its first tile, too: see [`Tiles::in_order`].
    in_order: bool,
}

/// The work tiles of a producer, ready to be walked over.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum Begun<'w, 'k> {
    Computed { tiles: &'w Tiles<'k>, geometry: &'w Geometry<V<'k, B32>> },
    Drawn { sent: &'w Sent<'k>, drawn: Drawn<'k> },
    Shared { sent: &'w Sent<'k>, shares: Shares<InKernel<'k>>, start: Start<'k> },
    Found { sent: &'w Sent<'k>, asks: &'w Ring<'k, 0> },
}

impl<'k> Works<'k> {
    /// Declares work tiles that `consumers` warps walk over beside the producer. Under
    /// [`Scheduler::DynamicPersistent`], `ticket` is the address of the tile counter, unless `lookup` has it.
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
            Lookup::Listed { table, ticket } => {
                Works::sent(b, WorkSource::Drawn(Drawn { table, ticket, in_order: false }), consumers)
            }
        }
    }

    /// Declares the work tiles of a split-KV kernel, where each CTA has an equal share of all keys.
    #[track_caller]
    pub(crate) fn declare_shares(b: &'k Builder, shares: Shares<InKernel<'k>>, consumers: u32) -> Works<'k> {
        Works::sent(b, WorkSource::Shared(shares), consumers)
    }

    /// Declares work tiles whose blocks follow from the bounds of rows. A warp beside the producer's finds them
    /// ([`Works::find`]).
    #[track_caller]
    pub(crate) fn declare_found(b: &'k Builder, tiles: IntervalTiles<'k>, consumers: u32) -> Works<'k> {
        // The producer's warp receives work tiles, too.
        match Works::sent(b, WorkSource::Found(tiles), consumers + 1) {
            Works::Sent(sent) => Works::Sent(Sent { asks: Some(b.ring("asks", 1, 1, [])), ..sent }),
            computed @ Works::Computed { .. } => computed,
        }
    }

    /// Finds work tiles whose blocks follow from the bounds of rows, in a warp. It draws a tile when the producer asks
    /// for the next one, and sends it.
    #[track_caller]
    pub(crate) fn find(&self) {
        let Works::Sent(Sent { builder: b, source: WorkSource::Found(tiles), ring, asks: Some(asks) }) = self
        else {
            return;
        };
        let rounds = Rounds::begin(b);
        let (mut ring, mut asks) = (ring.producer_by(rounds), asks.consumer());
        let count = tiles.count(b);
        let tile = b.var("tile", b.cta_x());
        let drawn = b.var("drawn", 0);
        b.repeat(|| {
            let number = tile.get();
            let words = tiles.words(b, number, count);
            ring.fill_by_warp(|slot| {
                let [at] = slot.tiles().map(|tile| tile.element(0, 0));
                for (number, words) in words.into_iter().enumerate() {
                    b.store_vector(at.at(VECTOR * number as i32), words);
                }
                slot.commit();
            });
            rounds.next();
            b.break_if(number.ge(count));
            asks.wait().release();
            let mut ticket = Ticket::new(tiles.ticket, count - 1);
            b.if_lanes(b.lane_id().eq(0), || drawn.set(ticket.fetch(b)));
            tile.set(next_dynamic(drawn.get().shfl_idx(0), b.grid_x()));
        });
    }

    #[track_caller]
    fn sent(b: &'k Builder, source: WorkSource<'k>, consumers: u32) -> Works<'k> {
        // A stage; most messages fill a part of it.
        let slot = ("work", TileShape::new(Elem::U32, 8, 4));
        Works::Sent(Sent { builder: b, source, ring: b.ring("mail", SLOTS, consumers, [slot]), asks: None })
    }

    /// Makes tiles begin in the order of their indices: see [`Tiles::in_order`].
    pub(crate) fn in_order(self) -> Works<'k> {
        match self {
            Works::Computed { tiles, geometry } => Works::Computed { tiles: tiles.in_order(), geometry },
            Works::Sent(sent) => {
                let source = match sent.source {
                    WorkSource::Drawn(drawn) => WorkSource::Drawn(Drawn { in_order: true, ..drawn }),
                    other @ (WorkSource::Shared(_) | WorkSource::Found(_)) => other,
                };
                Works::Sent(Sent { source, ..sent })
            }
        }
    }

    /// Finds where the CTA's work tiles begin. In a split-KV kernel, whole warps of the producer must call it.
    #[track_caller]
    pub(crate) fn begin(&self) -> Begun<'_, 'k> {
        match self {
            Works::Computed { tiles, geometry } => Begun::Computed { tiles, geometry },
            Works::Sent(sent) => match sent.source {
                WorkSource::Drawn(drawn) => Begun::Drawn { sent, drawn },
                WorkSource::Shared(shares) => {
                    Begun::Shared { sent, shares, start: shares.start(sent.builder) }
                }
                WorkSource::Found(_) => {
                    let asks = sent.asks.as_ref().expect("a warp that finds works is asked for them");
                    Begun::Found { sent, asks }
                }
            },
        }
    }

    /// Runs `body` with every work tile, in a consumer's warps. The second argument reads the work tile again, so that
    /// it need not stay in registers until the tile's end.
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

    /// Like `consume`, for roles that keep the whole work tile in registers: its stage is released at once.
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

impl<'k> Begun<'_, 'k> {
    /// Runs `body` with every work tile, in the one thread that draws from the counter, or in a whole warp if another
    /// warp finds work tiles (see [`Tiles::produce`]). The second argument of `body` reads the work tile again, so that
    /// a loop need not keep it in registers. The third fetches the next tile.
    #[track_caller]
    pub(crate) fn produce(
        &self,
        body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, &mut dyn FnMut()),
    ) {
        match *self {
            Begun::Computed { tiles, geometry } => tiles.produce(|tile, fetch_next| {
                let work = geometry.work(tile);
                body(work, &|| work, fetch_next);
            }),
            Begun::Drawn { sent, drawn } => sent.draw(&drawn, body),
            Begun::Shared { sent, shares, start } => sent.share(&shares, start, body),
            Begun::Found { sent, asks } => {
                let mut asks = asks.producer();
                sent.receive(|work, read, slot| {
                    body(work, read, &mut || asks.fill_by_warp(EmptySlot::commit));
                    slot.release_unfenced();
                });
            }
        }
    }
}

impl<'k> Sent<'k> {
    /// A CTA's first tile has the CTA's index; the CTA draws all others from the counter. Each CTA draws one index
    /// beyond the last tile, so that all CTAs together draw as many indices as there are tiles. A CTA without a first
    /// tile draws none. In order, every CTA draws its first tile, too, which is one index more for each.
    ///
    /// A producer has few registers, so words go to the stage as soon as they are known, and are read back from it.
    #[track_caller]
    fn draw(
        &self,
        &Drawn { table, ticket, in_order }: &Drawn<'k>,
        body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, &mut dyn FnMut()),
    ) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut ring = self.ring.producer_by(rounds);
        let count = table.tiles(b);
        let draw = || Ticket::new(ticket, if in_order { count + b.grid_x() - 1 } else { count - 1 });
        let first = if in_order { draw().fetch(b) } else { b.cta_x() };
        let next = b.var("tile", first);
        b.repeat(|| {
            let slot = ring.acquire();
            let [at] = slot.tiles().map(|tile| tile.element(0, 0));
            let store = |word: Word, value| b.store(at.at(word.offset()), value);
            let tile = next.get();
            let is_tile = tile.lt(count);
            b.if_else_uniform(
                is_tile,
                || table.look_up(b, tile, store),
                || WorkTileInfo::store_end(|| b.value(0), table.places.is_some(), store),
            );
            slot.commit();
            rounds.next();
            b.break_if(!is_tile);
            let read = || table.work(|word| b.load(at.at(word.offset())));
            let mut ticket = draw();
            body(read(), &read, &mut || _ = ticket.fetch(b));
            let before = if in_order { b.copy(0) } else { b.grid_x() };
            next.set(next_dynamic(ticket.fetch(b), before));
        });
    }

    /// Runs `body` with every work tile of the CTA's share, in order.
    #[track_caller]
    fn share(
        &self,
        shares: &Shares<InKernel<'k>>,
        start: Start<'k>,
        body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, &mut dyn FnMut()),
    ) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut ring = self.ring.producer_by(rounds);
        shares.walk(b, start, |write, is_there| {
            let slot = ring.acquire();
            let [at] = slot.tiles().map(|tile| tile.element(0, 0));
            write(&|word, value| b.store(at.at(word.offset()), value));
            slot.commit();
            rounds.next();
            b.break_if(!is_there);
            let read = || shares.work(|word| b.load(at.at(word.offset())));
            body(read(), &read, &mut || ());
        });
    }

    #[track_caller]
    fn consume(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>)) {
        self.receive(|work, read, slot| {
            body(work, read);
            slot.release_unfenced();
        });
    }

    /// Runs `body` with every work tile, a function that reads it again, and its stage, which `body` must release.
    #[track_caller]
    fn receive(&self, body: impl FnOnce(Work<V<'k, B32>>, &dyn Fn() -> Work<V<'k, B32>>, FullSlot<'k, 1>)) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut ring = self.ring.consumer_by(rounds);
        b.repeat(|| {
            let slot = ring.wait();
            let at = slot.tile().element(0, 0);
            if let WorkSource::Found(tiles) = &self.source {
                let (work, is_tile) = tiles.work(b, at);
                b.break_if(!is_tile);
                body(work, &|| tiles.work(b, at).0, slot);
                rounds.next();
                return;
            }
            let read = || {
                // All lanes read the words. The compiler knows that they agree only if they come from one lane.
                let vectors = [0, 1, 2].map(|vector| {
                    let words: [V<'k, B32>; 4] = b.load_vector(at.at(VECTOR * vector));
                    words.map(|word| word.shfl_idx(0))
                });
                let word = |word: Word| match vectors.as_flattened().get(word as usize) {
                    Some(value) => *value,
                    None => b.load::<B32>(at.at(word.offset())).shfl_idx(0),
                };
                match &self.source {
                    WorkSource::Drawn(drawn) => drawn.table.work(word),
                    WorkSource::Shared(shares) => shares.work(word),
                    WorkSource::Found(_) => unreachable!("they have been read"),
                }
            };
            let work = read();
            b.break_if(work.rows_of_o().eq(0));
            body(work, &read, slot);
            rounds.next();
        });
    }
}
