//! Lists the split tiles of keys and their parts, under a mask of intervals. One CTA writes the list, given the blocks
//! that see each tile. The order of the list changes no result.

use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::backward::TileSplit;

use crate::kernels::params::{Declare, Form, InKernel, Pass, Side, param, params};
use crate::kernels::parts::key_tiles::{Header, KeyTiles, SplitTile};
use crate::kernels::parts::over_warp::over_warp;

params! {
    struct SplitTilesParams {
        /// Number of tiles of keys.
        tiles: u32,
        splits: numbers TileSplit,
        to: all KeyTiles,
    }
}

impl SplitTilesParams<Form> {
    fn form() -> SplitTilesParams<Form> {
        SplitTilesParams { tiles: (), splits: Form::splits(), to: KeyTiles::form() }
    }
}

const WARPS: u32 = 32;
const THREADS: u32 = 32 * WARPS;

pub(super) fn kernel() -> Kernel {
    Kernel::build("bwd_splits", Launch::threads(THREADS), |b| {
        let params = SplitTilesParams::<Form>::form().pass(&mut Declare(b));
        // The sum of the units of work of all tiles, and the numbers of parts and of split tiles listed so far.
        let [units, parts, tiles] = ["units", "parts", "tiles"].map(|name| b.region(name, 4, 4));
        b.launch_dependents();
        b.grid_dependency_wait();

        let [units, parts, tiles] = [units, parts, tiles].map(|region| b.address(region));
        b.if_lanes(b.tid().eq(0), || [units, parts, tiles].into_iter().for_each(|at| b.store(at, 0)));
        b.sync_cta();
        let sum = b.var("units", 0);
        params.for_each_tile(b, |_, of_tile| sum.update(|sum| sum + of_tile));
        let of_warp = over_warp(sum.get(), |x, y| x + y);
        b.once_per_warp(|| b.reduce_add_u32(units, of_warp));
        b.sync_cta();

        let size = params.splits.size(b.load::<B32>(units));
        params.for_each_tile(b, |tile, of_tile| {
            let count = params.splits.parts(of_tile, size);
            b.if_lanes(count.gt(1), || {
                let first = b.atomic_add_u32(parts, count);
                let number = b.atomic_add_u32(tiles, 1);
                params.to.store_split_tile(b, number, SplitTile { tile, first, parts: count });
            });
        });
        b.sync_cta();

        let [parts, tiles] = [parts, tiles].map(|at| b.load::<B32>(at));
        let header = Header { parts, tiles, size: params.splits.blocks(size) };
        b.if_lanes(b.tid().eq(0), || params.to.store_header(b, header));
        b.for_each(((b.tid() >> 5).shfl_idx(0), tiles), WARPS, |number| {
            let SplitTile { tile, first, parts } = params.to.split_tile(b, number);
            let parts = parts.shfl_idx(0);
            b.for_each((0, parts), 32, |turn| {
                let part = turn + b.lane_id();
                b.if_lanes(part.lt(parts), || params.to.store_part(b, first + part, [tile, part]));
            });
        });
    })
}

impl<'k> SplitTilesParams<InKernel<'k>> {
    /// Runs `body` with every tile of this thread and the tile's units of work, which are 0 behind the last tile.
    #[track_caller]
    fn for_each_tile(&self, b: &'k Builder, body: impl FnOnce(U32<'k>, U32<'k>)) {
        b.for_each((0, self.tiles), THREADS, |first| {
            let tile = first + b.tid();
            let blocks: KvRange<_> = self.to.load_blocks(b, tile.min(self.tiles - 1));
            let units = tile.lt(self.tiles).select::<B32>(self.splits.units(blocks), 0);
            body(tile, units);
        });
    }
}
