//! A thread's part of a row, from shared memory to registers, its pairs rotated.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;
use fa3_types::{RopeStyle, rotate};

use super::spec::Rotation;
use crate::kernels::parts::unpack::unpacked;

/// Elements of a chunk.
pub(super) const WIDTH: usize = CHUNK as usize;

/// The chunks `lane`, `lane` + `lanes`, … of a row of which each of `lanes` neighbouring threads has as many.
pub(super) struct Row<'k> {
    pub(super) lane: V<'k, B32>,
    pub(super) lanes: u32,
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
                            [pair[0], pair[1]] = rotate([pair[0], pair[1]], cos, sin);
                        }
                    }
                }
                RopeStyle::HalfSplit => {
                    let half = angles.len() / WIDTH;
                    for (index, angles) in angles.chunks_exact(WIDTH).enumerate() {
                        let (mut low, mut high) = (chunk(index), chunk(index + half));
                        for ((low, high), &[cos, sin]) in low.iter_mut().zip(&mut high).zip(angles) {
                            [*low, *high] = rotate([*low, *high], cos, sin);
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
}
