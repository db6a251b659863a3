//! Codes transposed, as products of 8-bit elements read V ([`ValueLayout::Transposed`](fa3_types::ValueLayout)).
//!
//! Threads write their codes to a tile in shared memory, and all meet. Then a warp takes 64 keys of 16 columns at a
//! time. `ldmatrix.trans` moves pairs of bytes, neighbours along the columns. Byte permutations part them into even and
//! odd columns, and join those of four keys. The keys that are rows of a matrix are chosen such that a thread gets 16
//! codes of either column that are neighbours in memory. So a warp writes 64 bytes of each of 16 rows of keys.

use std::array::from_fn;

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::encode::chunks;
use super::{Place, Quantize, ScaleSource};
use crate::kernels::parts::store_rows::Global;

/// Keys and columns that a warp transposes at a time.
const KEYS: u32 = 64;
const COLS: u32 = 16;

/// Bytes 0 and 2 of two words, and bytes 1 and 3.
const EVEN_ODD: [u32; 2] = [0x6420, 0x7531];

/// What codes go through.
pub(super) struct Transposed<'k> {
    /// A row for each key: see [`slot_of`].
    tile: Tile<'k, 'k>,
    /// All threads.
    met: fa3_ir::Barrier,
}

impl<'k> Transposed<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, tile: &fa3_sched::quantize::Tile) -> Transposed<'k> {
        let shape = TileShape::new(Elem::E4m3, tile.rows, tile.codes_cols());
        Transposed { tile: b.tile("codes", shape), met: b.barrier("codes", tile.threads()) }
    }
}

impl<'k> Quantize<'k> {
    /// Writes the codes of a tile, of which this thread has a part of row `row`; zeros for rows that there are not.
    pub(super) fn store_transposed(
        &self,
        through: &Transposed<'k>,
        x: &[V<'k, F32>],
        place: &Place<'k>,
        row: V<'k, B32>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let b = self.builder;
        if self.spec.scale != ScaleSource::Blocks {
            // All have read the codes of the tile before. Scales of blocks are behind a barrier in any case.
            b.sync(through.met);
        }
        let inside = place.block.mad(self.spec.tile.rows, row).lt(self.params.seqlen);
        let chunks = chunks(x, has_position).into_iter();
        let words = chunks.map(|words| words.map(|word| inside.select::<B32>(word, 0)));
        self.gather(through.tile, &words.collect::<Vec<_>>(), row);
        b.sync(through.met);
        self.scatter(through.tile, place);
    }

    /// Writes a thread's codes to shared memory.
    fn gather(&self, tile: Tile<'k, 'k>, chunks: &[[V<'k, B32>; 2]], row: V<'k, B32>) {
        let (b, (lane, lanes)) = (self.builder, self.lane);
        let at = tile.elements(slot_of(row), lane * CHUNK);
        if lanes == 1 {
            // 8 bytes of each of 16 rows would lie in half of the banks.
            for (pair, chunks) in chunks.chunks_exact(2).enumerate() {
                let words = [chunks[0][0], chunks[0][1], chunks[1][0], chunks[1][1]];
                b.store_vector(at.at(0, 2 * CHUNK * pair as u32), words);
            }
        } else {
            for (chunk, &words) in chunks.iter().enumerate() {
                b.store_vector(at.at(0, CHUNK * lanes * chunk as u32), words);
            }
        }
    }

    /// Writes rows of keys to global memory, those of neighbouring warps at neighbouring keys.
    fn scatter(&self, tile: Tile<'k, 'k>, place: &Place<'k>) {
        let (b, of_tile, params) = (self.builder, &self.spec.tile, &self.params);
        let (warp, lane) = ((b.tid() >> 5).shfl_idx(0), b.lane_id());
        let halves = of_tile.rows / KEYS;
        let (key, first_col) = ((warp & (halves - 1)) * KEYS, (warp >> halves.ilog2()) * COLS);

        // Rows 2i and 2i + 1 of matrix m are keys 16i + 2m and the next, so that thread i of a quad gets keys of the
        // i-th 16. Matrices 0 to 3 have the lower eight of those, 4 to 7 the upper eight.
        let loaded = key + ((lane & 6) << 3) + ((lane >> 3) << 1) + (lane & 1);
        let from = tile.elements(slot_of(loaded), first_col);
        let [.., stride] = params.codes_strides;
        let rows = Global { address: params.codes, strides: params.codes_strides };
        let to = rows.at([place.batch, place.head, first_col + ((lane >> 2) << 1)]);
        let to = to + place.block.mad(of_tile.rows, key + ((lane & 3) << 4)).to_u64();
        // Rows are whole 128 keys: of 64 keys that none of two blocks has, the other one writes the zeros.
        let other_is_none = (of_tile.rows == KEYS).then(|| (place.block | 1).ge(params.blocks));

        let at_once = COLS * of_tile.threads() / (32 * halves);
        for col in (0..of_tile.head_dim).step_by(at_once as usize) {
            let transpose = || {
                let [lower, upper]: [[V<'k, B32>; 4]; 2] =
                    [0, 8].map(|keys| b.ldmatrix(from.at(keys, col), true));
                for (next, bytes) in (0..).zip(EVEN_ODD) {
                    let words: [V<'k, B32>; 4] = from_fn(|word| lower[word].prmt(upper[word], bytes));
                    let to = to + stride * u64::from(col + next);
                    b.store_vector(to.at(0), words);
                    if let Some(other_is_none) = other_is_none {
                        b.guarded(other_is_none, || b.store_vector(to.at(KEYS as i32), [b.value(0); 4]));
                    }
                }
            };
            match of_tile.head_dim - col {
                left if left < at_once => b.if_uniform(first_col.lt(left), transpose),
                _ => transpose(),
            }
        }
    }
}

/// The row of the tile in which a key is. Each eight keys are in an order of their own, so that two sets of keys are in
/// different banks: the rows of a matrix, which differ in bits 0, 4 and 5; and those whose codes threads store at once.
/// With 8 threads a row these differ in bit 0, with 4 in bits 0 and 2, with fewer in bits 0 to 2.
#[track_caller]
fn slot_of<'k>(key: V<'k, B32>) -> V<'k, B32> {
    let order = ((key & 1) << 2) | (((key >> 1) ^ (key >> 3)) & 2) | (((key >> 1) ^ (key >> 5)) & 1);
    (key & !7) | order
}
