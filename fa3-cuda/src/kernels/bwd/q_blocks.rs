//! Finds the blocks of rows that see each tile of keys, under a mask of intervals: the range from the first to the last
//! block that sees some key of the tile, and in this range the blocks that see all keys. Each warp has a tile, and
//! reads the summaries of all blocks.

use fa3_ir::lang::*;
use fa3_sched::backward::STATS_ROWS;
use fa3_sched::backward::VisibleQBlocks;
use fa3_sched::{FastDiv, KvRange, Order};
use fa3_types::{IntervalsOfRow, Mask};

use super::spec::QBlocksSpec;
use super::summaries::Summaries;
use crate::kernels::params::{Declare, Form, InKernel, Pass, Side, param, params};
use crate::kernels::parts::geometry::{Geometry, WorkTile};
use crate::kernels::parts::key_tiles::KeyTiles;

params! {
    struct QBlocksParams {
        geometry: numbers Geometry,
        summaries: all Summaries,
        /// Number of query heads that share a head of K and V.
        group: u32,
        to: all KeyTiles,
    }
}

impl QBlocksParams<Form> {
    fn form(of_row: IntervalsOfRow, order: Order) -> QBlocksParams<Form> {
        QBlocksParams {
            geometry: Geometry::form(order, Mask::None),
            summaries: Summaries::form(of_row),
            group: (),
            to: KeyTiles::form(),
        }
    }
}

/// Tiles per CTA. Each warp has a tile.
pub(super) const TILES: u32 = 4;
/// Summaries that a lane loads before it uses the first.
const AT_ONCE: u32 = 4;

pub(super) fn kernel(spec: &QBlocksSpec) -> Kernel {
    Kernel::build("bwd_seeing", Launch::threads(32 * TILES), |b| {
        let params = QBlocksParams::<Form>::form(spec.of_row, spec.order).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();
        let tile = b.cta_x().mad(TILES, (b.tid() >> 5).shfl_idx(0));
        b.if_uniform(tile.lt(params.geometry.tiles), || {
            let work = params.geometry.work(tile);
            let blocks = params.blocks(b, &work, spec.tile);
            b.guarded(b.elect(), || params.to.store_blocks(b, tile, blocks));
        });
    })
}

impl<'k> QBlocksParams<InKernel<'k>> {
    /// The blocks of `tile_m` rows that see keys of a work tile of `tile_n` keys, over all query heads that share the
    /// tile's head of K and V.
    #[track_caller]
    fn blocks(&self, b: &'k Builder, work: &WorkTile<'k>, [tile_n, tile_m]: [u32; 2]) -> KvRange<U32<'k>> {
        let none = VisibleQBlocks::none(work.lens.q);
        let all = QBlocksVars::new(b, none);
        let first = work.head * self.group;
        // If heads share their intervals, the first head stands for all.
        let heads = self.summaries.has_own_heads().select::<B32>(self.group, 1);
        b.for_each((0, heads), 1, |number| {
            let of_head = self.of_head(b, [work.batch, first + number], work, tile_n);
            let is_first = number.eq(0);
            all.set(select(is_first, of_head, all.get().beside(of_head)));
        });
        let tile_m = FastDiv::new(tile_m).map(|number| b.value(number));
        all.get().range(STATS_ROWS, work.lens.k, tile_m)
    }

    /// The blocks of one query head that see keys of the tile.
    #[track_caller]
    fn of_head(
        &self,
        b: &'k Builder,
        [batch, head]: [U32<'k>; 2],
        work: &WorkTile<'k>,
        tile_n: u32,
    ) -> VisibleQBlocks<U32<'k>> {
        let (summaries, keys) = (&self.summaries, work.lens.q);
        let (none, of_head) = (VisibleQBlocks::none(keys), summaries.of_head(batch, head));
        let mine = QBlocksVars::new(b, none);
        b.for_each((0, summaries.blocks), 32 * AT_ONCE, |first| {
            let blocks = (0..AT_ONCE).map(|turn| first + b.lane_id() + 32 * turn);
            let loaded: Vec<_> = blocks
                .map(|block| (block, summaries.load(b, of_head, block.min(summaries.blocks - 1))))
                .collect();
            for (block, bounds) in loaded {
                let seeing = VisibleQBlocks::of(block, &bounds, [work.row, work.row + tile_n], keys);
                let there = block.lt(summaries.blocks);
                mine.set(mine.get().and(select(there, seeing, none)));
            }
        });
        [16, 8, 4, 2, 1]
            .into_iter()
            .fold(mine.get(), |seeing, distance| seeing.and(map(seeing, |number| number.shfl_bfly(distance))))
    }
}

/// [`VisibleQBlocks`], the ranges of blocks of rows that see a tile, in variables.
struct QBlocksVars<'k>(VisibleQBlocks<Var<'k, B32>>);

impl<'k> QBlocksVars<'k> {
    #[track_caller]
    fn new(b: &'k Builder, seeing: VisibleQBlocks<U32<'k>>) -> QBlocksVars<'k> {
        QBlocksVars(map(seeing, |number| b.var("seeing", number)))
    }

    fn get(&self) -> VisibleQBlocks<U32<'k>> {
        map(self.0, |var| var.get())
    }

    #[track_caller]
    fn set(&self, seeing: VisibleQBlocks<U32<'k>>) {
        let (vars, numbers) = (self.0, seeing);
        for (var, number) in [
            (vars.some[0], numbers.some[0]),
            (vars.some[1], numbers.some[1]),
            (vars.every[0], numbers.every[0]),
            (vars.every[1], numbers.every[1]),
            (vars.count, numbers.count),
        ] {
            var.set(number);
        }
    }
}

/// Applies `f` to each number of `seeing`.
fn map<T: Copy, U>(seeing: VisibleQBlocks<T>, mut f: impl FnMut(T) -> U) -> VisibleQBlocks<U> {
    VisibleQBlocks { some: seeing.some.map(&mut f), every: seeing.every.map(&mut f), count: f(seeing.count) }
}

#[track_caller]
fn select<'k>(
    condition: V<'k, Pred>,
    yes: VisibleQBlocks<U32<'k>>,
    no: VisibleQBlocks<U32<'k>>,
) -> VisibleQBlocks<U32<'k>> {
    let pick = |yes: U32<'k>, no: U32<'k>| condition.select::<B32>(yes, no);
    let both = |yes: [U32<'k>; 2], no: [U32<'k>; 2]| [pick(yes[0], no[0]), pick(yes[1], no[1])];
    VisibleQBlocks {
        some: both(yes.some, no.some),
        every: both(yes.every, no.every),
        count: pick(yes.count, no.count),
    }
}
