//! Incoherent processing: the product of a row and M, a random orthogonal matrix. Bits of parameters give the random
//! signs of M. The kernel expands these bits to numbers in shared memory.

use std::ops::Range;

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;

use super::row::{Row, WIDTH};

/// The two transforms of a row. Random signs precede each of them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Transform {
    /// The transform of the leading entries.
    Leading,
    /// The transform of the trailing entries.
    Trailing,
}

/// Random signs of a row's entries, 1 or −1. A thread reads the signs of its chunks.
pub(super) struct Signs<'k> {
    builder: &'k Builder,
    chunks: u32,
    lane: (U32<'k>, u32),
    /// The signs of all entries: those before the leading transform, and those before the trailing one.
    tables: [Region; 2],
}

impl<'k> Signs<'k> {
    /// Expands the signs, which are bits of `words`, in the first threads of the CTA. All threads must meet at a
    /// barrier before any of them reads signs.
    #[track_caller]
    pub(super) fn declare(
        b: &'k Builder,
        words: &[Vec<U32<'k>>; 2],
        chunks: u32,
        lane: (U32<'k>, u32),
    ) -> Signs<'k> {
        let bytes = 4 * CHUNK * chunks * lane.1;
        let tables = ["leading signs", "signs between"].map(|name| b.region(name, bytes, 16));
        let signs = Signs { builder: b, chunks, lane, tables };
        b.if_lanes(b.tid().lt(lane.1), || {
            // If head_dim is a power of two, there is one transform, and no signs between two transforms.
            for (&table, words) in signs.tables.iter().zip(words).filter(|(_, words)| !words.is_empty()) {
                signs.write(table, words);
            }
        });
        signs
    }

    /// Writes the signs of a thread's own chunks.
    #[track_caller]
    fn write(&self, table: Region, words: &[U32<'k>]) {
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

    /// The address of the signs of a chunk.
    #[track_caller]
    fn at(&self, table: Region, chunk: u32) -> U32<'k> {
        let (lane, lanes) = self.lane;
        lane.mad(4 * CHUNK, self.builder.address(table)) + 4 * CHUNK * lanes * chunk
    }

    /// The signs of elements `index` and `index` + 1, before the transform `transform`.
    #[track_caller]
    pub(super) fn pair(&self, transform: Transform, index: usize) -> [V<'k, F32>; 2] {
        let (chunk, within) = (index as u32 / CHUNK, index as u32 % CHUNK);
        self.builder.load_vector(self.at(self.tables[transform as usize], chunk).at(4 * within as i32))
    }
}

impl<'k> Row<'k> {
    /// Multiplies the row by M, the random orthogonal matrix of incoherent processing.
    #[track_caller]
    pub(super) fn transform(&mut self, signs: &Signs<'k>) {
        let elements = self.x.len();
        // This thread's part of the leading entries, whose number is the largest power of two up to head_dim.
        let part = 1 << elements.ilog2();
        self.walsh_hadamard(0..part, |index| signs.pair(Transform::Leading, index));
        if part < elements {
            self.walsh_hadamard(elements - part..elements, |index| signs.pair(Transform::Trailing, index));
        }
    }

    /// Multiplies by signs, then applies the Walsh-Hadamard transform: sums and differences of the elements `within` of
    /// this thread and of its neighbours, in rounds of growing distance, divided by the root of the transform's width.
    #[track_caller]
    fn walsh_hadamard(&mut self, within: Range<usize>, signs: impl Fn(usize) -> [V<'k, F32>; 2]) {
        for (index, pair) in self.x.chunks_exact_mut(2).enumerate() {
            let [first, second] = signs(2 * index);
            let b = pair[1] * second;
            // The first round includes the multiplication by the signs.
            [pair[0], pair[1]] = match within.contains(&(2 * index)) {
                true => [pair[0].fma(first, b), pair[0].fma(first, -b)],
                false => [pair[0] * first, b],
            };
        }
        let x = &mut self.x[within];
        for half in [2, 4] {
            butterflies(x, half);
        }
        for mask in [1, 2, 4].into_iter().filter(|&mask| mask < self.lanes) {
            let sign = (self.lane & mask).eq(0).select(1.0, -1.0);
            for x in x.iter_mut() {
                *x = x.fma(sign, x.shfl_bfly(mask));
            }
        }
        let mut half = WIDTH;
        while half < x.len() {
            butterflies(x, half);
            half *= 2;
        }
        let factor = ((x.len() as u32 * self.lanes) as f32).sqrt().recip();
        x.iter_mut().for_each(|x| *x = *x * factor);
    }
}

/// Replaces elements x and y that are `half` apart by x + y and x − y.
#[track_caller]
fn butterflies(x: &mut [V<'_, F32>], half: usize) {
    for pair in x.chunks_exact_mut(2 * half) {
        let (low, high) = pair.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}
