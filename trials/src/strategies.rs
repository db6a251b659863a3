//! Proptest strategies for random cases.

use std::num::NonZeroU32;

use fa3_sched::forward::Fp8Inputs;
use fa3_types::{
    Chunk, Dtype, Intervals, IntervalsOfRow, KnownProblem, Lengths, LineAxis, Mask, ProblemSpec, ReadBy,
    ScoreError, ScoreFunction, ScoreGradients, ScoreTable, ScoreValue, SequenceRows, Shape, TensorDesc,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::fwd::shapes::INPUTS;
use crate::fwd::{Layout, with_qv};
use crate::reshape::extent;
use crate::{Case, Dist, Poison};

/// Configuration for `cases` random cases. Every run has the same cases unless another seed is set (see
/// CONTRIBUTING.md), because a suite that sometimes fails by chance is not trusted.
pub fn config(cases: u32) -> ProptestConfig {
    ProptestConfig::with_cases(cases)
}

/// The value of a strategy that a seed selects.
///
/// # Panics
/// If the strategy rejects too many values.
pub fn seeded<S: Strategy>(strategy: S, seed: u64) -> S::Value {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config(1), rng);
    strategy.new_tree(&mut runner).expect("it rejects few values").current()
}

/// Any mask; windows and chunks up to `reach`.
pub fn mask(reach: u32) -> impl Strategy<Value = Mask> {
    let side = option::of(0..reach);
    let window = prop_oneof![
        Just(Mask::None),
        Just(Mask::Causal),
        (side.clone(), side).prop_map(|(left, right)| Mask::Window { left, right }),
    ];
    (window, option::weighted(0.3, 1..=reach)).prop_map(|(window, keys)| {
        let Some(keys) = keys.and_then(NonZeroU32::new) else { return window };
        let (left, right) = window.reach();
        Mask::Chunk { chunk: Chunk { keys, transposed: false }, left, right }
    })
}

/// Any dtype.
pub fn dtype() -> impl Strategy<Value = Dtype> {
    select(Dtype::OF_Q.to_vec())
}

/// Any distribution.
pub fn dist() -> impl Strategy<Value = Dist> {
    select(Dist::ALL.to_vec())
}

/// (heads_q, heads_kv): MHA, GQA and MQA.
pub fn heads() -> impl Strategy<Value = (usize, usize)> {
    (1usize..4, 1usize..3).prop_map(|(group, heads_kv)| (group * heads_kv, heads_kv))
}

/// A head dimension up to 96. Half of the time it is any number, for code that supports rows of any length; otherwise
/// it is a multiple of 16.
fn head_dim() -> impl Strategy<Value = usize> {
    prop_oneof![(1usize..=6).prop_map(|units| 16 * units), 1usize..=96]
}

/// Sequences of Q and of K: each dense or packed, some empty, some with seqused, up to `longest` rows each.
fn sequences(longest: usize) -> impl Strategy<Value = (SequenceRows, SequenceRows)> {
    let one_side = move |batch: usize| {
        let packed = vec(0..=longest, batch).prop_map(|lens| SequenceRows::packed_lengths(&lens));
        let dense = (0..=longest).prop_map(move |seqlen| SequenceRows::dense(batch, seqlen));
        (prop_oneof![packed, dense], option::of(vec(0.0..=1.0f64, batch))).prop_map(use_part)
    };
    (1usize..4).prop_flat_map(move |batch| (one_side(batch), one_side(batch)))
}

/// Makes only a fraction of each sequence valid (seqused).
fn use_part((sequences, fractions): (SequenceRows, Option<Vec<f64>>)) -> SequenceRows {
    let Some(fractions) = fractions else { return sequences };
    let used: Vec<i32> = fractions
        .iter()
        .enumerate()
        .map(|(index, fraction)| (fraction * sequences.capacity(index) as f64).round() as i32)
        .collect();
    sequences.with_used(&used).expect("fractions are at most 1")
}

prop_compose! {
    /// Any valid problem with sequences up to 150 rows, so that tiles of 128 are crossed, and head dimensions up to 96,
    /// half of them multiples of 16.
    pub fn problem()(
        dtype in dtype(),
        (rows_q, rows_k) in sequences(150),
        (heads_q, heads_kv) in heads(),
        (head_dim, head_dim_v) in (head_dim(), head_dim()),
        mask in mask(200),
        softmax_scale in option::of(0.01..2.0f64),
        softcap in option::weighted(0.3, 0.5..20.0f64),
        spare_rows in 0usize..3,
    ) -> KnownProblem {
        let tensor = |dtype, sequences: &SequenceRows, heads, head_dim| {
            let (batch, rows) = extent(sequences);
            let seqlen = rows + if sequences.is_packed() { spare_rows } else { 0 };
            TensorDesc::contiguous(dtype, Shape { batch, seqlen, heads, head_dim })
        };
        let mut spec = ProblemSpec::new(
            tensor(dtype, &rows_q, heads_q, head_dim),
            tensor(dtype, &rows_k, heads_kv, head_dim),
            tensor(dtype, &rows_k, heads_kv, head_dim_v),
            tensor(dtype.default_output(), &rows_q, heads_q, head_dim_v),
        );
        spec = spec.mask(mask);
        (spec.softmax_scale, spec.softcap) = (softmax_scale, softcap);
        spec.with_rows(rows_q, rows_k).expect("the strategy makes valid problems")
    }
}

prop_compose! {
    /// A problem small enough for the simulator: dense, one or two heads, head_dim 64 or 128, up to 200 rows, in a
    /// dtype of the tensor cores.
    pub fn tiny_problem()(
        dtype in select(vec![Dtype::F16, Dtype::Bf16, Dtype::E4m3]),
        (seqlen_q, seqlen_k) in (1usize..=200, 1usize..=200),
        group in 1usize..=2,
        head_dim in select(vec![64usize, 128]),
        mask in mask(250),
        softcap in option::weighted(0.2, 1.0..20.0f64),
    ) -> KnownProblem {
        let q = Shape { batch: 1, seqlen: seqlen_q, heads: group, head_dim };
        let kv = Shape { seqlen: seqlen_k, heads: 1, ..q };
        let mut spec = ProblemSpec::dense(dtype, q, kv).mask(mask);
        spec.softcap = softcap;
        spec.known().expect("the strategy makes valid problems")
    }
}

prop_compose! {
    /// A forward problem small enough for the simulator: dense, in any layout, with all kinds of e4m3 inputs, head
    /// dimensions up to 128, up to 250 rows.
    pub fn dense_problem()(
        dtype in select(vec![Dtype::F16, Dtype::Bf16, Dtype::E4m3]),
        batch in 1usize..=2,
        (seqlen_q, seqlen_k) in (1usize..=250, 0usize..=250),
        (heads_q, heads_kv) in heads(),
        (head_dim, head_dim_v) in (1usize..=16, 1usize..=16),
        mask in mask(300),
        softmax_scale in option::of(0.01..2.0f64),
        softcap in option::weighted(0.3, 0.5..20.0f64),
        layout in select(Layout::ALL.to_vec()),
        inputs in select(INPUTS.to_vec()),
    ) -> KnownProblem {
        let [head_dim, head_dim_v] =
            [head_dim, head_dim_v].map(|dim: usize| (8 * dim).next_multiple_of(dtype.row_multiple()));
        let q = Shape { batch, seqlen: seqlen_q, heads: heads_q, head_dim };
        let kv = Shape { seqlen: seqlen_k, heads: heads_kv, ..q };
        let mut spec = ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v).mask(mask);
        (spec.softmax_scale, spec.softcap) = (softmax_scale, softcap);
        if dtype == Dtype::E4m3 {
            let Fp8Inputs { v_layout, block_scales, v_channels } = inputs;
            spec.v_layout = v_layout;
            spec = if block_scales { spec.block_scales(64) } else { spec };
            spec = if v_channels { spec.v_channels() } else { spec };
        }
        layout.of(spec).known().expect("the strategy makes valid problems")
    }
}

prop_compose! {
    /// A problem under an interval mask, and often under another mask, too, with sequences up to 300 rows, dense or
    /// packed. The intervals change after some rows: some rows or whole tiles see no key, others only distant keys.
    pub fn intervals_problem()(
        dtype in select(vec![Dtype::F32, Dtype::F16, Dtype::Bf16]),
        (rows_q, rows_k) in sequences(300),
        (heads_q, heads_kv) in heads(),
        (head_dim, head_dim_v) in (1usize..=20, 1usize..=20),
        of_row in select(vec![IntervalsOfRow::One, IntervalsOfRow::Two]),
        (per_sequence, per_head) in any::<(bool, bool)>(),
        softcap in option::weighted(0.3, 0.5..20.0f64),
        beside in option::weighted(0.6, mask(300)),
        runs in vec((1usize..120, vec(interval(300), 2)), 1..30),
    ) -> KnownProblem {
        let shape = |sequences: &SequenceRows, heads| {
            let (batch, seqlen) = extent(sequences);
            Shape { batch, seqlen, heads, head_dim }
        };
        let q = shape(&rows_q, heads_q);
        let mask = Mask::of_intervals(Intervals { of_row, per_sequence, per_head });
        let spec = ProblemSpec::dense(dtype, q, shape(&rows_k, heads_kv)).head_dim_v(head_dim_v).mask(mask);
        let spec = spec.mask(beside.unwrap_or_default());
        let mut spec = spec.seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences());
        spec.softcap = softcap;
        let problem = spec.validate().expect("the strategy makes valid problems");
        let form = problem.mask().intervals().expect("it has intervals");
        let [batch, heads, rows, bounds] = form.shape(q);
        let rows_of_runs = runs.iter().cycle().flat_map(|(rows, intervals)| {
            let intervals: Vec<i32> = intervals.iter().flatten().copied().take(bounds).collect();
            std::iter::repeat_n(intervals, *rows)
        });
        let bounds: Vec<i32> = rows_of_runs.take(batch * heads * rows).flatten().collect();
        KnownProblem::with_intervals(problem, rows_q, rows_k, bounds).expect("each row has its bounds")
    }
}

/// Bounds of an interval within `keys` keys. One interval in three is empty.
fn interval(keys: i32) -> impl Strategy<Value = [i32; 2]> {
    let bound = -5..keys + 5;
    (bound.clone(), bound, 0..3)
        .prop_map(|(a, b, kind)| if kind == 0 { [a, a] } else { [a.min(b), a.max(b)] })
}

/// A case of any of `problems` with any values. One case in four has sinks. Padding rows are always poisoned.
pub fn case(problems: impl Strategy<Value = KnownProblem>) -> impl Strategy<Value = Case> {
    (problems, dist(), any::<u64>()).prop_map(|(problem, dist, seed)| Case {
        name: "random".to_owned(),
        problem: if seed % 4 == 0 { with_sinks(&problem) } else { problem },
        dist,
        poison: Poison::BeyondEnd,
        seed,
    })
}

/// Adds `qv` to the problems, except e4m3 problems, which cannot have it.
///
/// # Panics
/// If head_dim + head_dim_v exceeds 576.
pub fn latent(problems: impl Strategy<Value = KnownProblem>) -> impl Strategy<Value = KnownProblem> {
    problems.prop_filter("e4m3 has no qv", |problem| problem.dtype() != Dtype::E4m3).prop_map(|problem| {
        let spec = with_qv(problem.spec());
        spec.with_rows(problem.rows_q().clone(), problem.rows_k().clone()).expect("head dimensions are small")
    })
}

/// A case with a function of scores.
pub fn scored(cases: impl Strategy<Value = Case>) -> impl Strategy<Value = Case> {
    (cases, score_function())
        .prop_map(|(case, function)| Case { problem: case.problem.with_score(&function), ..case })
}

/// Operands of functions of scores: `x` and `y` are numbers, `slope`, `near`, `bias` and `column` tables.
const OPERANDS: [&str; 14] = [
    "s",
    "s",
    "s",
    "x",
    "0.5",
    "slope[h] * (k - q)",
    "near[min(q - k, 9)]",
    "bias[h, row, k]",
    "column[b, k]",
    "max(q - k, 3) / (1 + row)",
    "floor(x + k / 4)",
    "near[(q - k) // 3 & 7 | 1]",
    "bias[h, int(8 * near[k]) % 3, (row ^ k) >> 1]",
    "sqrt(k)",
];

/// Operations of functions of scores on operands `A` and `B`. Values are bounded, and continuous in the score, because
/// arithmetic of f32 and of f64 may differ at a jump. The first have continuous slopes, too.
const OPERATIONS: [&str; 16] = [
    "A + B",
    "A - B",
    "-A",
    "A * tanh(B)",
    "x * A + y * B",
    "8 * tanh(A / 8)",
    "exp2(tanh(A))",
    "log2(1 + A * A)",
    "sqrt(1 + A * A)",
    "if q - k < 3 then A else B",
    "if q >= k && !(k == 2 || row != 1 * q) then A else B",
    "if h <= 1 then A else B",
    "A / (1 + abs(B))",
    "min(A, B)",
    "max(A, B)",
    "abs(A)",
];

/// Number of operations whose slopes are continuous.
const SMOOTH: usize = 12;

/// A function of a score, with values for its numbers and tables.
///
/// # Panics
/// Never: the texts are valid.
pub fn score_function() -> impl Strategy<Value = ScoreFunction> {
    function_of(&OPERATIONS)
}

/// A function whose slope is continuous in the score. Where a slope jumps, rounding the score may change gradients.
pub fn smooth_score_function() -> impl Strategy<Value = ScoreFunction> {
    function_of(&OPERATIONS[..SMOOTH])
}

/// A function that consists of these operations. One in four hides a key.
fn function_of(operations: &[&'static str]) -> impl Strategy<Value = ScoreFunction> {
    let operations = operations.to_vec();
    let text = select(OPERANDS.to_vec()).prop_map(str::to_owned).prop_recursive(4, 10, 2, move |operand| {
        (operand.clone(), operand, select(operations.clone())).prop_map(|(a, b, operation)| {
            operation.replace('A', &format!("({a})")).replace('B', &format!("({b})"))
        })
    });
    let text = (text, any::<[bool; 2]>()).prop_map(|(text, bits)| match bits {
        [true, true] => format!("if k != 3 then {text} else -inf"),
        _ => text,
    });
    (text, vec(-2.0f32..2.0, 40)).prop_filter_map("it has too many nodes", |(text, values)| {
        let table = |extents: &[usize]| {
            let elements = &values[..extents.iter().product()];
            ScoreValue::from(ScoreTable::new(extents, elements).expect("there are as many elements"))
        };
        let numbers = [("x", values[38].into()), ("y", values[39].into())];
        let tables = [("slope", &[3][..]), ("near", &[10]), ("bias", &[2, 3, 5]), ("column", &[2, 7])];
        let tables = tables.map(|(name, extents)| (name, table(extents)));
        match ScoreFunction::parse(&text, numbers.into_iter().chain(tables)) {
            Err(ScoreError::TooLarge { .. }) => None,
            function => Some(function.expect("the strategy makes valid texts")),
        }
    })
}

/// The function, of which every table has a gradient for which there are kernels. Tables that are read by query and key
/// grow until sequences of lengths `lens` read no index beyond their ends.
///
/// # Panics
/// Never.
pub fn learned(function: &ScoreFunction, lens: Lengths) -> ScoreFunction {
    let expr = function.expr();
    let reads = expr.table_reads(ScoreGradients::of([true; 8]));
    let numbers = function.numbers().iter().enumerate();
    let numbers = numbers.map(|(number, &x)| (format!("x{number}"), ScoreValue::from(x)));
    let tables = function.tables().iter().enumerate().map(|(table, x)| {
        let reads: Vec<ReadBy> =
            reads.iter().filter(|read| read.table == table).map(|read| read.by).collect();
        let is_summed = |by: &ReadBy| !matches!(by, ReadBy::QueryAndKey { .. } | ReadBy::Score);
        let learns = match *reads.as_slice() {
            [ReadBy::QueryAndKey { query, key }] => grown(x, [(query, lens.q), (key, lens.k)], lens),
            _ => reads.iter().all(is_summed).then(|| x.clone()),
        };
        let x = learns.map_or_else(|| x.clone(), ScoreTable::with_gradient);
        (format!("t{table}"), ScoreValue::from(x))
    });
    let values: Vec<_> = numbers.chain(tables).collect();
    let values = values.iter().map(|(name, value)| (name.as_str(), value.clone()));
    ScoreFunction::parse(&expr.to_string(), values).expect("it is the text of the expression")
}

/// The table, with room for the given number of queries and of keys along these axes. `None` if the first query or key
/// reads a negative index.
fn grown(table: &ScoreTable, axes: [(LineAxis, usize); 2], lens: Lengths) -> Option<ScoreTable> {
    let mut extents = table.extents().to_vec();
    for (axis, count) in axes {
        let end = usize::try_from(axis.first(lens)).ok()? + count;
        extents[axis.axis] = extents[axis.axis].max(end);
    }
    let elements = table.elements().iter().copied().cycle().take(extents.iter().product());
    Some(ScoreTable::new(&extents, elements.collect::<Vec<f32>>()).expect("there are as many elements"))
}

/// Adds sinks to the problem.
fn with_sinks(problem: &KnownProblem) -> KnownProblem {
    let (spec, rows_q, rows_k) = (problem.spec().sink(), problem.rows_q().clone(), problem.rows_k().clone());
    let known = match problem.intervals() {
        None => spec.with_rows(rows_q, rows_k),
        Some(intervals) => spec
            .validate()
            .and_then(|problem| KnownProblem::with_intervals(problem, rows_q, rows_k, intervals.bounds())),
    };
    known.expect("sinks are always valid")
}
