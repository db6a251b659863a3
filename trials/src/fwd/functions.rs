//! Problems with functions of scores: a covering array of functions and kernel features.

use fa3_sched::forward::{CtaTile, Pipeline, PlanOptions, SplitKeys};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, ScoreFunction, ScoreTable, ScoreValue};

use super::listed::{self, GIVEN, LAYOUTS};
use super::shapes::{PIPELINES, TINY};
use super::trials::{BOUNDS, CONSUMERS, HEADS, LENGTHS, MASKS, SINKS, SOFTCAPS, trial};
use super::{Layout, dense, with_tile};
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Functions whose nodes have one value in a tile, a row, a column or a score; that read tables of one to three axes
/// within and beyond their ends; that hide keys; and that have every operation. The last one does not read scores.
pub(crate) const FUNCTIONS: [&str; 7] = [
    "s + slope[h] * (k - q)",
    "if q - k > 40 && !(k == 3 || k * 3 == 2 * row) then -inf else x * tanh(s / x) + near[min(abs(q - k), 99)]",
    "s * exp2(-abs(s)) + bias[h, row, k] - log2(1 + k)",
    "max(min(s, row / 8 - 3), -x) + floor(q / 16 + s * 0) + column[b, k - 7]",
    "s + near[-1 - max(k, 3)] / (x + abs(s)) * sqrt(1 + abs(h - b))",
    "if s <= near[3] then s * s / 4 else near[row] - s / 0.5",
    "slope[b] * (2 * k - q * 3 + 1) / 64",
];

/// A function of a text, with the values of its names.
pub(crate) fn function(text: &str) -> ScoreFunction {
    let table = |extents: &[usize]| {
        let count: usize = extents.iter().product();
        let elements: Vec<f32> = (0..count).map(|i| (i * 37 % 11) as f32 / 8.0 - 0.5).collect();
        ScoreValue::from(ScoreTable::new(extents, elements).expect("there are as many elements"))
    };
    let slopes = ScoreTable::new(&[3], [0.5, 0.125, 0.25]).expect("there are three");
    let values = [
        ("x", 3.5.into()),
        ("slope", slopes.into()),
        ("near", table(&[30])),
        ("bias", table(&[2, 50, 70])),
        ("column", table(&[2, 40])),
        ("whole", table(&[2, 2, 4, 5])),
    ];
    ScoreFunction::parse(text, values).expect("the text is valid")
}

/// The covering arrays of dense sequences, of sequences whose lengths are data, and of split keys.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering_cases(|levels| of_features(levels, seed)).into_iter();
    let of_sequences = covering_cases(|levels| of_sequences(levels, seed));
    features.chain(of_sequences).chain(covering_cases(|levels| of_splits(levels, seed))).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (text, (consumers, ping_pong)) = (levels.pick(&FUNCTIONS), levels.pick(&CONSUMERS));
    let (lengths, pipeline) = (levels.pick(&LENGTHS), levels.pick(&PIPELINES));
    let (mask, tile_n) = (levels.pick(&BOUNDS), levels.pick(&[16, 48]));
    let (softcap, dtype) = (levels.pick(&SOFTCAPS), levels.pick(&[Dtype::F16, Dtype::Bf16]));
    let ((batch, heads_q, heads_kv), sink) = (levels.pick(&HEADS), levels.pick(&SINKS));
    let layout = levels.pick(&Layout::ALL);
    let tile_m = 64 * consumers;
    let tile = CtaTile { tile_m, tile_n, consumers, pipeline, ping_pong, ..TINY };
    let (seqlen_q, seqlen_k) = lengths(tile_m as usize, tile_n as usize);
    // Problems of more than four heads need only one tile of rows per head.
    let seqlen_q = if heads_q > 4 { seqlen_q.min(tile_m as usize - 1) } else { seqlen_q };
    let spec = dense(dtype, batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), 64);
    let mut spec = layout.of(spec.mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    of(text, spec.known().expect("all levels are valid"), seed, &with_tile(tile))
}

/// Sequences whose lengths are data. Code that they share with dense ones is covered there.
fn of_sequences(levels: &mut Levels, seed: u64) -> Trial {
    let (text, given) = (levels.pick(&FUNCTIONS[..3]), levels.pick(&GIVEN));
    let tile = levels.pick(&[TINY, CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY }]);
    let lengths = levels.pick(&listed::LENGTHS)(tile.tile_m as usize, tile.tile_n as usize);
    let heads = listed::few_of_many(levels.pick(&[(1, 1), (3, 1), (4, 2)]), &lengths);
    let (layout, mask) = (levels.pick(&LAYOUTS), levels.pick(&[MASKS[1], MASKS[2]]));
    let change = |spec: ProblemSpec| given.layout(layout).of(spec).mask(mask);
    let problem = listed::problem(given, Dtype::Bf16, heads, 64, &lengths, change);
    of(text, problem, seed, &with_tile(tile))
}

/// Few rows over many keys, whose tiles have rows of several heads.
fn of_splits(levels: &mut Levels, seed: u64) -> Trial {
    let (text, rows) = (levels.pick(&FUNCTIONS), levels.pick(&[1, 5]));
    let (mask, heads) = (levels.pick(&[Mask::None, Mask::Causal]), levels.pick(&[(6, 2), (3, 3)]));
    let splits = levels.pick(&[SplitKeys::Even, SplitKeys::FixedSize { keys: 128 }]);
    let problem = dense(Dtype::Bf16, 2, (rows, 300), heads, 64).mask(mask).known();
    let options = PlanOptions::default().split_keys(splits);
    of(text, problem.expect("all levels are valid"), seed, &options)
}

fn of(text: &str, problem: KnownProblem, seed: u64, options: &PlanOptions) -> Trial {
    let problem = problem.with_score(&function(text));
    let case = Case { name: text.to_owned(), problem, dist: Dist::Normal, poison: Poison::BeyondEnd, seed };
    trial(case, 3, options)
}

/// Two tiles with several blocks.
pub(super) fn small() -> Vec<Trial> {
    let pipelines = [(Pipeline::Paired, FUNCTIONS[0]), (Pipeline::TwoStage, FUNCTIONS[1])];
    let trials = pipelines.into_iter().map(|(pipeline, text)| {
        let problem = dense(Dtype::Bf16, 1, (69, 100), (2, 1), 64).causal().known();
        of(text, problem.expect("it is valid"), 4, &with_tile(CtaTile { pipeline, ..TINY }))
    });
    trials.collect()
}
