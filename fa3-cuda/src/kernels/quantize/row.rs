//! A thread's part of a row, which is loaded from shared memory to registers, with rotated pairs.

use fa3_ir::lang::*;
use fa3_sched::quantize::CHUNK;
use fa3_types::{RopeStyle, rotate};

use super::spec::Rotation;
use crate::kernels::parts::unpack::unpacked;

/// Number of elements of a chunk.
pub(super) const WIDTH: usize = CHUNK as usize;

/// The chunks `lane`, `lane` + `lanes`, … of a row, which `lanes` neighbouring threads share equally.
pub(super) struct Row<'k> {
    pub(super) lane: U32<'k>,
    pub(super) lanes: u32,
    pub(super) x: Vec<V<'k, F32>>,
}

impl<'k> Row<'k> {
    /// Loads row `row` of a tile of 16-bit elements, with rotated pairs. Chunks that share pairs come one after
    /// another, because registers do not hold all angles and all elements.
    #[track_caller]
    pub(super) fn load(
        b: &'k Builder,
        tile: Tile<'_, 'k>,
        row: U32<'k>,
        (lane, lanes): (U32<'k>, u32),
        chunks: u32,
        rotation: Option<(Rotation, Vec<[V<'k, F32>; 2]>)>,
    ) -> Row<'k> {
        let shape = tile.shape();
        // Offsets within a panel. In another panel, each offset is larger by a constant.
        let in_panel = shape.panel_cols() / (CHUNK * lanes);
        let places = 0..in_panel.min(chunks);
        let places: Vec<_> =
            places.map(|place| tile.element(row, lane.mad(CHUNK, CHUNK * lanes * place))).collect();
        let chunk = |chunk: usize| -> Vec<V<'k, F32>> {
            let chunk = chunk as u32;
            let panel = chunk / in_panel * shape.panel_bytes();
            let words: [U32<'k>; 4] = b.load_vector(places[(chunk % in_panel) as usize].at(panel as i32));
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
