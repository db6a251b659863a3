//! Transposes e4m3 codes. In shared memory a row has the columns of a key; in global memory a row has the keys of a
//! column. 8-bit products read V in this layout ([`ValueLayout::Transposed`](fa3_types::ValueLayout)).
//!
//! A warp takes 64 keys of 16 columns at a time. `ldmatrix.trans` moves pairs of bytes, which are neighbours along the
//! columns. Byte permutations separate even columns from odd ones, and join the bytes of four keys. The keys that are
//! rows of a matrix are chosen so that a thread gets, for each of its two columns, 16 codes that are neighbours in
//! memory. So a warp writes 64 bytes to each of 16 rows.

use std::array::from_fn;

use fa3_ir::lang::*;

use crate::kernels::parts::store_rows::Global;
use crate::kernels::parts::unpack::EVEN_ODD;

/// Numbers of keys and columns that a warp transposes at a time.
const KEYS: u32 = 64;
const COLS: u32 = 16;

/// A tile of e4m3 in shared memory, with a row for each key.
pub(super) struct KeyRows<'k> {
    pub(super) tile: Tile<'k, 'k>,
    /// The function that gives the row of the tile in which a key lies.
    pub(super) row_of: fn(U32<'k>) -> U32<'k>,
    /// Number of keys: 64 or 128.
    pub(super) keys: u32,
    /// Number of columns, a multiple of 16.
    pub(super) head_dim: u32,
    /// Number of threads of the CTA, all of which write.
    pub(super) threads: u32,
}

impl<'k> KeyRows<'k> {
    /// Writes the tile, which is block `block` of a head, to rows of keys in `to` (sequences, heads, columns). A row
    /// has a multiple of 128 keys. If blocks have 64 keys and their number `blocks` is odd, the last block also writes
    /// the zeros that follow it.
    #[track_caller]
    pub(super) fn store(
        &self,
        b: &'k Builder,
        to: Global<'k, 3>,
        [batch, head, block]: [U32<'k>; 3],
        blocks: Option<U32<'k>>,
    ) {
        let (warp, lane) = ((b.tid() >> 5).shfl_idx(0), b.lane_id());
        let halves = self.keys / KEYS;
        let (key, first_col) = ((warp & (halves - 1)) * KEYS, (warp >> halves.ilog2()) * COLS);

        // Rows 2i and 2i + 1 of matrix m are keys 16i + 2m and 16i + 2m + 1, so that thread i of a quad gets keys of
        // the i-th group of 16. Matrices 0 to 3 have the lower eight keys of a group, 4 to 7 the upper eight.
        let loaded = key + ((lane & 6) << 3) + ((lane >> 3) << 1) + (lane & 1);
        let from = self.tile.elements((self.row_of)(loaded), first_col);
        let [.., stride] = to.strides;
        let to = to.at([batch, head, first_col + ((lane >> 2) << 1)]);
        let to = to + block.mad(self.keys, key + ((lane & 3) << 4)).to_u64();
        let other_is_none = blocks.filter(|_| self.keys == KEYS).map(|blocks| (block | 1).ge(blocks));

        let at_once = COLS * self.threads / (32 * halves);
        for col in (0..self.head_dim).step_by(at_once as usize) {
            let transpose = || {
                let [lower, upper]: [[U32<'k>; 4]; 2] =
                    [0, 8].map(|keys| b.ldmatrix(from.at(keys, col), true));
                for (next, bytes) in (0..).zip(EVEN_ODD) {
                    let words: [U32<'k>; 4] = from_fn(|word| lower[word].prmt(upper[word], bytes));
                    let to = to + stride * u64::from(col + next);
                    b.store_vector(to.at(0), words);
                    if let Some(other_is_none) = other_is_none {
                        b.guarded(other_is_none, || b.store_vector(to.at(KEYS as i32), [b.value(0); 4]));
                    }
                }
            };
            match self.head_dim - col {
                left if left < at_once => b.if_uniform(first_col.lt(left), transpose),
                _ => transpose(),
            }
        }
    }
}
