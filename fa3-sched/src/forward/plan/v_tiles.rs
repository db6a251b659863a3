//! e4m3 V that a kernel transposes beforehand.

use fa3_types::{Problem, Shape, ValueLayout};

use crate::forward::{CtaTile, Fp8Inputs, Precision};
use crate::{SeqLens, TileCounts, Tiling};

/// Keys per tile of V that is transposed beforehand. The number of keys in a row of transposed V is a multiple of this.
pub const V_TILE_KEYS: u32 = ValueLayout::ROW_KEYS as u32;

/// Smallest number of visits of a block of V for which transposing it beforehand pays (docs/performance.md).
const MIN_VISITS: u64 = 32;

/// Returns the tile for V transposed beforehand if that is faster and takes no more memory than O; otherwise `tile`.
/// Transposing beforehand is not faster up to head_dim 64, or up to 128 with scales of channels.
pub(super) fn fastest(problem: &Problem, tile: CtaTile, tiling: Tiling<u32>, lens: SeqLens<u32>) -> CtaTile {
    let Precision::Fp8(inputs @ Fp8Inputs { v_layout: ValueLayout::Rows, v_channels, .. }) = tile.precision
    else {
        return tile;
    };
    let of_o: u64 = problem.o().shape.dims().map(|extent| extent as u64).iter().product();
    let is_small =
        ValueLayout::transposed_bytes(problem.v().shape).0 <= of_o * problem.o().dtype.bytes() as u64;
    let is_wide = tile.head_dim_v > if v_channels { 128 } else { 64 };
    let is_faster = || {
        let blocks = u64::from(lens.k.div_ceil(tile.tile_n));
        let of_head = (MIN_VISITS * blocks).div_ceil(problem.heads().group_size() as u64);
        has_visits(of_head, &tile, tiling, lens)
    };
    if is_small && is_wide && is_faster() { tile.of_inputs(inputs.transposed()) } else { tile }
}

/// Whether the tiles of a head visit at least `needed` blocks together. In long sequences the first few tiles decide
/// this.
fn has_visits(needed: u64, tile: &CtaTile, tiling: Tiling<u32>, lens: SeqLens<u32>) -> bool {
    let mut visits = 0;
    let mut m_blocks = 0..lens.q.div_ceil(tile.tile_m);
    needed == 0
        || m_blocks.any(|m_block| {
            visits += u64::from(tiling.kv_range(m_block, lens).blocks());
            visits >= needed
        })
}

/// The tiles of V, if V lies in rows and the kernel takes it transposed.
pub(super) fn of(problem: &Problem, tile: &CtaTile) -> Option<TileCounts> {
    let Shape { batch, seqlen, heads, .. } = problem.v().shape;
    let takes_it_transposed = tile.precision.is_fp8() && !tile.precision.transposes_v();
    let is_asked = problem.v_layout() == ValueLayout::Rows && takes_it_transposed && problem.v_bytes().0 > 0;
    is_asked.then(|| TileCounts {
        m_blocks: (seqlen as u32).div_ceil(V_TILE_KEYS),
        heads: heads as u32,
        batch: batch as u32,
    })
}
