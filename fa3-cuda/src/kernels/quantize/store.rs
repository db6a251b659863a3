//! Stores codes. Rows are written in sectors of 32 bytes. Transposed codes, the layout in which 8-bit products read V
//! ([`ValueLayout::Transposed`](fa3_types::ValueLayout)), go through a staging buffer in shared memory: threads write
//! their codes, meet at a barrier, and then write rows of keys ([`KeyRows`]).

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::encode::chunks;
use super::key_rows::KeyRows;
use super::{HeadBlock, Quantize, ScaleSource};
use crate::kernels::parts::store_rows::neighbours;

/// The staging buffer of transposed codes.
pub(super) struct Transposed<'k> {
    /// The buffer, with a row for each key, which [`slot_of`] gives.
    tile: Tile<'k, 'k>,
    /// The barrier at which all threads meet.
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
    /// Writes the codes of a thread's part of a row, if the row exists.
    #[track_caller]
    pub(super) fn store(
        &self,
        x: &[V<'k, F32>],
        place: &HeadBlock<'k>,
        row: U32<'k>,
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
            // Rows beyond the sequence get zeros, which the transform may have turned into negative zeros.
            let is_one = row.lt(span.len);
            chunks.iter_mut().for_each(|words| *words = words.map(|word| is_one.select::<B32>(word, 0)));
        }
        if lanes == 2 && chunks.len().is_multiple_of(2) {
            let at = lane.mad_wide(2 * CHUNK, at);
            for (pair, chunks) in chunks.chunks_exact(2).enumerate() {
                // Once the lanes have exchanged words, two lanes together write a whole sector.
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

    /// Writes the codes of a tile. This thread has a part of row `row`. Missing rows get zeros.
    pub(super) fn store_transposed(
        &self,
        through: &Transposed<'k>,
        x: &[V<'k, F32>],
        place: &HeadBlock<'k>,
        row: U32<'k>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let b = self.builder;
        if self.spec.scale != ScaleSource::Blocks {
            // All threads must have read the codes of the previous tile. With scales of blocks, the barrier of the
            // maximum ensures this.
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
        // With a cluster, each half of a block has its own CTA.
        let blocks = self.rank.is_none().then_some(params.blocks);
        codes.store(b, params.codes.global(), [place.batch, place.head, self.part(place)], blocks);
    }

    /// Writes a thread's codes to shared memory.
    fn gather(&self, tile: Tile<'k, 'k>, chunks: &[[U32<'k>; 2]], row: U32<'k>) {
        let (b, (lane, lanes)) = (self.builder, self.lane);
        let at = tile.elements(slot_of(row), lane * CHUNK);
        if lanes == 1 {
            // Two chunks are stored at once: single chunks of 8 bytes in each of 16 rows would use only half of the
            // banks.
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

/// The row of the staging buffer that holds a key. Groups of eight keys are permuted, so that neither reads nor stores
/// have bank conflicts. The keys that one read needs (rows of a matrix) differ in bits 0, 4 and 5. The keys that one
/// store has differ in bit 0 with 8 threads per row, in bits 0 and 2 with 4 threads, and in bits 0 to 2 with fewer.
#[track_caller]
fn slot_of<'k>(key: U32<'k>) -> U32<'k> {
    let order = ((key & 1) << 2) | (((key >> 1) ^ (key >> 3)) & 2) | (((key >> 1) ^ (key >> 5)) & 1);
    (key & !7) | order
}
