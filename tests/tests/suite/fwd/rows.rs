//! Chunks of rows: a row has the same bits in a chunk of its sequence as in the whole sequence.

use std::ops::Range;

use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{dense, with_tile};
use fa3_tests::{Case, Dist, Values, pairs};
use fa3_types::{Dtype, Mask};
use ndarray::{Array, ArrayView, Axis, Dimension};
use rayon::prelude::*;

use super::{launch, tiles};

const ROWS: usize = 150;

/// Chunks of rows that neither begin nor end at a tile boundary. Masks align the last row of a chunk to its last key.
const CHUNKS: [(usize, usize); 3] = [(0, 50), (37, 150), (50, 111)];

/// A range of an array along the axis of rows.
fn rows<T, D: Dimension>(x: &Array<T, D>, axis: usize, rows: Range<usize>) -> ArrayView<'_, T, D> {
    x.slice_axis(Axis(axis), rows.into())
}

/// The first visited KV block of a tile depends on the tile's last row, so some blocks may be fully masked for other
/// rows.
#[test]
fn a_chunk_of_rows_has_the_bits_of_the_whole() {
    let dists = [Dist::Normal, Dist::Increasing, Dist::Decreasing];
    pairs(tiles(), dists).into_par_iter().for_each(|(tile, dist)| {
        let bits = |(first, end): (usize, usize), values: &Values| {
            let problem =
                dense(Dtype::Bf16, 1, (end - first, end), (2, 1), 64).mask(Mask::Causal).known().unwrap();
            let launch = launch(&problem, &with_tile(tile)).unwrap();
            let values = Values {
                q: rows(&values.q, 1, first..end).to_owned(),
                k: rows(&values.k, 1, 0..end).to_owned(),
                v: rows(&values.v, 1, 0..end).to_owned(),
                dout: rows(&values.dout, 1, first..end).to_owned(),
                qv: None,
                sink: values.sink.clone(),
            };
            let answer = launch.simulate(&values, Policy::Eager, Mode::Fast).unwrap();
            (answer.o.mapv(f32::to_bits), answer.lse.mapv(f32::to_bits))
        };
        let problem = dense(Dtype::Bf16, 1, (ROWS, ROWS), (2, 1), 64).mask(Mask::Causal).known().unwrap();
        let values = Case { dist, ..Case::normal("rows", problem, 7) }.values();
        let (o, lse) = bits((0, ROWS), &values);
        for (first, end) in CHUNKS {
            let chunk = bits((first, end), &values);
            assert!(chunk.0 == rows(&o, 1, first..end), "O of {first}..{end}, {tile}, {dist:?}");
            assert!(chunk.1 == rows(&lse, 2, first..end), "LSE of {first}..{end}, {tile}, {dist:?}");
        }
    });
}
