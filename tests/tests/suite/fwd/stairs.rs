//! Scores in steps: in each row, one key outweighs all keys that were visited before it.

use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{dense, rounded, with_tile};
use fa3_tests::{Case, Values, pairs};
use fa3_types::{Dtype, KnownProblem};
use ndarray::Axis;
use rayon::prelude::*;

use super::{launch, tiles};

const ROWS: usize = 20;

fn problem(dtype: Dtype, keys: usize, scale: f64) -> KnownProblem {
    let mut spec = dense(dtype, 1, (ROWS, keys), (1, 1), 64);
    spec.softmax_scale = Some(scale);
    spec.known().unwrap()
}

/// Values for which the first key, which is visited last, has all of the weight. Scores grow by `step` towards the
/// first key, at each key, or only in every other block of 16 keys. Each row has its own factor.
fn stairs(values: Values, dtype: Dtype, step: f32, alternates: bool) -> Values {
    let Values { mut q, mut k, .. } = values.clone();
    let keys = k.len_of(Axis(1));
    q.fill(0.0);
    k.fill(0.0);
    for (row, mut q) in q.axis_iter_mut(Axis(1)).enumerate() {
        q.index_axis_mut(Axis(2), 0).fill(rounded(dtype, 0.5 + 0.023 * row as f32));
    }
    for (key, mut row) in k.axis_iter_mut(Axis(1)).enumerate() {
        let is_low = alternates && key / 16 % 2 == 1;
        let height = if is_low { 0.0 } else { step * (keys - key) as f32 };
        row.index_axis_mut(Axis(2), 0).fill(rounded(dtype, height));
    }
    Values { q, k, ..values }
}

/// O equals V of the key with all of the weight, bit by bit, for steps of any height. P of this key is not exactly 1,
/// because the product of its score and softmax_scale is rounded.
#[test]
fn a_key_that_has_a_row_to_itself_gives_its_v() {
    let lazy = tiles().into_iter().filter(|tile| tile.rescales_lazily());
    let cases = pairs(pairs(pairs(lazy, [1, 16, 17, 60, 130]), [100.0, 200.0, 400.0]), [false, true]);
    cases.into_par_iter().enumerate().for_each(|(index, (((tile, keys), step), alternates))| {
        let scale = 0.4 + 0.0077 * index as f64;
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let case = Case::normal("stairs", problem(dtype, keys, scale), 4);
            let values = stairs(case.values(), dtype, step, alternates);
            let launch = launch(&case.problem, &with_tile(tile)).unwrap();
            let answer = launch.simulate(&values, Policy::Eager, Mode::Exact).unwrap();
            let v = values.v.index_axis(Axis(1), 0).mapv(|v| rounded(dtype, v));
            for (row, o) in answer.o.axis_iter(Axis(1)).enumerate() {
                assert_eq!(o, v, "row {row}, {step} a key\n{}", launch.plan);
            }
        }
    });
}
