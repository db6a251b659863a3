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
            // There are none between the transforms of a power of two.
            for (&table, words) in signs.tables.iter().zip(words).filter(|(_, words)| !words.is_empty()) {
                signs.write(table, words);
            }
        });
        signs
    }

    /// Writes the signs of a thread's own chunks.
    #[track_caller]
    fn write(&self, table: Region, words: &[V<'k, B32>]) {
        let (lane, lanes) = self.lane;
        // A word has the bits of four chunks.
        for chunk in 0..self.chunks {
            let first = lanes * chunk;
            let word = |number: u32| words[number as usize / 4];
            let word = match lanes {
                8 => (lane & 4).eq(0).select::<B32>(word(first), word(first + 4)),
                _ => word(first),
            };
            let bits = word >> (((lane + first) & 3) * CHUNK);
            let sign = |bit: u32| (((bits << (31 - bit)) & (1 << 31)) | 1.0f32.to_bits()).as_f32();
            let at = self.at(table, chunk);
            for quad in [0, 4] {
                self.builder.store_vector(at.at(4 * quad as i32), [0, 1, 2, 3].map(|bit| sign(quad + bit)));
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
