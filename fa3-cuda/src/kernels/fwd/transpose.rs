//! V of e4m3, transposed: products of 8-bit elements read their right operand along the keys (§3.3 "layout
//! transformations").
//!
//! A warp takes 32 keys of 16 columns at a time. `ldmatrix.trans` moves pairs of bytes, neighbours along the columns.
//! Byte permutations part them into even and odd columns, and join those of four keys. `stmatrix` writes 16 rows of 32
//! keys. So of each 16 columns the even ones come first, which is the order of O's columns, too. Of each 16 keys 0 1 8
//! 9 come first, which is the order that P has in registers ([`Frag::to_a`]).

use std::ops::Range;

use fa3_ir::lang::*;
use fa3_sched::forward::CtaTile;

use super::Fwd;

/// Warps that transpose, those of the producer but the first.
pub(super) const WARPS: u32 = 3;

/// Keys and columns that a warp transposes at a time.
const KEYS: u32 = 32;
const COLS: u32 = 16;

/// Bytes 0 and 2 of two words, and bytes 1 and 3.
const EVEN: u32 = 0x6420;
const ODD: u32 = 0x7531;

/// Slots of transposed blocks of V.
pub(super) struct Transposed<'k> {
    ring: Ring<'k, 1>,
}

impl<'k> Transposed<'k> {
    /// As many slots as V has.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, tile: &CtaTile) -> Transposed<'k> {
        let shape = TileShape::new(Elem::E4m3, tile.head_dim_v, tile.tile_n);
        let ring = b.stored_ring(
            "v transposed",
            tile.stages,
            [WARPS, 4 * tile.consumers],
            [("v transposed", shape)],
        );
        Transposed { ring }
    }

    /// The end that products read.
    #[track_caller]
    pub(super) fn consumer(&self) -> Consumer<'k, 1> {
        self.ring.consumer()
    }

    /// What the warps that transpose run.
    #[track_caller]
    pub(super) fn run(&self, fwd: &Fwd<'k>) {
        let b = fwd.builder;
        let (mut from, mut to) = (fwd.v.consumer(), self.ring.producer());
        fwd.tiles.consume(|tile| {
            let kv = fwd.params.geometry.work(tile).kv;
            let left = b.var("left", kv.end - kv.first);
            b.repeat(|| {
                b.break_if(left.now().eq(0));
                left.update(|left| left - 1);
                let loaded = from.wait();
                let free = to.acquire();
                let [into] = free.tiles();
                transpose(b, loaded.tile(), into);
                free.commit_stored();
                // Its fence is behind the loads, too.
                loaded.release();
            });
        });
    }
}

/// A block of keys: this warp's parts of it, two at a time, since one waits for its loads and stores.
#[track_caller]
fn transpose<'k>(b: &'k Builder, from: Tile<'_, 'k>, to: Tile<'_, 'k>) {
    let TileShape { rows: keys, cols, .. } = from.shape();
    let (lane, warp) = (b.lane_id(), (b.tid() >> 5).shfl_idx(0) - 1);
    let (matrix, within) = (lane >> 3, lane & 7);
    let (of_keys, of_cols) = (keys / KEYS, cols / COLS);
    let some = |indices: Range<u32>| {
        let parts: Vec<V<'k, B32>> = indices.map(|index| warp + index * WARPS).collect();
        let places =
            parts.iter().map(|part| ((*part >> of_cols.ilog2()) * KEYS, (*part & (of_cols - 1)) * COLS));
        let places: Vec<_> = places.collect();
        let pairs = places.iter().map(|&(key, col)| b.ldmatrix(from.element(key + lane, col), true));
        let pairs: Vec<[V<'k, B32>; 4]> = pairs.collect();
        for ([first, second, third, fourth], (key, col)) in pairs.into_iter().zip(places) {
            let words = [(first, second), (third, fourth)]
                .map(|(upper, lower)| [EVEN, ODD].map(|bytes| upper.prmt(lower, bytes)));
            let [[even, odd], [even_below, odd_below]] = words;
            let row = col + (matrix & 1) * 8 + within;
            let at = to.element(row, key + (matrix >> 1) * 16);
            b.stmatrix(at, [even, odd, even_below, odd_below], false);
        }
    };
    let parts = of_keys * of_cols;
    let of_each = parts / WARPS;
    (0..of_each).step_by(2).for_each(|first| some(first..of_each.min(first + 2)));
    if of_each * WARPS < parts {
        b.if_uniform(warp.lt(parts - of_each * WARPS), || some(of_each..of_each + 1));
    }
}
