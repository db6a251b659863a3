//! Relations between two calls that hold for any correct results. If both calls use the same tile, the results are
//! equal bit for bit.

use fa3_ref::Forward;
use fa3_tests::reshape::{alone, dense_like, rows};
use fa3_tests::strategies::{self, config};
use fa3_tests::{Case, Dist, Engine, Judge, NoAnswer, Poison, Scaled, Values, engines, testdata};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec};
use ndarray::{Array4, ArrayView, Axis, Dimension, Zip};
use proptest::prelude::*;

const REPLAY: &str = "cargo test -p fa3-tests --test suite metamorphic::";

/// The engine's results on `values` as inputs of `problem`. `None` if it skips them.
fn run(engine: &dyn Engine, problem: &KnownProblem, values: &Values) -> Option<Forward<f32>> {
    match engine.forward(&Case::normal("random", problem.clone(), 0), values) {
        Ok(answer) => Some(answer),
        Err(NoAnswer::Skipped(_)) => None,
        Err(NoAnswer::Failed(error)) => panic!("{} failed on {problem}: {error}", engine.name()),
    }
}

/// Every engine. If an engine's tile depends on the case, it always takes the tile that it has for this problem.
fn engines_of_one_tile(problem: &KnownProblem) -> impl Iterator<Item = Box<dyn Engine>> {
    let case = Case::normal("random", problem.clone(), 0);
    engines().into_iter().map(move |engine| engine.with_tile_of(&case).unwrap_or(engine))
}

/// Asserts equality bit for bit, where all NaNs are equal.
fn assert_same<D: Dimension>(x: ArrayView<'_, f32, D>, y: ArrayView<'_, f32, D>, what: &str) {
    assert_eq!(x.shape(), y.shape(), "{what}");
    let same = Zip::from(x).and(y).all(|x, y| x.to_bits() == y.to_bits() || (x.is_nan() && y.is_nan()));
    assert!(same, "{what} is not the same");
}

fn assert_same_forward(x: &Forward<f32>, y: &Forward<f32>, engine: &dyn Engine) {
    assert_same(x.o.view(), y.o.view(), &format!("{}: o", engine.name()));
    assert_same(x.lse.view(), y.lse.view(), &format!("{}: lse", engine.name()));
}

/// Rearranges (batch, heads, seqlen) to (batch, seqlen, heads, 1).
fn lse_as_rows(x: &Forward<f32>) -> Array4<f32> {
    x.lse.view().permuted_axes([0, 2, 1]).insert_axis(Axis(3)).to_owned()
}

/// The problem with this specification and the same sequences.
fn like(problem: &KnownProblem, spec: ProblemSpec) -> KnownProblem {
    spec.with_rows(problem.rows_q().clone(), problem.rows_k().clone()).unwrap()
}

/// Repeats each head of K or V for every query head of its group.
fn repeat_heads(problem: &KnownProblem, x: &Array4<f32>) -> Array4<f32> {
    let kv_heads: Vec<usize> = (0..problem.heads().q()).map(|head| problem.heads().kv_head(head)).collect();
    x.select(Axis(2), &kv_heads)
}

/// Each query head of each sequence, if the problem has any.
fn heads(problem: &KnownProblem) -> impl Iterator<Item = (usize, usize)> {
    let heads = problem.heads().q();
    (0..problem.batch()).flat_map(move |index| (0..heads).map(move |head| (index, head)))
}

fn keys_between(x: &Array4<f32>, from: usize, to: usize) -> Array4<f32> {
    x.slice_axis(Axis(1), (from..to).into()).to_owned()
}

/// Combines O and LSE over two parts of the keys into O and LSE over all keys, in f64, as the split-KV reduction does.
fn merge(a: &Forward<f32>, b: &Forward<f32>) -> Forward<f32> {
    let mut merged = a.clone();
    let (lse_a, lse_b) = (lse_as_rows(a), lse_as_rows(b));
    for ((batch, row, head, d), o) in merged.o.indexed_iter_mut() {
        let at = [batch, row, head, 0];
        let weight_b = (f64::from(lse_b[at]) - f64::from(lse_a[at])).exp();
        let [a, b] = [a.o[[batch, row, head, d]], b.o[[batch, row, head, d]]].map(f64::from);
        *o = ((a + weight_b * b) / (1.0 + weight_b)) as f32;
    }
    Zip::from(&mut merged.lse).and(&b.lse).for_each(|a, &b| {
        let (x, y) = (f64::from(*a), f64::from(b));
        *a = (x.max(y) + (-(x - y).abs()).exp().ln_1p()) as f32;
    });
    merged
}

proptest! {
    #![proptest_config(config(30))]

    /// The problems are packed or dense, with or without seqused and GQA, with NaN in padding rows. Every head of every
    /// sequence has the same bits as in a problem of its own, so no row depends on another sequence or head.
    #[test]
    fn each_head_is_the_same_alone(case in strategies::case(strategies::problem())) {
        let (problem, values) = (&case.problem, case.values());
        for engine in engines_of_one_tile(problem) {
            let Some(whole) = run(&*engine, problem, &values) else { continue };
            let lse = lse_as_rows(&whole);
            for (index, head) in heads(problem) {
                let (part, part_values) = alone(problem, &values, index, head);
                let Some(part) = run(&*engine, &part, &part_values) else { continue };
                let what = format!("{}: head {head} of sequence {index}", engine.name());
                let rows = |x: &Array4<f32>| rows(x.view(), problem.rows_q(), index, head);
                assert_same(rows(&whole.o).view(), part.o.view(), &what);
                assert_same(rows(&lse).view(), lse_as_rows(&part).view(), &what);
            }
        }
    }

    #[test]
    fn a_problem_is_made_again_of_its_specification(
        problem in prop_oneof![
            strategies::problem(),
            strategies::dense_problem(),
            strategies::intervals_problem(),
            strategies::latent(strategies::tiny_problem()),
        ],
    ) {
        let again = problem.spec().validate();
        prop_assert_eq!(again.as_ref(), Ok(&*problem));
    }

    #[test]
    fn grouped_heads_are_the_same_as_repeated_ones(case in strategies::case(strategies::problem())) {
        let (problem, values) = (&case.problem, case.values());
        let [k, v] = [&values.k, &values.v].map(|x| repeat_heads(problem, x));
        let mut spec = problem.spec();
        (spec.k.shape.heads, spec.v.shape.heads) = (spec.q.shape.heads, spec.q.shape.heads);
        (spec.k.strides, spec.v.strides) = (spec.k.shape.contiguous_strides(), spec.v.shape.contiguous_strides());
        let (repeated, repeated_values) = (like(problem, spec), Values { k, v, ..values.clone() });
        for engine in engines_of_one_tile(problem) {
            let grouped = run(&*engine, problem, &values);
            let Some((grouped, repeated)) = grouped.zip(run(&*engine, &repeated, &repeated_values)) else { continue };
            assert_same_forward(&grouped, &repeated, &*engine);
        }
    }

    #[test]
    fn a_window_over_everything_is_the_same_as_no_mask(case in strategies::case(strategies::problem())) {
        let values = case.values();
        let [none, window] = [Mask::None, Mask::Window { left: Some(150), right: Some(150) }].map(|mask| {
            let mut spec = case.problem.spec();
            spec.mask = Ok(mask);
            like(&case.problem, spec)
        });
        for engine in engines_of_one_tile(&window) {
            let open = run(&*engine, &none, &values);
            let Some((open, wide)) = open.zip(run(&*engine, &window, &values)) else { continue };
            assert_same_forward(&open, &wide, &*engine);
        }
    }

    /// A factor of two is exact, with two exceptions. The smallest f16 numbers lose bits. And subnormal e4m3 numbers
    /// keep their exponent, by which the tensor core aligns products and truncates lower bits.
    #[test]
    fn twice_v_gives_twice_o(problem in strategies::problem(), seed in any::<u64>()) {
        prop_assume!(problem.dtype() != Dtype::F16);
        let mut values = Values::new(&problem, Dist::Normal, Poison::BeyondEnd, seed);
        if problem.dtype() == Dtype::E4m3 {
            let subnormal = Scaled::LARGEST * 2.0f32.powi(-6);
            values.v.mapv_inplace(|x| if x.abs() < subnormal { 0.0 } else { x });
        }
        let twice_values = Values { v: values.v.mapv(|x| 2.0 * x), ..values.clone() };
        for engine in engines() {
            let once = run(&*engine, &problem, &values);
            let Some((once, twice)) = once.zip(run(&*engine, &problem, &twice_values)) else { continue };
            let doubled = Forward { o: once.o.mapv(|x| 2.0 * x), lse: once.lse };
            assert_same_forward(&doubled, &twice, &*engine);
        }
    }

    #[test]
    fn the_order_of_keys_does_not_matter(case in strategies::case(strategies::problem())) {
        let mut spec = case.problem.spec();
        spec.mask = Ok(Mask::None);
        let problem = like(&case.problem, spec);
        let (index, head) = (problem.batch() - 1, problem.heads().q() - 1);
        let (problem, values) = alone(&problem, &case.values(), index, head);
        let mut backwards = values.clone();
        for x in [&mut backwards.k, &mut backwards.v] {
            x.invert_axis(Axis(1)); // of the strides; the facade takes no negative ones
            *x = x.as_standard_layout().into_owned();
        }
        let case = Case::normal("random", problem.clone(), 0);
        let judge = Judge::new(&case, &values);
        for engine in engines() {
            let Some(answer) = run(&*engine, &problem, &backwards) else { continue };
            let verdict = judge.forward(engine.arithmetic(&case), &answer, REPLAY);
            prop_assert!(verdict.is_ok(), "{}: {}", engine.name(), verdict.unwrap_err());
        }
    }

    /// Results over two parts of the keys, kept in f32, combine to the result over all keys.
    #[test]
    fn parts_of_the_keys_merge_to_the_whole(
        case in strategies::case(strategies::problem()),
        fraction in 0.0..=1.0f64,
    ) {
        prop_assume!(case.problem.dtype() == Dtype::F32);
        let mut spec = case.problem.spec();
        // There is no sink, because each part would count the whole sink.
        (spec.mask, spec.sink) = (Ok(Mask::None), false);
        let problem = like(&case.problem, spec);
        let values = Values { sink: None, ..case.values() };
        let (problem, values) = alone(&problem, &values, 0, 0);
        let keys = problem.lengths(0).k;
        prop_assume!(keys >= 2);
        let cut = 1 + (fraction * (keys - 2) as f64) as usize;
        let case = Case::normal("random", problem.clone(), 0);
        let judge = Judge::new(&case, &values);
        for engine in engines() {
            let part = |from, to| {
                let [k, v] = [&values.k, &values.v].map(|x| keys_between(x, from, to));
                let part = Values { k, v, ..values.clone() };
                run(&*engine, &dense_like(&problem, &part), &part)
            };
            let Some((a, b)) = part(0, cut).zip(part(cut, keys)) else { continue };
            let verdict = judge.forward(engine.arithmetic(&case), &merge(&a, &b), REPLAY);
            prop_assert!(verdict.is_ok(), "{} cut at {cut}: {}", engine.name(), verdict.unwrap_err());
        }
    }

    /// If a vector c is added to every key, every score of a row with query q grows by softmax_scale · q · c: O stays,
    /// and LSE grows by this term.
    #[test]
    fn a_vector_added_to_every_key_moves_lse_only(problem in strategies::problem(), seed in any::<u64>()) {
        prop_assume!(problem.dtype() == Dtype::F32 && problem.softcap().is_none());
        let (problem, mut values) =
            alone(&problem, &Values::new(&problem, Dist::Normal, Poison::None, seed), 0, 0);
        // K is rounded to a grid on which the sum is exact.
        values.k.mapv_inplace(|k| (64.0 * k).round() / 64.0);
        let moved_values = Values { k: values.k.mapv(|k| k + 0.5), ..values.clone() };
        let case = Case::normal("random", problem.clone(), 0);
        let judge = Judge::new(&case, &values);
        let scale = problem.softmax_scale().natural();
        for engine in engines() {
            let Some(mut answer) = run(&*engine, &problem, &moved_values) else { continue };
            for ((_, _, row), lse) in answer.lse.indexed_iter_mut() {
                let q = values.q.index_axis(Axis(1), row);
                let shift = 0.5 * scale * q.iter().map(|&q| f64::from(q)).sum::<f64>();
                *lse = (f64::from(*lse) - shift) as f32;
            }
            let verdict = judge.forward(engine.arithmetic(&case), &answer, REPLAY);
            prop_assert!(verdict.is_ok(), "{}: {}", engine.name(), verdict.unwrap_err());
        }
    }
}

/// Some engines skip cases with a NaN in V that some row does not see, because the NaN may reach this row. The NaN must
/// still reach O of every row that sees it, and LSE of no row.
#[test]
fn a_nan_in_v_reaches_every_row_that_sees_it() {
    let case =
        testdata::load("forward.toml").into_iter().find(|case| case.name == "nan-value-causal").unwrap();
    let (values, len) = (case.values(), case.problem.lengths(0));
    for engine in engines() {
        let Some(answer) = run(&*engine, &case.problem, &values) else { continue };
        assert!(answer.lse.iter().all(|lse| lse.is_finite()), "{}: lse", engine.name());
        for ((_, row, _, _), o) in answer.o.indexed_iter() {
            let sees = case.problem.mask().allows(row, 70, len);
            assert!(!sees || o.is_nan(), "{}: row {row} sees NaN and is {o}", engine.name());
        }
    }
}
