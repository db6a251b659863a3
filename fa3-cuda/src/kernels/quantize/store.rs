//! Codes to memory, which is written in sectors of 32 bytes.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::encode::chunks;
use super::{Place, Quantize};
use crate::kernels::parts::store_rows::neighbours;

impl<'k> Quantize<'k> {
    /// Writes the codes of a thread's part of a row, if there is that row.
    #[track_caller]
    pub(super) fn store(
        &self,
        x: &[V<'k, F32>],
        place: &Place<'k>,
        row: V<'k, B32>,
        has_position: Option<V<'k, Pred>>,
    ) {
        let (b, (lane, lanes)) = (self.builder, self.lane);
        let inside = row.lt(self.params.seqlen);
        let row = self.params.codes.global().at([place.batch, place.head, row]);
        let chunks = chunks(x, has_position);
        if lanes == 2 && chunks.len().is_multiple_of(2) {
            let at = lane.mad_wide(2 * CHUNK, row);
            for (pair, chunks) in chunks.chunks_exact(2).enumerate() {
                // Then both lanes write a whole sector at once.
                let words = neighbours(lane.eq(0), [chunks[0], chunks[1]]);
                b.guarded(inside, || b.store_vector(at.at((4 * CHUNK) as i32 * pair as i32), words));
            }
        } else {
            let at = lane.mad_wide(CHUNK, row);
            for (chunk, words) in chunks.into_iter().enumerate() {
                b.guarded(inside, || b.store_vector(at.at((CHUNK * lanes) as i32 * chunk as i32), words));
            }
        }
    }
}
