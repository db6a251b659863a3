//! A thread's part of a row, in registers: from shared memory through rotation and transform.

use std::ops::Range;

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;
use fa3_types::{RopeStyle, turn};

use super::signs::{Signs, Transform};
use super::spec::Rotation;
use crate::kernels::parts::unpack::unpacked;

/// Elements of a chunk.
const WIDTH: usize = CHUNK as usize;

/// The chunks `lane`, `lane` + `lanes`, … of a row of which each of `lanes` neighbouring threads has as many.
pub(super) struct Row<'k> {
    lane: V<'k, B32>,
    lanes: u32,
    pub(super) x: Vec<V<'k, F32>>,
}

impl<'k> Row<'k> {
    /// Row `row` of a tile of 16-bit elements, its pairs rotated. Chunks that have pairs in common come one after the
    /// other: there are not enough registers for all angles and all elements.
    #[track_caller]
    pub(super) fn load(
        b: &'k Builder,
        tile: Tile<'_, 'k>,
        row: V<'k, B32>,
        (lane, lanes): (V<'k, B32>, u32),
        chunks: u32,
        rotation: Option<(Rotation, Vec<[V<'k, F32>; 2]>)>,
    ) -> Row<'k> {
        let shape = tile.shape();
        // Chunks at the same place of different panels are as far apart as these.
        let in_panel = shape.panel_cols() / (CHUNK * lanes);
        let places = 0..in_panel.min(chunks);
        let places: Vec<_> =
            places.map(|place| tile.element(row, lane.mad(CHUNK, CHUNK * lanes * place))).collect();
        let chunk = |chunk: usize| -> Vec<V<'k, F32>> {
            let chunk = chunk as u32;
            let panel = chunk / in_panel * shape.panel_bytes();
            let words: [V<'k, B32>; 4] = b.load_vector(places[(chunk % in_panel) as usize].at(panel as i32));
            words.into_iter().flat_map(move |word| unpacked(shape.elem, word)).collect()
        };
        let mut x: Vec<Vec<V<'k, F32>>> = vec![Vec::new(); chunks as usize];
        if let Some((rotation, angles)) = rotation {
            match rotation.style {
                RopeStyle::Interleaved => {
                    for (index, angles) in angles.chunks_exact(WIDTH / 2).enumerate() {
                        x[index] = chunk(index);
                        for (pair, &[cos, sin]) in x[index].chunks_exact_mut(2).zip(angles) {
                            [pair[0], pair[1]] = turn([pair[0], pair[1]], cos, sin);
                        }
                    }
                }
                RopeStyle::HalfSplit => {
                    let half = angles.len() / WIDTH;
                    for (index, angles) in angles.chunks_exact(WIDTH).enumerate() {
                        let (mut low, mut high) = (chunk(index), chunk(index + half));
                        for ((low, high), &[cos, sin]) in low.iter_mut().zip(&mut high).zip(angles) {
                            [*low, *high] = turn([*low, *high], cos, sin);
                        }
                        (x[index], x[index + half]) = (low, high);
                    }
                }
            }
        }
        for (index, x) in x.iter_mut().enumerate().filter(|(_, x)| x.is_empty()) {
            *x = chunk(index);
        }
        Row { lane, lanes, x: x.concat() }
    }

    /// Multiplies by M, the random orthogonal matrix of incoherent processing.
    #[track_caller]
    pub(super) fn transform(&mut self, signs: &Signs<'k>) {
        let elements = self.x.len();
        // Of the largest power of two that is not above head_dim, this thread's part.
        let part = 1 << elements.ilog2();
        self.walsh_hadamard(0..part, |index| signs.pair(Transform::Leading, index));
        if part < elements {
            self.walsh_hadamard(elements - part..elements, |index| signs.pair(Transform::Trailing, index));
        }
    }

    /// Multiplies by signs; then takes sums and differences of this thread's elements `within` and those of its
    /// neighbours, in rounds of growing distance, divided by the root of the transform's width.
    #[track_caller]
    fn walsh_hadamard(&mut self, within: Range<usize>, signs: impl Fn(usize) -> [V<'k, F32>; 2]) {
        for (index, pair) in self.x.chunks_exact_mut(2).enumerate() {
            let [first, second] = signs(2 * index);
            let b = pair[1] * second;
            // The first round multiplies by the signs on the way.
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

/// (x, y) → (x + y, x − y) for elements that are `half` apart.
#[track_caller]
fn butterflies(x: &mut [V<'_, F32>], half: usize) {
    for pair in x.chunks_exact_mut(2 * half) {
        let (low, high) = pair.split_at_mut(half);
        for (a, b) in low.iter_mut().zip(high) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

/// The cosines and sines of a thread's pairs, from the rows of two tables.
#[track_caller]
pub(super) fn angles<'k>(
    b: &'k Builder,
    rotation: &Rotation,
    (lane, lanes): (V<'k, B32>, u32),
    tables: [V<'k, B64>; 2],
) -> Vec<[V<'k, F32>; 2]> {
    let pairs = rotation.rotary_dim / (2 * lanes);
    // Of a chunk: it has four pairs, or the first elements of eight.
    let together = match rotation.style {
        RopeStyle::Interleaved => CHUNK / 2,
        RopeStyle::HalfSplit => CHUNK,
    };
    let tables = tables.map(|table| lane.mad_wide(4 * together, table));
    let quad = |pair: u32| {
        let bytes = 4 * (pair / together * together * lanes + pair % together);
        let [cos, sin]: [[V<'k, F32>; 4]; 2] = tables.map(|table| b.load_read_only(table.at(bytes as i32)));
        cos.into_iter().zip(sin).map(|(cos, sin)| [cos, sin])
    };
    (0..pairs).step_by(4).flat_map(quad).collect()
}
