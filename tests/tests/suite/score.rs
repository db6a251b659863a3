//! Functions of scores: their text, their derivatives, and attention with them.

use fa3_sched::forward::PlanOptions;
use fa3_sim::{Mode, Policy};
use fa3_tests::bwd::{BwdCase, Form};
use fa3_tests::fwd::{Launch, Layout, dense, device, judged};
use fa3_tests::{Case, strategies};
use fa3_types::{Dtype, Dual, HostReal, KnownProblem, ProblemSpec, ScoreFunction, ScoreValue, Shape};
use proptest::prelude::*;

/// A problem of 5 keys with the function.
fn problem(function: &ScoreFunction) -> KnownProblem {
    let shape = Shape { batch: 2, seqlen: 4, heads: 2, head_dim: 8 };
    let spec = ProblemSpec::dense(Dtype::F32, shape, Shape { seqlen: 5, ..shape });
    spec.known().unwrap().with_score(function)
}

/// The function's value at a sequence, a head, a row and a key.
fn value<R: HostReal>(problem: &KnownProblem, [sequence, head, row, key]: [usize; 4], score: R) -> R {
    problem.score_row([sequence, head, row]).unwrap().at(score, key)
}

fn places() -> impl Strategy<Value = [usize; 4]> {
    (0..2usize, 0..2usize, 0..4usize, 0..5usize)
        .prop_map(|(sequence, head, row, key)| [sequence, head, row, key])
}

proptest! {
    #![proptest_config(strategies::config(500))]

    #[test]
    fn the_text_of_a_function_is_the_function(function in strategies::score_function()) {
        let text = function.expr().to_string();
        let numbers = function.numbers().iter().enumerate().map(|(i, &x)| (format!("x{i}"), x.into()));
        let tables = function.tables().iter().enumerate().map(|(i, table)| (format!("t{i}"), table.clone().into()));
        let values: Vec<(String, ScoreValue)> = numbers.chain(tables).collect();
        let values = values.iter().map(|(name, value)| (name.as_str(), value.clone()));
        prop_assert_eq!(ScoreFunction::parse(&text, values), Ok(function));
    }

    #[test]
    fn the_slope_of_a_function_is_its_derivative(
        function in strategies::score_function(),
        place in places(),
        score in -4.0..4.0f64,
    ) {
        let problem = problem(&function);
        let value = |score| value(&problem, place, score);
        let Dual { value: of_dual, slope } = crate::score::value(&problem, place, Dual { value: score, slope: 1.0 });
        prop_assert_eq!(of_dual.to_bits(), value(score).to_bits());
        let step = f64::powi(2.0, -17);
        let [below, above] = [score - step, score + step].map(value);
        if of_dual == f64::NEG_INFINITY {
            prop_assert_eq!([below, above], [of_dual; 2]);
            return Ok(());
        }
        // A kink may lie between the two.
        let [left, right] = [of_dual - below, above - of_dual].map(|difference| difference / step);
        prop_assume!((left - right).abs() < 1e-3);
        prop_assert!((slope - (left + right) / 2.0).abs() < 1e-6 * slope.abs().max(1.0), "{slope}, {left}, {right}");
    }
}

proptest! {
    #![proptest_config(strategies::config(40))]

    /// Forward kernels, and backward kernels of each form.
    #[test]
    fn kernels_compute_random_functions(
        function in strategies::score_function(),
        form in proptest::sample::select(Form::ALL.to_vec()),
        seed in any::<u64>(),
    ) {
        let problem = dense(Dtype::Bf16, 1, (70, 90), (2, 1), 64).causal().known().unwrap();
        let case = Case::normal(&function.expr().to_string(), problem.with_score(&function), seed);
        let (values, policy) = (case.values(), Policy::Random(seed));
        let launch = Launch::new(&case.problem, &device(2), &PlanOptions::default()).unwrap();
        let answer = launch.simulate(&values, policy, Mode::Exact).map_err(|fault| fault.to_string());
        let forward = answer.and_then(|answer| judged(&case, &values, &answer).map_err(|fault| fault.to_string()));
        prop_assert!(forward.is_ok(), "{}: {}", case.name, forward.unwrap_err());
        let options = form.options([64; 2], &device(2)).expect("64 columns have each form");
        let gradients = BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.125 };
        let trial = gradients.trial(&device(2), &options);
        let backward = trial.simulate(policy, Mode::Exact).and_then(|after| trial.check(&after));
        prop_assert!(backward.is_ok(), "{}", backward.unwrap_err());
    }
}
