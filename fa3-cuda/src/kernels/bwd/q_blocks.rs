//! Finds the blocks of rows that see each tile of keys, under a mask of intervals: the range from the first to the last
//! block that sees some key of the tile, and in this range the blocks that see all keys. Each warp has a tile, and
//! reads the summaries of all blocks.

use fa3_ir::lang::*;

use super::spec::QBlocksSpec;
use crate::kernels::params::{Declare, Form, Pass, Side, param, params};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::parts::summaries::Summaries;

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
    fn form(spec: &QBlocksSpec) -> QBlocksParams<Form> {
        QBlocksParams {
            geometry: Geometry::form(spec.order, spec.mask),
            summaries: Summaries::form(spec.of_row),
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
        let params = QBlocksParams::<Form>::form(spec).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();
        let tile = b.cta_x().mad(TILES, (b.tid() >> 5).shfl_idx(0));
        b.if_uniform(tile.lt(params.geometry.tiles), || {
            let work = params.geometry.work(tile);
            let tiling = &params.geometry.tiling;
            let blocks = params.summaries.q_blocks(b, params.group, &work, tiling, spec.tile, AT_ONCE);
            b.guarded(b.elect(), || params.to.store_blocks(b, tile, blocks));
        });
    })
}
