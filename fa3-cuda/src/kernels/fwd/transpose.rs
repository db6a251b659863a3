//! Transposes e4m3 V: 8-bit wgmma reads its right operand along the keys (§3.3 "layout transformations").
//!
//! A warp takes 32 keys of 16 columns at a time. `ldmatrix.trans` moves pairs of bytes, which are neighbours along the
//! columns. Byte permutations separate even columns from odd ones, and join the bytes of four keys. `stmatrix` writes
//! 16 rows of 32 keys. So in each group of 16 columns the even ones come first, which is also the order of O's columns.
//! In each group of 16 keys, keys 0 1 8 9 come first, which is the order of P in registers ([`Frag::to_a`]).
//!
//! A column of ones behind V's columns gives the row sums of P. It stays in a stage whatever block of V the stage
//! holds.

use fa3_ir::lang::*;
use fa3_sched::forward::{CtaTile, ROW_SUM_COLS};

use super::constants;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::TmaPipeline;
use crate::kernels::parts::unpack::EVEN_ODD;

/// Numbers of keys and columns that a warp transposes at a time.
const KEYS: u32 = 32;
const COLS: u32 = 16;

/// The pipeline of transposed blocks of V.
pub(super) struct Transposed<'k> {
    pipeline: Pipeline<'k, 1>,
    /// Number of warps that transpose. They are the last warps of the producer.
    warps: u32,
}

impl<'k> Transposed<'k> {
    /// Declares a pipeline with as many stages as V has.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, tile: &CtaTile, warps: u32) -> Transposed<'k> {
        let shape = TileShape::new(Elem::E4m3, tile.head_dim_v + ROW_SUM_COLS, tile.tile_n);
        let pipeline = b.stored_pipeline(
            "v transposed",
            tile.stages,
            [warps, 4 * tile.consumers],
            [("v transposed", shape)],
        );
        Transposed { pipeline, warps }
    }

    /// The pipeline of transposed V, which products read.
    pub(super) fn stages(&self) -> &Pipeline<'k, 1> {
        &self.pipeline
    }

    /// Runs the warps that transpose.
    #[track_caller]
    pub(super) fn run(
        &self,
        b: &'k Builder,
        scheduler: &TileScheduler<'k>,
        v: &TmaPipeline<'k>,
        tile: &CtaTile,
    ) {
        for stage in 0..tile.stages {
            let [to] = self.pipeline.tiles_of(stage);
            constants::store_ones(b, to, b.tid() - 32 * (4 - self.warps), self.warps * 32);
        }
        let warp = (b.tid() >> 5).shfl_idx(0) - (4 - self.warps);
        // With three consumers, a thread has too few registers for two pieces at a time.
        let at_a_time = if tile.consumers < 3 { 2 } else { 1 };
        let (mut from, mut to) = (v.consumer(), self.pipeline.producer());
        scheduler.consume(|WorkTile { kv, .. }, _| {
            b.for_each((0, kv.end - kv.first), 1, |_| {
                let loaded = from.wait();
                let free = to.acquire();
                let [into] = free.tiles();
                transpose(b, (warp, self.warps), at_a_time, loaded.tile(), into);
                free.commit_stored();
                // The commit has a fence, which follows this warp's reads of the stage, too.
                loaded.release();
            });
        });
    }
}

/// Transposes this warp's part of a block of keys, `at_a_time` pieces at once to overlap their latencies. Each warp has
/// its own code, in which offsets are constants.
#[track_caller]
fn transpose<'k>(
    b: &'k Builder,
    (warp, warps): (U32<'k>, u32),
    at_a_time: usize,
    from: Tile<'_, 'k>,
    to: Tile<'_, 'k>,
) {
    let TileShape { rows: keys, cols, .. } = from.shape();
    let lane = b.lane_id();
    let (matrix, within) = (lane >> 3, lane & 7);
    let (from, to) = (from.elements(lane, 0), to.elements((matrix & 1) * 8 + within, (matrix >> 1) * 16));
    let parts = (0..keys)
        .step_by(KEYS as usize)
        .flat_map(|key| (0..cols).step_by(COLS as usize).map(move |col| (key, col)));
    let mut parts: Vec<(u32, u32)> = parts.collect();
    if cols / COLS > keys / KEYS {
        // Each offset along the inner direction takes an address register, so the shorter direction is the inner one.
        parts.sort_by_key(|&(_, col)| col);
    }
    let of_warp = |warp: u32| (parts.len() as u32 * warp / warps) as usize;
    for number in 0..warps {
        b.if_uniform(warp.eq(number), || {
            for some in parts[of_warp(number)..of_warp(number + 1)].chunks(at_a_time) {
                let load = |&(key, col): &(u32, u32)| b.ldmatrix(from.at(key, col), true);
                let loaded: Vec<[U32<'k>; 4]> = some.iter().map(load).collect();
                for ([first, second, third, fourth], &(key, col)) in loaded.into_iter().zip(some) {
                    let words = [(first, second), (third, fourth)]
                        .map(|(upper, lower)| EVEN_ODD.map(|bytes| upper.prmt(lower, bytes)));
                    let [[even, odd], [even_below, odd_below]] = words;
                    b.stmatrix(to.at(col, key), [even, odd, even_below, odd_below], false);
                }
            }
        });
    }
}
