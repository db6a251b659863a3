//! The work tiles of a CTA, in order (CUTLASS: the scheduler pipeline). Its producer and its consumers get equal work
//! tiles.
//!
//! Where all sequences have one length, a role gets a tile index and computes the work tile from it ([`TileIndices`]). Where
//! sequences are in a table, the producer looks the work tile up, by two dependent loads, and sends all of its words to
//! the consumers. Consumers read the words again at a tile's end, so that these occupy no registers until then.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic};

use super::geometry::{Geometry, WorkTile};
use super::intervals::IntervalTiles;
use super::lookup::Lookup;
use super::shares::{Shares, Start};
use super::table::Table;
use super::tile_indices::{CounterValue, TileIndices};
use super::work_tile_info::{Word, WorkTileInfo};
use crate::kernels::params::InKernel;

/// Bytes of a vector.
const VECTOR: i32 = 16;

/// Stages of the scheduler pipeline: the consumers' work tile, and the next one.
const STAGES: u32 = 2;

/// The work tiles of a launch, and how they reach CTAs.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum TileScheduler<'k> {
    /// Computed by each role from a tile index.
    Computed { tiles: TileIndices<'k>, geometry: Geometry<U32<'k>> },
    /// SchedulerPipeline by the producer, or by a warp beside it.
    SchedulerPipeline(SchedulerPipeline<'k>),
}

/// The scheduler pipeline, which carries work tiles.
pub(crate) struct SchedulerPipeline<'k> {
    builder: &'k Builder,
    source: WorkSource<'k>,
    pipeline: Pipeline<'k, 1>,
    /// The pipeline by which the producer requests for the next work tile, where a warp beside it finds work tiles.
    requests: Option<Pipeline<'k, 0>>,
}

/// The source of the work tiles that are sent.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
enum WorkSource<'k> {
    /// TileIndices of a table, whose indices are fetched from the tile counter.
    Varlen(Varlen<'k>),
    /// The CTA's share of all keys (split-KV).
    Shared(Shares<InKernel<'k>>),
    /// TileIndices whose blocks follow from the bounds of their rows.
    Found(IntervalTiles<'k>),
}

/// TileIndices of a table, and the tile counter.
#[derive(Clone, Copy)]
pub(crate) struct Varlen<'k> {
    table: Table<InKernel<'k>>,
    tile_counter: U64<'k>,
    /// Whether a CTA fetches its first tile, too: see [`TileIndices::in_order`].
    in_order: bool,
}

/// The work tiles of a producer, ready to be walked over.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum InitialWork<'w, 'k> {
    Computed { tiles: &'w TileIndices<'k>, geometry: &'w Geometry<U32<'k>> },
    Varlen { sent: &'w SchedulerPipeline<'k>, fetched: Varlen<'k> },
    Shared { sent: &'w SchedulerPipeline<'k>, shares: Shares<InKernel<'k>>, start: Start<'k> },
    Found { sent: &'w SchedulerPipeline<'k>, requests: &'w Pipeline<'k, 0> },
}

impl<'k> TileScheduler<'k> {
    /// Declares work tiles that `consumers` warps walk over beside the producer. Under
    /// [`Scheduler::DynamicPersistent`], `tile_counter` is the address of the tile counter, unless `lookup` has it.
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        scheduler: Scheduler,
        lookup: &Lookup<InKernel<'k>>,
        tile_counter: Option<U64<'k>>,
        consumers: u32,
    ) -> TileScheduler<'k> {
        match *lookup {
            Lookup::Dense(geometry) => {
                let tiles = TileIndices::declare(b, scheduler, geometry.tiles, tile_counter, consumers);
                TileScheduler::Computed { tiles, geometry }
            }
            Lookup::Varlen { table, tile_counter } => TileScheduler::sent(
                b,
                WorkSource::Varlen(Varlen { table, tile_counter, in_order: false }),
                consumers,
            ),
        }
    }

    /// Declares the work tiles of a split-KV kernel, where each CTA has an equal share of all keys.
    #[track_caller]
    pub(crate) fn declare_shares(
        b: &'k Builder,
        shares: Shares<InKernel<'k>>,
        consumers: u32,
    ) -> TileScheduler<'k> {
        TileScheduler::sent(b, WorkSource::Shared(shares), consumers)
    }

    /// Declares work tiles whose blocks follow from the bounds of rows. A warp beside the producer's finds them
    /// ([`TileScheduler::find`]).
    #[track_caller]
    pub(crate) fn declare_found(
        b: &'k Builder,
        tiles: IntervalTiles<'k>,
        consumers: u32,
    ) -> TileScheduler<'k> {
        // The producer's warp receives work tiles, too.
        match TileScheduler::sent(b, WorkSource::Found(tiles), consumers + 1) {
            TileScheduler::SchedulerPipeline(sent) => TileScheduler::SchedulerPipeline(SchedulerPipeline {
                requests: Some(b.pipeline("requests", 1, 1, [])),
                ..sent
            }),
            computed @ TileScheduler::Computed { .. } => computed,
        }
    }

    /// Finds work tiles whose blocks follow from the bounds of rows, in a warp. It fetches a tile when the producer requests
    /// for the next one, and sends it.
    #[track_caller]
    pub(crate) fn find(&self) {
        let TileScheduler::SchedulerPipeline(SchedulerPipeline {
            builder: b,
            source: WorkSource::Found(tiles),
            pipeline,
            requests: Some(requests),
        }) = self
        else {
            return;
        };
        let rounds = Rounds::begin(b);
        let (mut pipeline, mut requests) = (pipeline.producer_by(rounds), requests.consumer());
        let count = tiles.count(b);
        let tile = b.var("tile", b.cta_x());
        let fetched = b.var("fetched", 0);
        b.repeat(|| {
            let number = tile.get();
            let words = tiles.words(b, number, count);
            pipeline.fill_by_warp(|stage| {
                let [at] = stage.tiles().map(|tile| tile.element(0, 0));
                for (number, words) in words.into_iter().enumerate() {
                    b.store_vector(at.at(VECTOR * number as i32), words);
                }
                stage.commit();
            });
            rounds.next();
            b.break_if(number.ge(count));
            requests.wait().release();
            let mut tile_counter = CounterValue::new(tiles.tile_counter, count - 1);
            b.if_lanes(b.lane_id().eq(0), || fetched.set(tile_counter.fetch(b)));
            tile.set(next_dynamic(fetched.get().shfl_idx(0), b.grid_x()));
        });
    }

    #[track_caller]
    fn sent(b: &'k Builder, source: WorkSource<'k>, consumers: u32) -> TileScheduler<'k> {
        // A stage; most messages fill a part of it.
        let stage = ("work", TileShape::new(Elem::U32, 8, 4));
        TileScheduler::SchedulerPipeline(SchedulerPipeline {
            builder: b,
            source,
            pipeline: b.pipeline("work tiles", STAGES, consumers, [stage]),
            requests: None,
        })
    }

    /// Makes tiles begin in the order of their indices: see [`TileIndices::in_order`].
    pub(crate) fn in_order(self) -> TileScheduler<'k> {
        match self {
            TileScheduler::Computed { tiles, geometry } => {
                TileScheduler::Computed { tiles: tiles.in_order(), geometry }
            }
            TileScheduler::SchedulerPipeline(sent) => {
                let source = match sent.source {
                    WorkSource::Varlen(fetched) => WorkSource::Varlen(Varlen { in_order: true, ..fetched }),
                    other @ (WorkSource::Shared(_) | WorkSource::Found(_)) => other,
                };
                TileScheduler::SchedulerPipeline(SchedulerPipeline { source, ..sent })
            }
        }
    }

    /// Finds where the CTA's work tiles begin. In a split-KV kernel, whole warps of the producer must call it.
    #[track_caller]
    pub(crate) fn begin(&self) -> InitialWork<'_, 'k> {
        match self {
            TileScheduler::Computed { tiles, geometry } => InitialWork::Computed { tiles, geometry },
            TileScheduler::SchedulerPipeline(sent) => match sent.source {
                WorkSource::Varlen(fetched) => InitialWork::Varlen { sent, fetched },
                WorkSource::Shared(shares) => {
                    InitialWork::Shared { sent, shares, start: shares.start(sent.builder) }
                }
                WorkSource::Found(_) => {
                    let requests =
                        sent.requests.as_ref().expect("a warp that finds scheduler is asked for them");
                    InitialWork::Found { sent, requests }
                }
            },
        }
    }

    /// Runs `body` with every work tile, in a consumer's warps. The second argument reads the work tile again, so that
    /// it need not stay in registers until the tile's end.
    #[track_caller]
    pub(crate) fn consume(&self, body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>)) {
        match self {
            TileScheduler::Computed { tiles, geometry } => tiles.consume(|tile| {
                let work = geometry.work(tile);
                body(work, &|| work);
            }),
            TileScheduler::SchedulerPipeline(sent) => sent.consume(body),
        }
    }

    /// Like `consume`, for roles that keep the whole work tile in registers: its stage is released at once.
    #[track_caller]
    pub(crate) fn consume_kept(&self, body: impl FnOnce(WorkTile<'k>)) {
        match self {
            TileScheduler::Computed { .. } => self.consume(|work, _| body(work)),
            TileScheduler::SchedulerPipeline(sent) => sent.receive(|work, _, stage| {
                stage.release_unfenced();
                body(work);
            }),
        }
    }
}

impl<'k> InitialWork<'_, 'k> {
    /// Runs `body` with every work tile, in the one thread that fetches from the counter, or in a whole warp if another
    /// warp finds work tiles (see [`TileIndices::produce`]). The second argument of `body` reads the work tile again, so that
    /// a loop need not keep it in registers. The third fetches the next tile.
    #[track_caller]
    pub(crate) fn produce(
        &self,
        body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, &mut dyn FnMut()),
    ) {
        match *self {
            InitialWork::Computed { tiles, geometry } => tiles.produce(|tile, fetch_next| {
                let work = geometry.work(tile);
                body(work, &|| work, fetch_next);
            }),
            InitialWork::Varlen { sent, fetched } => sent.fetch(&fetched, body),
            InitialWork::Shared { sent, shares, start } => sent.share(&shares, start, body),
            InitialWork::Found { sent, requests } => {
                let mut requests = requests.producer();
                sent.receive(|work, read, stage| {
                    body(work, read, &mut || requests.fill_by_warp(EmptyStage::commit));
                    stage.release_unfenced();
                });
            }
        }
    }
}

impl<'k> SchedulerPipeline<'k> {
    /// A CTA's first tile has the CTA's index; the CTA fetches all others from the counter. Each CTA fetches one index
    /// beyond the last tile, so that all CTAs together fetch as many indices as there are tiles. A CTA without a first
    /// tile fetches none. In order, every CTA fetches its first tile, too, which is one index more for each.
    ///
    /// A producer has few registers, so words go to the stage as soon as they are known, and are read back from it.
    #[track_caller]
    fn fetch(
        &self,
        &Varlen { table, tile_counter, in_order }: &Varlen<'k>,
        body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, &mut dyn FnMut()),
    ) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut pipeline = self.pipeline.producer_by(rounds);
        let count = table.tiles(b);
        let fetch =
            || CounterValue::new(tile_counter, if in_order { count + b.grid_x() - 1 } else { count - 1 });
        let first = if in_order { fetch().fetch(b) } else { b.cta_x() };
        let next = b.var("tile", first);
        b.repeat(|| {
            let stage = pipeline.acquire();
            let [at] = stage.tiles().map(|tile| tile.element(0, 0));
            let store = |word: Word, value| b.store(at.at(word.offset()), value);
            let tile = next.get();
            let is_tile = tile.lt(count);
            b.if_else_uniform(
                is_tile,
                || table.look_up(b, tile, store),
                || WorkTileInfo::store_end(|| b.value(0), table.padded.is_some(), store),
            );
            stage.commit();
            rounds.next();
            b.break_if(!is_tile);
            let read = || table.work(|word| b.load(at.at(word.offset())));
            let mut tile_counter = fetch();
            body(read(), &read, &mut || _ = tile_counter.fetch(b));
            let before = if in_order { b.copy(0) } else { b.grid_x() };
            next.set(next_dynamic(tile_counter.fetch(b), before));
        });
    }

    /// Runs `body` with every work tile of the CTA's share, in order.
    #[track_caller]
    fn share(
        &self,
        shares: &Shares<InKernel<'k>>,
        start: Start<'k>,
        body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, &mut dyn FnMut()),
    ) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut pipeline = self.pipeline.producer_by(rounds);
        shares.walk(b, start, |write, is_there| {
            let stage = pipeline.acquire();
            let [at] = stage.tiles().map(|tile| tile.element(0, 0));
            write(&|word, value| b.store(at.at(word.offset()), value));
            stage.commit();
            rounds.next();
            b.break_if(!is_there);
            let read = || shares.work(|word| b.load(at.at(word.offset())));
            body(read(), &read, &mut || ());
        });
    }

    #[track_caller]
    fn consume(&self, body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>)) {
        self.receive(|work, read, stage| {
            body(work, read);
            stage.release_unfenced();
        });
    }

    /// Runs `body` with every work tile, a function that reads it again, and its stage, which `body` must release.
    #[track_caller]
    fn receive(&self, body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, FullStage<'k, 1>)) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut pipeline = self.pipeline.consumer_by(rounds);
        b.repeat(|| {
            let stage = pipeline.wait();
            let at = stage.tile().element(0, 0);
            if let WorkSource::Found(tiles) = &self.source {
                let (work, is_tile) = tiles.work(b, at);
                b.break_if(!is_tile);
                body(work, &|| tiles.work(b, at).0, stage);
                rounds.next();
                return;
            }
            let read = || {
                // All lanes read the words. The compiler knows that they agree only if they come from one lane.
                let vectors = [0, 1, 2].map(|vector| {
                    let words: [U32<'k>; 4] = b.load_vector(at.at(VECTOR * vector));
                    words.map(|word| word.shfl_idx(0))
                });
                let word = |word: Word| match vectors.as_flattened().get(word as usize) {
                    Some(value) => *value,
                    None => b.load::<B32>(at.at(word.offset())).shfl_idx(0),
                };
                match &self.source {
                    WorkSource::Varlen(fetched) => fetched.table.work(word),
                    WorkSource::Shared(shares) => shares.work(word),
                    WorkSource::Found(_) => unreachable!("they have been read"),
                }
            };
            let work = read();
            b.break_if(work.rows_of_o().eq(0));
            body(work, &read, stage);
            rounds.next();
        });
    }
}
