//! The CPU engine over several tiles and blocks of keys.

use fa3::{Attention, Device};
use ndarray::{Array4, Axis};

/// The rows of O that are NaN, and the rows that are 0, under a causal mask if key `bad` of V is NaN. Asserts that LSE
/// does not change.
fn rows_with_a_nan_in_v(queries: usize, keys: usize, bad: usize) -> [Vec<usize>; 2] {
    let wave = |seqlen| Array4::from_shape_fn((1, seqlen, 1, 8), |(_, s, _, d)| ((s + 5 * d) as f32).sin());
    let (q, k, mut v) = (wave(queries), wave(keys), wave(keys));
    let attend = |v: &Array4<f32>| {
        Attention::new(q.view(), k.view(), v.view()).causal().forward(&Device::Cpu).unwrap()
    };
    let clean = attend(&v);
    v.index_axis_mut(Axis(1), bad).fill(f32::NAN);
    let dirty = attend(&v);
    assert_eq!(dirty.lse, clean.lse);
    let row = |x: &Array4<f32>, row: usize| x.index_axis(Axis(1), row).to_owned();
    let (nan, rest): (Vec<usize>, Vec<usize>) =
        (0..queries).partition(|&index| row(&dirty.o, index).iter().all(|x| x.is_nan()));
    assert!(rest.iter().all(|&index| row(&dirty.o, index) == row(&clean.o, index)));
    [nan, rest.into_iter().filter(|&index| row(&clean.o, index).iter().all(|&x| x == 0.0)).collect()]
}

/// A NaN in V reaches all rows of a tile if some row of the tile sees its key, as the documentation of [`Attention`]
/// states. Fully masked rows are exempt.
#[test]
fn a_nan_in_v_reaches_whole_tiles() {
    // Row r sees the keys up to r + 1400, so rows from 200 on see the NaN. Their first tile begins at row 192.
    let [nan, zero] = rows_with_a_nan_in_v(300, 1700, 1600);
    assert_eq!((nan, zero), ((192..300).collect(), vec![]));
    // Only the last 20 rows see a key. They belong to tiles 2 and 3.
    let [nan, zero] = rows_with_a_nan_in_v(300, 20, 0);
    assert_eq!((nan, zero), ((280..300).collect(), (0..280).collect()));
}
