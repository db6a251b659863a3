//! Every engine on random cases, judged by the error law.

use fa3_ref::Precision;
use fa3_ref::law::BackwardLaw;
use fa3_tests::{Case, Dist, Judge, Ledger, engines, strategies};
use fa3_types::Dtype;
use proptest::prelude::*;

const REPLAY: &str = "cargo test -p fa3-tests --test suite properties::";

fn check_forward(case: &Case) {
    check_forward_of(case, |_| true);
}

/// Checks the engines whose names `is_checked` selects.
fn check_forward_of(case: &Case, is_checked: impl Fn(&str) -> bool) {
    let values = case.values();
    let judge = Judge::new(case, &values);
    let mut ledger = Ledger::default();
    for engine in engines().into_iter().filter(|engine| is_checked(&engine.name())) {
        ledger.enter(&engine.name(), case, engine.forward(case, &values), |answer| {
            judge.forward(engine.arithmetic(case), &answer, REPLAY)
        });
    }
    ledger.close();
}

fn check_backward(case: &Case) {
    check_backward_of(case, |_| true);
}

/// Checks the engines whose names `is_checked` selects.
fn check_backward_of(case: &Case, is_checked: impl Fn(&str) -> bool) {
    let values = case.values();
    let precision = Precision::of_output(case.problem.dtype());
    let law = BackwardLaw::new(&values.inputs(&case.problem), values.dout.view(), precision).unwrap();
    let mut ledger = Ledger::default();
    for engine in engines().into_iter().filter(|engine| is_checked(&engine.name())) {
        ledger
            .enter(&engine.name(), case, engine.backward(case, &values), |answer| law.check(&answer, REPLAY));
    }
    ledger.close();
}

proptest! {
    #![proptest_config(strategies::config(50))]

    #[test]
    fn forward(case in strategies::case(strategies::problem())) {
        check_forward(&case);
    }

    #[test]
    fn forward_on_tiny_problems(case in strategies::case(strategies::tiny_problem())) {
        check_forward(&case);
    }

    #[test]
    fn forward_of_latent_attention(case in strategies::case(strategies::latent(strategies::problem()))) {
        check_forward(&case);
    }

    #[test]
    fn backward(case in strategies::case(strategies::problem())) {
        // There is no FP8 backward pass, and the tiled engine has no meaningful results on e4m3 inputs.
        prop_assume!(case.problem.dtype() != Dtype::E4m3);
        // If a softmax is nearly one-hot, dP − D cancels. D is computed from the stored O, whose rounding may favour
        // the baseline by chance: 2 of 750 random cases exceed the law by up to a third.
        prop_assume!(!matches!(case.dist, Dist::Outliers | Dist::OneHot));
        check_backward(&case);
    }

    #[test]
    fn the_cpu_under_intervals(case in strategies::case(strategies::intervals_problem())) {
        check_forward_of(&case, |engine| engine == "cpu");
        if !matches!(case.dist, Dist::Outliers | Dist::OneHot) {
            check_backward_of(&case, |engine| engine == "cpu");
        }
    }
}

// Expressions are evaluated pair by pair, which makes a case dear.
proptest! {
    #![proptest_config(strategies::config(20))]

    #[test]
    fn with_a_function_of_scores(case in strategies::scored(strategies::case(strategies::problem()))) {
        prop_assume!(case.problem.dtype() != Dtype::E4m3);
        let computes = |engine: &str| engine == "cpu" || engine.starts_with("algorithm");
        check_forward_of(&case, |engine| computes(engine) || engine == "kernel, simulated");
        if !matches!(case.dist, Dist::Outliers | Dist::OneHot) {
            check_backward_of(&case, computes);
        }
    }
}
