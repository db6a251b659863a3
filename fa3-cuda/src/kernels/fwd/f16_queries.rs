//! Q and `qv` of bf16, rewritten to f16 in shared memory, where rows of e4m3 K and V are converted to f16: that takes a
//! fourth of the instructions that bf16 takes.
//!
//! bf16 has the range of binary32, f16 has 5 bits of exponent. So each row is multiplied by a power of 2 that brings
//! its largest element to 2¹⁵ or above, and the row's scores are multiplied by the inverse. Elements above 2⁻²⁹ of the
//! largest one are exact. Smaller ones lose at most 2⁻⁴⁰ of the largest one.

use fa3_ir::lang::*;

use super::spec::FwdSpec;
use crate::kernels::parts::over_warp::over_warp;

/// Columns that a thread rewrites at once.
const CHUNK: u32 = 8;

/// Biased exponent of the largest element of a row after the multiplication, as a binary32.
const LARGEST: u32 = 127 + 15;

/// The smallest biased exponent of a row's largest element for which both factors are normal numbers.
const LEAST: u32 = LARGEST - 126;

/// The factors of the rows of a tile, and the barrier behind which the rows have been rewritten.
pub(super) struct F16Queries<'k> {
    factors: Region,
    rewritten: WarpgroupBarriers<'k>,
}

impl<'k> F16Queries<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, spec: &FwdSpec) -> F16Queries<'k> {
        F16Queries {
            factors: b.region("factors of q", 4 * spec.tile.tile_m, 16),
            rewritten: b.warpgroup_barriers("q rewritten", 1, 1),
        }
    }

    /// Rewrites the first `rows` rows of `tiles`, which are columns of the same rows, in all warps of a warpgroup.
    /// Gives the factors of products of this thread's rows.
    #[track_caller]
    pub(super) fn rewrite(&self, b: &'k Builder, tiles: &[Tile<'_, 'k>], rows: U32<'k>) -> Rows<'k> {
        let (lane, warp) = (b.lane_id(), (b.tid() >> 5) & 3);
        let factors = b.address(self.factors);
        b.for_each((warp, rows), 4, |row| {
            let chunks = tiles.iter().flat_map(|tile| {
                let (cols, chunks) = (tile.shape().cols, tile.elements(row, lane * CHUNK));
                (0..cols).step_by(32 * CHUNK as usize).map(move |first| {
                    let has_chunk = lane.lt((cols - first) / CHUNK);
                    (chunks.at(0, first), has_chunk, [(); 4].map(|()| b.var("q", 0)))
                })
            });
            let chunks: Vec<_> = chunks.collect();
            for &(at, has_chunk, words) in &chunks {
                b.guarded(has_chunk, || b.load_vector_to(words, at));
            }
            let words = || chunks.iter().flat_map(|(_, _, words)| words.map(Var::now));
            let largest = words().map(V::abs_bf16x2).reduce(V::max_bf16x2);
            let [low, high] = largest.unwrap_or(b.value(0)).unpack_bf16x2();
            let largest = over_warp(low.max(high), |x, y| x.max(y));
            let exponent = (largest.as_bits() >> 23).max(LEAST);
            let [factor, inverse] =
                [-exponent + (LARGEST + 127), exponent - (LARGEST - 127)].map(|bits| (bits << 23).as_f32());
            for &(at, has_chunk, words) in &chunks {
                let words = words.map(|pair| V::pack_f16x2(pair.now().unpack_bf16x2().map(|x| x * factor)));
                b.guarded(has_chunk, || b.store_vector(at, words));
            }
            b.guarded(lane.eq(0), || b.store(row.mad(4, factors).at(0), inverse));
        });
        b.fence(FenceInst::ProxyAsyncShared);
        self.rewritten.of(0).sync();
        let factors = Rows(Half::BOTH.map(|half| {
            let (row, factor) = (b.frag_row() + half.rows(), b.var("factor of q", 1.0));
            b.guarded(row.lt(rows), || factor.set(b.load::<F32>(row.mad(4, factors).at(0))));
            factor.get()
        }));
        // One lane releases Q, behind which the factors are stored again.
        b.warp_sync();
        factors
    }
}
