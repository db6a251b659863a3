//! A thread's part of a row: two chunks of 16 bytes, which contain both elements of each of their rotary pairs.
//!
//! ```text
//! pairs of entries i and i + rotary_dim / 2    thread u has chunks u and u + rotary_dim / 16
//! other pairs, or none                         thread u has chunks 2u and 2u + 1
//! ```
//!
//! With both kinds of pairs, thread u has the angles 8u to 8u + 7.

use fa3_ir::lang::*;
use fa3_sched::append::{ELEMENTS, THREADS, lanes, table_row};
use fa3_types::{RopeStyle, rotate};

use super::params::RotationTables;
use super::spec::Rotation;
use crate::kernels::params::InKernel;
use crate::kernels::parts::unpack::unpacked;

/// Number of elements of a chunk.
const CHUNK: u32 = ELEMENTS / 2;

/// Two chunks of 16-bit elements.
pub(super) type Chunks<'k> = [[U32<'k>; 4]; 2];

/// Cosines and sines of eight pairs.
pub(super) type Angles<'k> = Vec<[V<'k, F32>; 2]>;

/// The part of a row that a thread has.
pub(super) struct RowPart<'k> {
    head_dim: u32,
    /// The row's index in its tensor, clamped to the last row.
    pub(super) row: U32<'k>,
    /// Whether the thread has a part of a row.
    pub(super) inside: V<'k, Pred>,
    /// The index of the part among the parts of its row.
    unit: U32<'k>,
    /// Whether the part's pairs are rotated; `None` if all pairs of a row are rotated.
    rotates: Option<V<'k, Pred>>,
    chunks: [U32<'k>; 2],
}

impl<'k> RowPart<'k> {
    /// The part of this thread. The CTAs from number `first` on have the tensor's `rows` rows.
    #[track_caller]
    pub(super) fn new(
        b: &'k Builder,
        head_dim: u32,
        rotation: Option<Rotation>,
        (first, rows): (U32<'k>, U32<'k>),
    ) -> RowPart<'k> {
        let (lanes, units) = (lanes(head_dim), head_dim.div_ceil(ELEMENTS));
        let row = (b.cta_x() - first).mad(THREADS / lanes, b.tid() >> lanes.ilog2());
        let (lane, has_row) = (b.tid() & (lanes - 1), row.lt(rows));
        let (unit, inside) = match units == lanes {
            true => (lane, has_row),
            false => (lane.min(units - 1), has_row & lane.lt(units)),
        };
        let rotates = rotation.filter(|x| x.rotary_dim < head_dim).map(|x| unit.lt(x.rotary_dim / ELEMENTS));
        let neighbours = [unit << 1, (unit << 1) + 1];
        let chunks = match rotation {
            Some(Rotation { style: RopeStyle::HalfSplit, rotary_dim, .. }) => {
                let halves = [unit, unit + rotary_dim / ELEMENTS];
                match rotates {
                    Some(rotates) => [0, 1].map(|i| rotates.select(halves[i], neighbours[i])),
                    None => halves,
                }
            }
            _ => neighbours,
        };
        RowPart { head_dim, row: row.min(rows - 1), inside, unit, rotates, chunks }
    }

    /// Number of threads that share a row.
    pub(super) fn lanes(&self) -> u32 {
        lanes(self.head_dim)
    }

    /// Whether the last part of a row has only one chunk.
    fn is_odd(&self) -> bool {
        !self.head_dim.is_multiple_of(ELEMENTS)
    }

    /// Loads the part's chunks of the row at address `row`. Another chunk is loaded in place of a missing one.
    #[track_caller]
    pub(super) fn load(&self, b: &'k Builder, row: U64<'k>) -> Chunks<'k> {
        let [first, second] = self.chunks;
        let second = if self.is_odd() { second.min(self.head_dim / CHUNK - 1) } else { second };
        [first, second].map(|chunk| b.load_vector(chunk.mad_wide(16, row).at(0)))
    }

    /// Stores the part's chunks to the row at address `row`, where `writes` is true.
    #[track_caller]
    pub(super) fn store(&self, b: &'k Builder, row: U64<'k>, x: Chunks<'k>, writes: V<'k, Pred>) {
        self.store_as(b, (row, 16), x, writes);
    }

    /// Like `store`, but stores e4m3 codes: the nearest codes of the elements divided by `scale`.
    #[track_caller]
    pub(super) fn store_codes(
        &self,
        b: &'k Builder,
        elem: Elem,
        row: U64<'k>,
        (x, scale): (Chunks<'k>, V<'k, F32>),
        writes: V<'k, Pred>,
    ) {
        let pair = |word: U32<'k>| {
            let [low, high] = unpacked(elem, word).map(|x| x / scale);
            high.e4m3x2_above(low)
        };
        let codes = x.map(|[first, second, third, fourth]| {
            [[first, second], [third, fourth]].map(|[low, high]| pair(low).below(pair(high)))
        });
        self.store_as(b, (row, 8), codes, writes);
    }

    /// Stores words that were made from the part's chunks to the row at this address. Each chunk takes `bytes` bytes.
    #[track_caller]
    fn store_as<const N: usize>(
        &self,
        b: &'k Builder,
        (row, bytes): (U64<'k>, u32),
        x: [[U32<'k>; N]; 2],
        writes: V<'k, Pred>,
    ) {
        let [first, second] = self.chunks;
        let has_second = if self.is_odd() { writes & second.lt(self.head_dim / CHUNK) } else { writes };
        for ((chunk, words), writes) in [first, second].into_iter().zip(x).zip([writes, has_second]) {
            let at = chunk.mad_wide(bytes, row).at(0);
            b.guarded(writes, || b.store_vector(at, words));
        }
    }

    /// The cosines and sines of the part's pairs in row `row` of a sequence whose first row is at position `base`.
    #[track_caller]
    pub(super) fn angles(
        &self,
        b: &'k Builder,
        rotation: &Rotation,
        tables: &RotationTables<InKernel<'k>>,
        base: U32<'k>,
        row: U32<'k>,
    ) -> Angles<'k> {
        let bytes = rotation.table.bytes();
        let unit = match self.rotates {
            Some(_) => self.unit.min(rotation.rotary_dim / ELEMENTS - 1),
            None => self.unit,
        };
        let at = table_row(base, row, tables.last).mul_wide(rotation.rotary_dim / 2 * bytes);
        let at = unit.mad_wide(CHUNK * bytes, at);
        let load = |table: U64<'k>| -> Vec<V<'k, F32>> {
            let at = table + at;
            if rotation.table == Elem::F32 {
                return [0, 16]
                    .into_iter()
                    .flat_map(|bytes| b.load_read_only::<F32, 4>(at.at(bytes)))
                    .collect();
            }
            let words: [U32<'k>; 4] = b.load_read_only(at.at(0));
            words.into_iter().flat_map(|word| unpacked(rotation.table, word)).collect()
        };
        let (cos, sin) = (load(tables.cos), load(tables.sin));
        cos.into_iter().zip(sin).map(|(cos, sin)| [cos, sin]).collect()
    }

    /// The part's chunks with rotated pairs, where `counts` is true and the pairs are to be rotated.
    #[track_caller]
    pub(super) fn rotated(
        &self,
        elem: Elem,
        x: Chunks<'k>,
        (rotation, angles): (Rotation, Angles<'k>),
        counts: Option<V<'k, Pred>>,
    ) -> Chunks<'k> {
        let [low, high] = x;
        // A pair is both numbers of a word (interleaved), or the numbers at one place of two words (half-split).
        let rotated: Chunks<'k> = match rotation.style {
            RopeStyle::Interleaved => {
                let word = |word: U32<'k>, [cos, sin]: [V<'k, F32>; 2]| {
                    packed(elem, rotate(unpacked(elem, word), cos, sin))
                };
                [0, 4].map(|first| [0, 1, 2, 3].map(|i| word(x[first / 4][i], angles[first + i])))
            }
            RopeStyle::HalfSplit => {
                let words = [0, 1, 2, 3].map(|i| {
                    let (low, high) = (unpacked(elem, low[i]), unpacked(elem, high[i]));
                    let pairs = [0, 1].map(|j| {
                        let [cos, sin] = angles[2 * i + j];
                        rotate([low[j], high[j]], cos, sin)
                    });
                    [0, 1].map(|side| packed(elem, [pairs[0][side], pairs[1][side]]))
                });
                [0, 1].map(|side| [0, 1, 2, 3].map(|i| words[i][side]))
            }
        };
        let rotates = match (self.rotates, counts) {
            (Some(rotates), Some(counts)) => Some(rotates & counts),
            (one, other) => one.or(other),
        };
        let Some(rotates) = rotates else { return rotated };
        [0, 1].map(|chunk| [0, 1, 2, 3].map(|i| rotates.select(rotated[chunk][i], x[chunk][i])))
    }
}

/// Packs two numbers into a register, as f16 or bf16.
#[track_caller]
fn packed<'k>(elem: Elem, numbers: [V<'k, F32>; 2]) -> U32<'k> {
    if elem == Elem::F16 { V::pack_f16x2(numbers) } else { V::pack_bf16x2(numbers) }
}
