//! Scores that grow from one visited block to the next, so that every row maximum is replaced.

use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{dense, rounded, with_tile};
use fa3_tests::{Case, Values, in_turn, pairs};
use fa3_types::{Dtype, KnownProblem, Mask};
use half::f16;
use ndarray::Axis;
use rayon::prelude::*;

use super::{check, launch, tiles};

const KEYS: usize = 100;

fn problem(dtype: Dtype, keys: usize, mask: Mask) -> KnownProblem {
    let mut spec = dense(dtype, 1, (70, keys), (2, 1), 64).mask(mask);
    spec.softmax_scale = Some(1.0);
    spec.known().unwrap()
}

/// Random values whose scores grow from key to key towards the first key, by about `growth` times the query's first
/// element. Kernels visit blocks from the last to the first.
fn growing(values: Values, growth: f32) -> Values {
    let Values { mut q, mut k, .. } = values.clone();
    let keys = k.len_of(Axis(1));
    q.mapv_inplace(|x| f16::from_f32(x / 4.0).to_f32());
    q.index_axis_mut(Axis(3), 0).fill(1.0);
    for (key, mut row) in k.axis_iter_mut(Axis(1)).enumerate() {
        row.index_axis_mut(Axis(2), 0).fill(growth * (keys - key) as f32);
    }
    Values { q, k, ..values }
}

/// The small growths stay within the rescale threshold. Larger growths exceed the range of f16, and then of binary32.
/// With the largest growth, only the block that is visited last matters.
#[test]
fn growing_scores_are_as_in_the_oracle() {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(60), right: Some(5) }];
    // Growths are powers of 2, so that the keys are exact in 16 bits.
    let growths = [-2.0, 1.0 / 64.0, 0.125, 0.25, 1.0, 4.0, 128.0];
    in_turn(pairs(pairs(tiles(), growths), [Dtype::F16, Dtype::Bf16]), 1, masks).into_par_iter().for_each(
        |(((tile, growth), dtype), mask)| {
            let case = Case::normal("growing", problem(dtype, KEYS, mask), 4);
            let values = growing(case.values(), growth);
            let checked = check(&case, &values, tile, Policy::Random(3), Mode::Exact);
            assert!(checked.is_ok(), "growth {growth}, {dtype}: {checked:?}");
        },
    );
}

/// Keys of one score are followed by keys of a higher score. The keys of the higher score together outweigh all
/// previous keys, although no single key does. V is around 1, so that an error of a row sum shows in O.
#[test]
fn plateaus_are_as_in_the_oracle() {
    let lazy = tiles().into_iter().filter(|tile| tile.rescales_lazily());
    let cases = pairs(pairs(lazy, [8, 16, 40]), [0.3, 1.1, 2.3, 5.7, 100.3]);
    in_turn(cases, 1, [Dtype::F16, Dtype::Bf16]).into_par_iter().for_each(
        |(((tile, keys_of_a_plateau), step), dtype)| {
            let case = Case::normal("plateaus", problem(dtype, 400, Mask::None), 4);
            let Values { mut q, mut k, v, dout, qv, sink } = case.values();
            q.fill(0.0);
            q.index_axis_mut(Axis(3), 0).fill(1.0);
            for (key, mut row) in k.axis_iter_mut(Axis(1)).enumerate() {
                row.fill(rounded(dtype, step * ((399 - key) / keys_of_a_plateau) as f32));
            }
            let v = v.mapv(|v| rounded(dtype, 1.0 + v / 4.0));
            let values = Values { q, k, v, dout, qv, sink };
            let checked = check(&case, &values, tile, Policy::Eager, Mode::Exact);
            assert!(checked.is_ok(), "steps of {step}, {dtype}: {checked:?}");
        },
    );
}

/// Scores that grow slowly over many blocks. No block outweighs the blocks before it, but together they leave the range
/// of f16.
#[test]
fn slow_growth_does_not_overflow() {
    pairs(tiles(), [16.0, 32.0, 64.0]).into_par_iter().for_each(|(tile, keys_of_a_unit)| {
        let case = Case::normal("slow growth", problem(Dtype::F16, 700, Mask::None), 4);
        let values = growing(case.values(), 1.0 / keys_of_a_unit);
        let checked = check(&case, &values, tile, Policy::Eager, Mode::Exact);
        assert!(checked.is_ok(), "1 in {keys_of_a_unit} keys: {checked:?}");
    });
}

/// The bits of a row do not depend on the rows beside it. Here rows without growth lie beside rows whose sums are
/// multiplied and whose P is multiplied or computed again.
#[test]
fn rows_do_not_depend_on_their_neighbours() {
    let types = [Dtype::F16, Dtype::Bf16];
    pairs(pairs(tiles(), types), [1.0 / 64.0, 2.0]).into_par_iter().for_each(|((tile, dtype), growth)| {
        let case = Case::normal("neighbours", problem(dtype, KEYS, Mask::None), 4);
        let launch = launch(&case.problem, &with_tile(tile)).unwrap();
        let all = growing(case.values(), growth);
        let mut some = all.clone();
        for mut row in some.q.axis_iter_mut(Axis(1)).step_by(3) {
            row.index_axis_mut(Axis(2), 0).fill(128.0);
        }
        let [all, some] =
            [all, some].map(|values| launch.simulate(&values, Policy::Eager, Mode::Fast).unwrap());
        let mut differ = 0;
        for row in 0..70 {
            let same = all.o.index_axis(Axis(1), row) == some.o.index_axis(Axis(1), row)
                && all.lse.index_axis(Axis(2), row) == some.lse.index_axis(Axis(2), row);
            assert!(same || row % 3 == 0, "growth {growth}, row {row} of {}", launch.plan);
            differ += usize::from(!same);
        }
        assert!(differ > 20, "{differ} rows differ");
    });
}
