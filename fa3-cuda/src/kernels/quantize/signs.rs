//! The random signs of incoherent processing: bits of parameters, spread out in shared memory as numbers.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

/// Which transform signs come before.
#[derive(Clone, Copy, Debug)]
pub(super) enum Transform {
    /// Of the leading entries.
    Leading,
    /// Of the trailing entries.
    Trailing,
}

/// Signs of rows, 1 or −1, of which a thread takes those of its chunks.
pub(super) struct Signs<'k> {
    builder: &'k Builder,
    chunks: u32,
    lane: (V<'k, B32>, u32),
    /// Of all entries, before the transform of the leading ones and before that of the trailing ones.
    tables: [Region; 2],
}

impl<'k> Signs<'k> {
    /// Those of the bits of these words, written by the first threads of the CTA. They must meet before one reads them.
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        words: &[Vec<V<'k, B32>>; 2],
        chunks: u32,
        lane: (V<'k, B32>, u32),
    ) -> Signs<'k> {
        let bytes = 4 * CHUNK * chunks * lane.1;
        let tables = ["leading signs", "signs between"].map(|name| b.region(name, bytes, 16));
        let signs = Signs { builder: b, chunks, lane, tables };
        b.if_lanes(b.tid().lt(lane.1), || {
            for (&table, words) in signs.tables.iter().zip(words) {
                signs.write(table, words);
            }
        });
        signs
    }

    /// Writes the signs of a thread's own chunks.
    #[track_caller]
    fn write(&self, table: Region, words: &[V<'k, B32>]) {
        let (lane, lanes) = self.lane;
        // A word has the bits of four chunks: those of 4 / lanes of this thread's.
        let in_word = 4 / lanes;
        let words: Vec<_> = words.iter().map(|&word| word >> (lane * CHUNK)).collect();
        for (index, &word) in words.iter().enumerate() {
            for chunk in (0..in_word).filter(|chunk| index as u32 * in_word + chunk < self.chunks) {
                let sign = |bit: u32| {
                    let bit = CHUNK * lanes * chunk + bit;
                    (((word << (31 - bit)) & (1 << 31)) | 1.0f32.to_bits()).as_f32()
                };
                let at = self.at(table, index as u32 * in_word + chunk);
                for quad in [0, 4] {
                    self.builder
                        .store_vector(at.at(4 * quad as i32), [0, 1, 2, 3].map(|bit| sign(quad + bit)));
                }
            }
        }
    }

    /// Where those of a chunk begin.
    #[track_caller]
    fn at(&self, table: Region, chunk: u32) -> V<'k, B32> {
        let (lane, lanes) = self.lane;
        lane.mad(4 * CHUNK, self.builder.address(table)) + 4 * CHUNK * lanes * chunk
    }

    /// Two of them, of elements `index` and the next, before one of the transforms.
    #[track_caller]
    pub(super) fn pair(&self, transform: Transform, index: usize) -> [V<'k, F32>; 2] {
        let (chunk, within) = (index as u32 / CHUNK, index as u32 % CHUNK);
        self.builder.load_vector(self.at(self.tables[transform as usize], chunk).at(4 * within as i32))
    }
}
