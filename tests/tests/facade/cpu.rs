//! The CPU engine over several tiles and blocks of keys.

use fa3::{Attention, Device};
use fa3_ref::law::ForwardLaw;
use fa3_ref::{Forward, Inputs, Precision};
use half::f16;
use ndarray::{Array4, ArrayView4, Axis};

/// Judges f16 attention of 300 queries over 1700 keys: 7 tiles by 7 blocks.
fn check(with: impl Fn(Attention<'_, f16>) -> Attention<'_, f16>) {
    let mut x = 0.0f32;
    let mut wave = |heads, seqlen, step: f32| {
        Array4::from_shape_simple_fn((1, seqlen, heads, 64), || {
            x += step;
            f16::from_f32(2.0 * x.sin())
        })
    };
    let (q, k, v) = (wave(2, 300, 0.7), wave(1, 1700, 0.9), wave(1, 1700, 1.1));
    let attention = with(Attention::new(q.view(), k.view(), v.view()));
    judge(&attention, [q.view(), k.view(), v.view()]);
}

/// Holds a call to the error law.
fn judge(attention: &Attention<'_, f16>, [q, k, v]: [ArrayView4<'_, f16>; 3]) {
    let output = attention.forward(&Device::Cpu).unwrap();
    let problem = attention.problem().unwrap();
    let inputs = Inputs::new(&problem, q, k, v).unwrap();
    let forward = Forward { o: output.o.mapv(f16::to_f32), lse: output.lse };
    ForwardLaw::new(&inputs, Precision::F16).check(&forward, "cargo test -p fa3 cpu").unwrap();
}

/// One row of 6 heads that share K and V, over keys in 3 parts, the last of which is short.
#[test]
fn decoding() {
    let wave = |dims, step: f32| {
        Array4::from_shape_fn(dims, |(_, s, h, d)| {
            f16::from_f32((step * (7 * s + 3 * h + 5 * d) as f32).sin())
        })
    };
    let (q, k, v) = (wave((1, 1, 6, 16), 0.3), wave((1, 8300, 1, 16), 0.5), wave((1, 8300, 1, 8), 0.7));
    let attention = Attention::new(q.view(), k.view(), v.view()).window(Some(8250), None);
    judge(&attention, [q.view(), k.view(), v.view()]);
}

#[test]
fn without_a_mask() {
    check(|attention| attention);
}

/// The first blocks are visible in full, others in part.
#[test]
fn causal() {
    check(|attention| attention.causal());
}

/// Two intervals a row, whose gap begins and ends within blocks; heads that share keys have their own.
#[test]
fn intervals() {
    let wave = |dims, step: f32| {
        Array4::from_shape_fn(dims, |(_, s, h, d)| {
            f16::from_f32((step * (7 * s + 3 * h + 5 * d) as f32).sin())
        })
    };
    let (q, kv) = (wave((1, 300, 2, 16), 0.3), wave((1, 1700, 1, 16), 0.5));
    let bounds = |(_, head, row, bound): (usize, usize, usize, usize)| {
        let (row, head) = (row as i32, head as i32);
        [900 + 2 * row, 1000 + 3 * row, 3 - row % 7, 40 + 100 * head + row % 5][bound]
    };
    let intervals = Array4::from_shape_fn((1, 2, 300, 4), bounds);
    let attention = Attention::new(&q, &kv, &kv).intervals(&intervals);
    judge(&attention, [q.view(), kv.view(), kv.view()]);
}

/// Under a causal mask, with a NaN in V at key `bad`: which rows are NaN, which are 0; LSE is what it is without.
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

/// A NaN in V reaches every row of a tile some row of which sees the NaN's key, but no row that sees no key at all,
/// as the documentation of [`Attention`] says.
#[test]
fn a_nan_in_v_reaches_whole_tiles() {
    // Row r sees the keys up to r + 1400: rows from 200 on see the NaN. Their first tile begins at row 192.
    let [nan, zero] = rows_with_a_nan_in_v(300, 1700, 1600);
    assert_eq!((nan, zero), ((192..300).collect(), vec![]));
    // Only the last 20 rows see a key. They are in tiles 2 and 3.
    let [nan, zero] = rows_with_a_nan_in_v(300, 20, 0);
    assert_eq!((nan, zero), ((280..300).collect(), (0..280).collect()));
}

/// The first block is skipped by most tiles, others are visible in part.
#[test]
fn window_and_cap() {
    check(|attention| attention.window(Some(700), Some(3)).softcap(8.0));
}
