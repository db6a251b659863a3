//! Functions of scores: their text, their derivatives, and attention with them.

use fa3::Device;
use fa3_ref::{OutputGradients, oracle};
use fa3_sched::backward::{self, BiasError, DqBy, PlanError};
use fa3_sched::forward::PlanOptions;
use fa3_sim::{Mode, Policy};
use fa3_tests::bwd::{BwdCase, Form};
use fa3_tests::fwd::{Launch, Layout, dense, device, judged};
use fa3_tests::{Case, facade, strategies};
use fa3_types::{
    BackwardSpec, BlockSide, Dtype, Dual, HostReal, Intervals, IntervalsOfRow, KnownProblem, Lengths, Mask,
    ProblemSpec, ScoreFunction, ScoreTable, ScoreValue, Sequences, Shape,
};
use ndarray::Array3;
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
    #![proptest_config(strategies::config(25))]

    /// Forward kernels, and backward kernels of each form. The one with a dQ kernel has gradients of tables.
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
        let problem = match form {
            Form::DqKernel => case.problem.clone().with_score(&strategies::learned(&function, Lengths { q: 70, k: 90 })),
            Form::AnyOrder | Form::OrderOfKeys => case.problem.clone(),
        };
        let case = Case { problem, ..case };
        let gradients = BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.125 };
        let trial = gradients.trial(&device(2), &options);
        let backward = trial.simulate(policy, Mode::Exact).and_then(|after| trial.check(&after));
        prop_assert!(backward.is_ok(), "{}", backward.unwrap_err());
    }
}

/// Tables of each class, inside and outside of a product and of a function of the score, and one that hides keys.
const OF_TABLES: &str = "if k == 2 then -inf else 2.0 * tanh((s + slope[h] * (k - q) + pair[h, row, k]) * 0.5) \
                         + far[q - k] * slope[h] + of_key[k] + fixed[h]";

fn of_tables(moved: Option<(usize, usize, f32)>) -> ScoreFunction {
    let tables =
        [("slope", &[2][..]), ("pair", &[2, 6, 9]), ("far", &[4]), ("of_key", &[9]), ("fixed", &[2])];
    let values = tables.into_iter().enumerate().map(|(table, (name, extents))| {
        let elements: usize = extents.iter().product();
        let mut x: Vec<f32> = (0..elements).map(|place| ((7 * table + 3 * place) as f32).sin()).collect();
        if let Some((_, place, step)) = moved.filter(|(of, ..)| *of == table) {
            x[place] += step;
        }
        let x = ScoreTable::new(extents, x).unwrap();
        (name, ScoreValue::from(if name == "fixed" { x } else { x.with_gradient() }))
    });
    ScoreFunction::parse(OF_TABLES, values).unwrap()
}

/// The oracle's gradients of tables are differences, and the CPU engine's obey the error law.
#[test]
fn gradients_of_tables_are_differences() {
    let shape = Shape { batch: 2, seqlen: 6, heads: 2, head_dim: 8 };
    let spec = ProblemSpec::dense(Dtype::F32, shape, Shape { seqlen: 9, heads: 1, ..shape }).causal();
    let problem = spec.known().unwrap().with_score(&of_tables(None));
    let case = Case::normal("tables", problem, 7);
    facade::check(&case, &Device::Cpu).unwrap();
    let (values, problem) = (case.values(), &case.problem);
    let dlse = Array3::from_shape_fn(problem.lse_shape(), |(b, h, i)| ((7 * b + 5 * h + 3 * i) as f32).sin());
    let output = OutputGradients { dout: values.dout.view(), dlse: Some(dlse.view()) };
    let gradients = oracle::backward(&values.inputs(problem), output).unwrap();
    let tables = of_tables(None).tables().len();
    assert_eq!(gradients.dtables.iter().filter(|x| !x.is_empty()).count() + 1, tables);
    let phi = |moved: (usize, usize, f32)| {
        let problem = problem.clone().with_score(&of_tables(Some(moved)));
        let forward = oracle::forward(&values.inputs(&problem));
        (&forward.o * &values.dout.mapv(f64::from)).sum() + (&forward.lse * &dlse.mapv(f64::from)).sum()
    };
    // The names' order, and the order of the expression's tables.
    let of_names = [2, 108, 4, 9];
    for (named, elements) in of_names.into_iter().enumerate() {
        let found = gradients.dtables.iter().find(|x| x.len() == elements).unwrap();
        for (place, &found) in found.iter().enumerate() {
            let step = 1.0 / 1024.0;
            let difference = (phi((named, place, step)) - phi((named, place, -step))) * 512.0;
            assert!(
                (found - difference).abs() < 2e-3 * difference.abs().max(1.0),
                "{named} {place}: {found} {difference}"
            );
        }
    }
}

#[test]
fn kernels_refuse_gradients_of_tables() {
    let shape = Shape { batch: 1, seqlen: 64, heads: 2, head_dim: 64 };
    let blocks = IntervalsOfRow::Blocks { words: 1, side: BlockSide::Of128 };
    let blocks = Mask::of_intervals(Intervals { of_row: blocks, per_sequence: false, per_head: false });
    let bias = ScoreTable::new(&[80, 80], [0.0; 6400]).unwrap().with_gradient();
    let planned = |text: &str, keys: usize, change: fn(ProblemSpec) -> ProblemSpec, mask: Mask| {
        let function = ScoreFunction::parse(text, [("bias", bias.clone().into())]).unwrap();
        let spec = ProblemSpec::dense(Dtype::Bf16, shape, Shape { seqlen: keys, ..shape });
        let spec = change(spec.score(function.form().clone()).mask(mask));
        let problem = BackwardSpec::contiguous(spec).validate().unwrap();
        match backward::Plan::new(&problem, &device(1)) {
            Ok(plan) => Ok(plan.bias().is_some() && matches!(plan.dq(), DqBy::AdditionsInOrder)),
            Err(error) => {
                assert!(error.is_cpu_only());
                let PlanError::TableGradient { table: 0, why } = error else { panic!("{error}") };
                Err(why)
            }
        }
    };
    let dense = |spec| spec;
    let packed = |spec: ProblemSpec| spec.seqs_q(Sequences::packed(2)).seqs_k(Sequences::packed(2));
    let plan = |text, keys| planned(text, keys, dense, Mask::None);
    assert_eq!(plan("s + bias[k + 3, 2 + (row + 1)]", 77), Ok(true));
    assert_eq!(plan("s + bias[q, k]", 80), Ok(true));
    for text in ["s + bias[q - k, k]", "s + bias[2 * q, k]", "s + bias[if s > 0 then q else k, 0]"] {
        assert_eq!(plan(text, 64), Err(BiasError::Indices), "{text}");
    }
    assert_eq!(plan("s + bias[q, k] + bias[k, q]", 64), Err(BiasError::ReadTwice));
    let beyond = |axis, first, last| Err(BiasError::Beyond { axis, first, last, extent: 80 });
    assert_eq!(plan("s + bias[q, k]", 81), beyond(0, 17, 80));
    assert_eq!(plan("s + bias[q, k]", 63), beyond(0, -1, 62));
    assert_eq!(plan("s + bias[row, k - 1]", 64), beyond(1, -1, 62));
    assert_eq!(planned("s + bias[q, k]", 64, packed, Mask::None), Err(BiasError::Packed));
    assert_eq!(planned("s + bias[q, k]", 64, dense, blocks), Err(BiasError::Blocks));
    let of_key = ScoreTable::new(&[9], [0.0; 9]).unwrap().with_gradient();
    let of_key = ScoreFunction::parse("s + of_key[k]", [("of_key", of_key.into())]).unwrap();
    let plan = |seqlen, options: backward::PlanOptions| {
        let shape = Shape { batch: 64, seqlen, heads: 16, head_dim: 64 };
        let spec = ProblemSpec::dense(Dtype::Bf16, shape, shape).score(of_key.form().clone());
        let problem = BackwardSpec::contiguous(spec).validate().unwrap();
        backward::Plan::with(&problem, &device(1), &options).map(|_| ())
    };
    let adding = Form::AnyOrder.options([64; 2], &device(1)).unwrap();
    assert_eq!(plan(64, adding).unwrap_err(), PlanError::TablesWhereAdded);
    assert_eq!(plan(4096, backward::PlanOptions::default()), Ok(()));
    let error = plan(1 << 15, backward::PlanOptions::default()).unwrap_err();
    // A block has 128 keys, a tile 128 rows, and each sequence may have one tile more than its rows fill.
    let of_groups = (16 * (64 * ((1 << 15) + 128)) / 16) * (1 << 15);
    // And each head of a sequence has a sum for each row and key.
    let bytes = 4 * (of_groups + 64 * 16 * (2 << 15));
    assert_eq!(error, PlanError::LineSums { bytes, most: 8 << 30 });
}
