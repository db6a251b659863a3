//! Codes to memory. Rows are written in sectors of 32 bytes. Codes that are transposed, as products of 8-bit elements
//! read V ([`ValueLayout::Transposed`](fa3_types::ValueLayout)), go through a tile in shared memory: threads write
//! theirs, all meet, then they write rows of keys, see [`KeyRows`].

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::encode::chunks;
use super::key_rows::KeyRows;
use super::{HeadBlock, Quantize, ScaleSource};
use crate::kernels::parts::store_rows::neighbours;

/// The tile that codes go through.
pub(super) struct Transposed<'k> {
    /// A row for each key: see [`slot_of`].
    tile: Tile<'k, 'k>,
    /// The meeting of all threads.
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
    /// Writes the codes of a thread's part of a row, if there is that row.
    #[track_caller]
    pub(super) fn store(
        &self,
        x: &[V<'k, F32>],
        place: &HeadBlock<'k>,
        row: V<'k, B32>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let (b, (lane, lanes)) = (self.builder, self.lane);
        let (inside, in_memory) = match place.span {
            None => (row.lt(self.params.seqlen), row),
            Some(span) => (row.lt(span.rows), span.first + row),
        };
        let at = self.params.codes.global().at([place.batch, place.head, in_memory]);
        let mut chunks = chunks(x, has_position);
        if let Some(span) = place.span {
            // A transform gives zeros signs.
            let is_one = row.lt(span.len);
            chunks.iter_mut().for_each(|words| *words = words.map(|word| is_one.select::<B32>(word, 0)));
        }
        if lanes == 2 && chunks.len().is_multiple_of(2) {
            let at = lane.mad_wide(2 * CHUNK, at);
            for (pair, chunks) in chunks.chunks_exact(2).enumerate() {
                // Then both lanes write a whole sector at once.
                let words = neighbours(lane.eq(0), [chunks[0], chunks[1]]);
                b.guarded(inside, || b.store_vector(at.at((4 * CHUNK) as i32 * pair as i32), words));
            }
        } else {
            let at = lane.mad_wide(CHUNK, at);
            for (chunk, words) in chunks.into_iter().enumerate() {
                b.guarded(inside, || b.store_vector(at.at((CHUNK * lanes) as i32 * chunk as i32), words));
            }
        }
    }

    /// Writes the codes of a tile, of which this thread has a part of row `row`; zeros for rows that there are not.
    pub(super) fn store_transposed(
        &self,
        through: &Transposed<'k>,
        x: &[V<'k, F32>],
        place: &HeadBlock<'k>,
        row: V<'k, B32>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let b = self.builder;
        if self.spec.scale != ScaleSource::Blocks {
            // All have read the codes of the tile before. Scales of blocks are behind a barrier in any case.
            b.sync(through.met);
        }
        let inside = self.part(place).mad(self.spec.tile.rows, row).lt(self.params.seqlen);
        let chunks = chunks(x, has_position).into_iter();
        let words = chunks.map(|words| words.map(|word| inside.select::<B32>(word, 0)));
        self.gather(through.tile, &words.collect::<Vec<_>>(), row);
        b.sync(through.met);
        let (tile, params) = (&self.spec.tile, &self.params);
        let codes = KeyRows {
            tile: through.tile,
            row_of: slot_of,
            keys: tile.rows,
            head_dim: tile.head_dim,
            threads: tile.threads(),
        };
        // Both halves of a block have a CTA of a cluster, or they are different blocks.
        let blocks = self.rank.is_none().then_some(params.blocks);
        codes.store(b, params.codes.global(), [place.batch, place.head, self.part(place)], blocks);
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
}

/// The row of the tile in which a key is. Each eight keys are in an order of their own, so that two sets of keys are in
/// different banks: the rows of a matrix, which differ in bits 0, 4 and 5; and those whose codes threads store at once.
/// With 8 threads a row these differ in bit 0, with 4 in bits 0 and 2, with fewer in bits 0 to 2.
#[track_caller]
fn slot_of<'k>(key: V<'k, B32>) -> V<'k, B32> {
    let order = ((key & 1) << 2) | (((key >> 1) ^ (key >> 3)) & 2) | (((key >> 1) ^ (key >> 5)) & 1);
    (key & !7) | order
}
