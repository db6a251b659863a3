//! The inputs of a case are reproducible, representable in its dtype, and distributed as specified.

use fa3_tests::fwd::rounded;
use fa3_tests::{Dist, Poison, Values, pairs};
use fa3_types::{Dtype, KnownProblem, ProblemSpec, SequenceRows, Shape};
use ndarray::{ArrayView2, Axis};

fn problem(dtype: Dtype) -> KnownProblem {
    let shape = Shape { batch: 2, seqlen: 100, heads: 2, head_dim: 64 };
    let rows = SequenceRows::dense(2, 100);
    let used = rows.clone().with_used(&[97, 0]).unwrap();
    ProblemSpec::dense(dtype, shape, shape).with_rows(rows, used).unwrap()
}

/// Whether a number is representable in `dtype`.
fn is_of(dtype: Dtype, x: f32) -> bool {
    dtype == Dtype::F32 || rounded(dtype, x) == x
}

#[test]
fn values_are_reproducible_and_representable() {
    for (dtype, dist) in pairs(Dtype::OF_Q, Dist::ALL) {
        let values = Values::new(&problem(dtype), dist, Poison::None, 7);
        assert_eq!(values, Values::new(&problem(dtype), dist, Poison::None, 7), "{dtype} {dist:?}");
        for x in [&values.q, &values.k, &values.v] {
            assert!(
                x.iter().all(|&x| x.is_finite() && is_of(dtype, x)),
                "{dtype} {dist:?} is not representable"
            );
        }
    }
}

#[test]
fn normal_numbers_have_mean_0_and_variance_1() {
    let x = Values::new(&problem(Dtype::F32), Dist::Normal, Poison::None, 1).q;
    let (count, moment) = (x.len() as f32, |power| x.iter().map(|x| x.powi(power)).sum::<f32>());
    let (mean, variance) = (moment(1) / count, moment(2) / count);
    // There are 25,600 numbers, so the standard deviations of the mean and of the variance are 0.006 and 0.009.
    assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.04, "{mean} {variance}");
}

#[test]
fn denormals_are_subnormal_and_not_all_zero() {
    for (dtype, normal) in [(Dtype::F32, -126), (Dtype::F16, -14), (Dtype::Bf16, -126), (Dtype::E4m3, -6)] {
        let x = Values::new(&problem(dtype), Dist::Denormals, Poison::None, 1).q;
        let tiny = x.iter().filter(|x| f64::from(x.abs()) < f64::powi(2.0, normal)).count();
        assert!(tiny > x.len() * 9 / 10 && x.iter().any(|&x| x != 0.0), "{dtype}: {tiny}");
    }
}

#[test]
fn poison_lies_where_it_should() {
    let values = Values::new(&problem(Dtype::F16), Dist::Normal, Poison::BeyondEnd, 1);
    let bad = |row: ArrayView2<'_, f32>| row.iter().all(|x| !x.is_finite());
    for (batch, row) in pairs(0..2, 0..100) {
        let unused = batch == 1 || row >= 97;
        let row_of_v = values.v.index_axis(Axis(0), batch).index_axis_move(Axis(0), row);
        assert_eq!(bad(row_of_v), unused, "{batch} {row}");
    }
    assert!(values.q.iter().all(|x| x.is_finite()));
    let values = Values::new(&problem(Dtype::F16), Dist::Normal, Poison::KeyRow(3), 1);
    assert_eq!(values.k.iter().filter(|x| x.is_nan()).count(), 2 * 64, "sequence 1 has no row 3 in use");
}
