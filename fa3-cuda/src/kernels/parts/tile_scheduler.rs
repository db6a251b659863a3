//! The work tiles of a CTA, in one order for producer and consumers (CUTLASS: the scheduler pipeline).
//!
//! Where all sequences have one length, a role gets a tile index and computes the work tile from it ([`TileIndices`]).
//! Where sequences are in a table, the producer looks the work tile up, by two dependent loads, and sends all words of
//! it to the consumers. Consumers read the words again at a tile's end, so that the words occupy no registers until
//! then.

use fa3_ir::lang::*;
use fa3_sched::{Scheduler, next_dynamic};

use super::geometry::{Geometry, WorkTile};
use super::intervals::{IntervalTiles, TilesUnderIntervals, Words, load_words};
use super::lookup::Lookup;
use super::shares::{Shares, Start};
use super::table::Table;
use super::tile_indices::{CounterValue, TileIndices};
use super::work_tile_info::{Word, WorkTileInfo};
use crate::kernels::params::InKernel;

/// Bytes of a vector.
const VECTOR: i32 = 16;

/// Number of stages of the scheduler pipeline: one for the consumers' work tile, and one for the next.
const STAGES: u32 = 2;

/// The work tiles of a launch, and how they reach CTAs.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
pub(crate) enum TileScheduler<'k> {
    /// Each role computes work tiles from tile indices.
    Computed { tiles: TileIndices<'k>, geometry: Geometry<U32<'k>> },
    /// The producer, or a warp beside it, sends work tiles to the other warps.
    SchedulerPipeline(SchedulerPipeline<'k>),
}

/// The scheduler pipeline, which carries work tiles.
pub(crate) struct SchedulerPipeline<'k> {
    builder: &'k Builder,
    source: WorkSource<'k>,
    stages: Pipeline<'k, 1>,
}

/// The source of the work tiles that are sent.
#[allow(clippy::large_enum_variant, reason = "a kernel has one of them while it is built")]
enum WorkSource<'k> {
    /// The tiles of a table, whose indices come from the tile counter.
    Varlen(VarlenTiles<'k>),
    /// The CTA's share of all keys (split-KV).
    SplitKv(Shares<InKernel<'k>>),
    /// The tiles under a mask of intervals, whose blocks follow from the bounds of their rows. A warp beside the
    /// producer's finds the blocks. The pipeline carries the producer's requests for the next work tile.
    Intervals(IntervalTiles<'k>, Pipeline<'k, 0>),
}

/// Stores a word of a work tile.
type Store<'s, 'k> = &'s dyn Fn(Word, U32<'k>);

/// The tiles of a table, and the tile counter.
#[derive(Clone, Copy)]
struct VarlenTiles<'k> {
    table: Table<InKernel<'k>>,
    tile_counter: U64<'k>,
    /// Whether a CTA fetches its first tile, too (see [`TileIndices::in_order`]).
    in_order: bool,
}

/// The work tiles of a producer, before the first one is read.
pub(crate) struct InitialWork<'w, 'k> {
    scheduler: &'w TileScheduler<'k>,
    /// The beginning of a CTA's share of all keys, in a split-KV kernel.
    start: Option<Start<'k>>,
}

impl<'k> TileScheduler<'k> {
    /// Declares work tiles that `consumers` warps walk over beside the producer. `tile_counter` is the address of the
    /// tile counter under [`Scheduler::DynamicPersistent`], unless `lookup` has it. Under a mask of intervals, `of` has
    /// the division into tiles and the tile sizes, and a warp beside the producer's finds blocks
    /// ([`TileScheduler::find`]).
    #[track_caller]
    pub(crate) fn declare(
        b: &'k Builder,
        scheduler: Scheduler,
        lookup: &Lookup<InKernel<'k>>,
        tile_counter: Option<U64<'k>>,
        of: Option<(TilesUnderIntervals<'k>, [u32; 2])>,
        consumers: u32,
    ) -> TileScheduler<'k> {
        let tile_counter = match lookup {
            Lookup::Varlen { tile_counter, .. } => Some(*tile_counter),
            Lookup::Dense(_) => tile_counter,
        };
        match (*lookup, of.zip(tile_counter)) {
            (Lookup::Varlen { table, tile_counter }, None) => {
                let tiles = VarlenTiles { table, tile_counter, in_order: false };
                TileScheduler::sent(b, WorkSource::Varlen(tiles), consumers)
            }
            (Lookup::Dense(geometry), None) => {
                let tiles = TileIndices::declare(b, scheduler, geometry.tiles, tile_counter, consumers);
                TileScheduler::Computed { tiles, geometry }
            }
            (lookup, Some(((of, tile), tile_counter))) => {
                let tiles = IntervalTiles { lookup, tile_counter, tile, of };
                // The producer's warp receives work tiles, too.
                let stages = TileScheduler::stages(b, consumers + 1);
                let source = WorkSource::Intervals(tiles, b.pipeline("requests", 1, 1, []));
                TileScheduler::SchedulerPipeline(SchedulerPipeline { builder: b, source, stages })
            }
        }
    }

    /// Declares the work tiles of a split-KV kernel, where each CTA has an equal share of all keys.
    #[track_caller]
    pub(crate) fn declare_shares(
        b: &'k Builder,
        shares: Shares<InKernel<'k>>,
        consumers: u32,
    ) -> TileScheduler<'k> {
        TileScheduler::sent(b, WorkSource::SplitKv(shares), consumers)
    }

    #[track_caller]
    fn sent(b: &'k Builder, source: WorkSource<'k>, consumers: u32) -> TileScheduler<'k> {
        let stages = TileScheduler::stages(b, consumers);
        TileScheduler::SchedulerPipeline(SchedulerPipeline { builder: b, source, stages })
    }

    /// The stages of the scheduler pipeline. Most messages fill only a part of a stage.
    #[track_caller]
    fn stages(b: &'k Builder, consumers: u32) -> Pipeline<'k, 1> {
        b.pipeline("work tiles", STAGES, consumers, [("work", TileShape::new(Elem::U32, 8, 4))])
    }

    /// Finds work tiles under a mask of intervals, in a warp. When the producer requests the next tile, fetches a tile
    /// index and sends its work tile.
    #[track_caller]
    pub(crate) fn find(&self) {
        let TileScheduler::SchedulerPipeline(SchedulerPipeline { builder: b, source, stages }) = self else {
            return;
        };
        let WorkSource::Intervals(tiles, requests) = source else { return };
        let rounds = Rounds::begin(b);
        let (mut stages, mut requests) = (stages.producer_by(rounds), requests.consumer());
        let count = tiles.count(b);
        let tile = b.var("tile", b.cta_x());
        let fetched = b.var("fetched", 0);
        let mut send = |words: Vec<Words<'k>>| {
            stages.fill_by_warp(|stage| {
                let [at] = stage.tiles().map(|tile| tile.element(0, 0));
                for (number, words) in words.into_iter().enumerate() {
                    b.store_vector(at.at(VECTOR * number as i32), words);
                }
                stage.commit();
            });
        };
        b.repeat(|| {
            let number = tile.get();
            b.break_if(number.ge(count));
            send(tiles.words(b, number));
            rounds.next();
            requests.wait().release();
            let mut next = CounterValue::new(tiles.tile_counter, count - 1);
            b.if_lanes(b.lane_id().eq(0), || fetched.set(next.fetch(b)));
            tile.set(next_dynamic(fetched.get().shfl_idx(0), b.grid_x()));
        });
        send(IntervalTiles::end_words(b));
    }

    /// Makes tiles begin in the order of their indices (see [`TileIndices::in_order`]).
    pub(crate) fn in_order(mut self) -> TileScheduler<'k> {
        match &mut self {
            TileScheduler::Computed { tiles, .. } => tiles.in_order(),
            TileScheduler::SchedulerPipeline(SchedulerPipeline {
                source: WorkSource::Varlen(tiles), ..
            }) => {
                tiles.in_order = true;
            }
            TileScheduler::SchedulerPipeline(_) => {}
        }
        self
    }

    /// Finds where the CTA's work tiles begin. In a split-KV kernel, all lanes of the producer's warp must call this.
    #[track_caller]
    pub(crate) fn begin(&self) -> InitialWork<'_, 'k> {
        let start = match self {
            TileScheduler::SchedulerPipeline(SchedulerPipeline {
                builder,
                source: WorkSource::SplitKv(shares),
                ..
            }) => Some(shares.start(builder)),
            TileScheduler::SchedulerPipeline(_) | TileScheduler::Computed { .. } => None,
        };
        InitialWork { scheduler: self, start }
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
            TileScheduler::SchedulerPipeline(sent) => sent.receive(|work, read, stage| {
                body(work, read);
                stage.release_unfenced();
            }),
        }
    }

    /// Like `consume`, for roles that keep the whole work tile in registers, so its stage is released at once.
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
    /// warp finds work tiles (see [`TileIndices::produce`]). The second argument of `body` reads the work tile again,
    /// so that a loop need not keep it in registers. The third argument fetches the next tile.
    #[track_caller]
    pub(crate) fn produce(
        &self,
        body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, &mut dyn FnMut()),
    ) {
        let sent = match self.scheduler {
            TileScheduler::Computed { tiles, geometry } => {
                return tiles.produce(|tile, fetch_next| {
                    let work = geometry.work(tile);
                    body(work, &|| work, fetch_next);
                });
            }
            TileScheduler::SchedulerPipeline(sent) => sent,
        };
        match &sent.source {
            WorkSource::Varlen(tiles) => sent.fetch(tiles, body),
            WorkSource::SplitKv(shares) => {
                if let Some(start) = self.start {
                    sent.share(shares, start, body);
                }
            }
            WorkSource::Intervals(_, requests) => {
                let mut requests = requests.producer();
                sent.receive(|work, read, stage| {
                    body(work, read, &mut || requests.fill_by_warp(EmptyStage::commit));
                    stage.release_unfenced();
                });
            }
        }
    }
}

impl<'k> InitialWork<'_, 'k> {
    /// Runs `body` with every work tile in all warps of the producer, which count as consumers of the scheduler
    /// pipeline: one thread sends each work tile, and all warps receive it. Work tiles come from shares or a table.
    #[track_caller]
    pub(crate) fn produce_in_role(&self, body: impl FnOnce(WorkTile<'k>)) {
        let TileScheduler::SchedulerPipeline(sent) = self.scheduler else {
            unreachable!("plans of kernels that convert rows have a table")
        };
        match (&sent.source, self.start) {
            (WorkSource::SplitKv(shares), Some(start)) => sent.share_in_role(shares, start, body),
            (WorkSource::Varlen(tiles), _) => sent.fetch_in_role(tiles, body),
            (WorkSource::SplitKv(_) | WorkSource::Intervals(..), _) => {}
        }
    }
}

impl<'k> SchedulerPipeline<'k> {
    /// Fetches tiles, and runs `body` with each. A CTA's first tile has the CTA's index; a CTA that has one fetches all
    /// others from the counter, and one index beyond the last tile. So all CTAs together fetch as many indices as there
    /// are tiles. If tiles begin in order, every CTA fetches its first tile, too, which is one more index for each CTA.
    ///
    /// A producer has few registers, so words go to the stage as soon as they are known, and are read back from it.
    #[track_caller]
    fn fetch(
        &self,
        &VarlenTiles { table, tile_counter, in_order }: &VarlenTiles<'k>,
        body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, &mut dyn FnMut()),
    ) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut stages = self.stages.producer_by(rounds);
        let count = table.tiles(b);
        let value =
            || CounterValue::new(tile_counter, if in_order { count + b.grid_x() - 1 } else { count - 1 });
        let first = if in_order { value().fetch(b) } else { b.cta_x() };
        let next = b.var("tile", first);
        b.repeat(|| {
            let stage = stages.acquire();
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
            let mut fetched = value();
            body(read(), &read, &mut || _ = fetched.fetch(b));
            let before = if in_order { b.copy(0) } else { b.grid_x() };
            next.set(next_dynamic(fetched.fetch(b), before));
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
        let mut stages = self.stages.producer_by(rounds);
        shares.walk(b, start, false, |write, is_there| {
            let stage = stages.acquire();
            let [at] = stage.tiles().map(|tile| tile.element(0, 0));
            write(&|word, value| b.store(at.at(word.offset()), value));
            stage.commit();
            rounds.next();
            b.break_if(!is_there);
            let read = || shares.work(|word| b.load(at.at(word.offset())));
            body(read(), &read, &mut || ());
        });
    }

    /// Runs `body` with every work tile of the CTA's share in all warps of the producer: see
    /// [`InitialWork::produce_in_role`].
    #[track_caller]
    fn share_in_role(
        &self,
        shares: &Shares<InKernel<'k>>,
        start: Start<'k>,
        body: impl FnOnce(WorkTile<'k>),
    ) {
        let mut role = self.role();
        shares.walk(self.builder, start, true, |write, _| self.send_and_receive(&mut role, write, body));
    }

    /// Like `fetch`, in all warps of the producer: see [`InitialWork::produce_in_role`]. The next index is fetched when
    /// a work tile has been sent.
    #[track_caller]
    fn fetch_in_role(
        &self,
        &VarlenTiles { table, tile_counter, .. }: &VarlenTiles<'k>,
        body: impl FnOnce(WorkTile<'k>),
    ) {
        let b = self.builder;
        let mut role = self.role();
        let count = table.tiles(b);
        let next = b.var("tile", b.cta_x());
        b.repeat(|| {
            let write = |store: &dyn Fn(Word, U32<'k>)| {
                let tile = next.get();
                let is_tile = tile.lt(count);
                b.if_else_uniform(
                    is_tile,
                    || {
                        table.look_up(b, tile, store);
                        let fetched = CounterValue::new(tile_counter, count - 1).fetch(b);
                        next.set(next_dynamic(fetched, b.grid_x()));
                    },
                    || WorkTileInfo::store_end(|| b.value(0), table.padded.is_some(), store),
                );
            };
            self.send_and_receive(&mut role, &write, body);
        });
    }

    /// Both ends of the scheduler pipeline.
    #[track_caller]
    fn role(&self) -> (Rounds<'k>, Producer<'k, 1>, Consumer<'k, 1>) {
        let rounds = Rounds::begin(self.builder);
        (rounds, self.stages.producer_by(rounds), self.stages.consumer_by(rounds))
    }

    /// Sends a work tile, whose words `write` stores in one thread, and runs `body` with it in all warps of the
    /// producer. Leaves the loop round it behind the last work tile.
    #[track_caller]
    fn send_and_receive(
        &self,
        (rounds, sent, received): &mut (Rounds<'k>, Producer<'k, 1>, Consumer<'k, 1>),
        write: &dyn Fn(Store<'_, 'k>),
        body: impl FnOnce(WorkTile<'k>),
    ) {
        let b = self.builder;
        b.once_per_role(|| {
            let stage = sent.acquire();
            let [at] = stage.tiles().map(|tile| tile.element(0, 0));
            write(&|word, value| b.store(at.at(word.offset()), value));
            stage.commit();
        });
        let stage = received.wait();
        let work = self.read(stage.tile().element(0, 0));
        b.break_if(work.rows_of_o().eq(0));
        stage.release_unfenced();
        body(work);
        rounds.next();
    }

    /// The work tile whose words are at this address. A whole warp reads it.
    #[track_caller]
    fn read(&self, at: U32<'k>) -> WorkTile<'k> {
        let b = self.builder;
        let vectors = [0, 1, 2].map(|vector| load_words(b, at.at(VECTOR * vector)));
        let word = |word: Word| match vectors.as_flattened().get(word as usize) {
            Some(value) => *value,
            None => b.load::<B32>(at.at(word.offset())).shfl_idx(0),
        };
        match &self.source {
            WorkSource::Varlen(tiles) => tiles.table.work(word),
            WorkSource::SplitKv(shares) => shares.work(word),
            WorkSource::Intervals(tiles, _) => tiles.work(b, at).0,
        }
    }

    /// Runs `body` with every work tile, a function that reads it again, and the tile's stage, which `body` must
    /// release.
    #[track_caller]
    fn receive(&self, body: impl FnOnce(WorkTile<'k>, &dyn Fn() -> WorkTile<'k>, FullStage<'k, 1>)) {
        let b = self.builder;
        let rounds = Rounds::begin(b);
        let mut stages = self.stages.consumer_by(rounds);
        b.repeat(|| {
            let stage = stages.wait();
            let at = stage.tile().element(0, 0);
            if let WorkSource::Intervals(tiles, _) = &self.source {
                let (work, is_tile) = tiles.work(b, at);
                b.break_if(!is_tile);
                body(work, &|| tiles.work(b, at).0, stage);
                rounds.next();
                return;
            }
            let read = || self.read(at);
            let work = read();
            b.break_if(work.rows_of_o().eq(0));
            body(work, &read, stage);
            rounds.next();
        });
    }
}
