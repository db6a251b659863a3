//! Gradients through functions of scores: a covering array of functions and kernel features.

use fa3_sched::backward::PlanOptions;
use fa3_types::{Dtype, KnownProblem, Lengths, Mask, ProblemSpec, SequenceRows, Sequences};

use super::BwdCase;
use super::equivalent::{BIAS, DQ, KEYS, LINES, TABLE_BY_HEAD, TABLE_BY_QUERY};
use super::trials::{BOUNDS, DIVISIONS, DTYPES, Divided, HEADS, MASKS, SINKS, SOFTCAPS, tiles, tiny};
use crate::fwd::functions::{FUNCTIONS, function};
use crate::fwd::listed::{self, GIVEN, LAYOUTS, LENGTHS, few_of_many};
use crate::fwd::{Layout, dense, device};
use crate::intervals::{Kind, under};
use crate::mutate::Target;
use crate::strategies::learned;
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// A function whose derivative is NaN where it hides keys.
const OF_NAN: &str = "if k > q then -inf else s * sqrt(q - k)";

/// Functions of which every table that is not read by query and key has a gradient. Indices lead beyond tables, reads
/// share a table, and some derivatives are not finite.
const LEARNED: [&str; 4] = [
    "slope[0] * tanh(s / slope[0]) + column[h, q] * near[b - k]",
    "if q - k > 40 && k != 3 then -inf else s * near[row // 3] + sqrt(abs(slope[b + 1])) - near[h]",
    "slope[b] * (2 * k - q * 3 + 1) / 64 + s * near[max(min(q - k, 20), -5)] - column[h, k - 7] * near[abs(k - row)]",
    "if q - k > 40 then -inf else s + near[q - k] + near[k] + slope[h] * (k - q)",
];

/// Functions with tables that are read by query and key, which have gradients. Axes have any order, the heads of the
/// first table are none or several of the scores', and the last function has gradients that the dQ kernel sums, too.
const BIASED: [&str; 3] = [
    "s + bias[h // 2, row, k]",
    "x * tanh((s * whole[b, h, row, k + 2] + column[k, row]) / x)",
    "if q - k > 40 && k != 3 then -inf else s * bias[k + 1, 2, row + 3] + slope[h] * (k - q)",
];

/// The functions of forward kernels, and one more.
fn texts() -> Vec<&'static str> {
    FUNCTIONS.into_iter().chain([OF_NAN]).collect()
}

/// The covering arrays of dense sequences and of sequences whose lengths are data.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let texts = texts();
    let dense = covering_cases(|levels| of_features(&texts, levels, seed)).into_iter();
    let dense = dense.chain(covering_cases(|levels| of_tables(levels, seed)));
    let dense = dense.chain(covering_cases(|levels| of_biases(levels, seed)));
    let empty = ((0, 0), (1, 2, 1), DTYPES[0]);
    let empty = biased((BIASED[0], seed), ((Mask::None, None), None), empty, DIVISIONS[3], 2);
    let dense = dense.chain([empty]);
    dense.chain(covering_cases(|levels| of_sequences(levels, seed))).collect()
}

/// Gradients of tables.
fn of_tables(levels: &mut Levels, seed: u64) -> Trial {
    let (text, given) = (levels.pick(&LEARNED), levels.pick(&[None, Some(GIVEN[0]), Some(GIVEN[1])]));
    let (dq, mask) = (levels.pick(&[(64, 48), (128, 16)]), levels.pick(&MASKS[..3]));
    let (heads, softcap) = (levels.pick(&[(2, 1), (3, 3)]), levels.pick(&SOFTCAPS));
    let lengths = levels.pick(&[(90, 70), (40, 137)]);
    let options = tiles(DIVISIONS[0], (2, [2, 1]), dq, 16, [64, 64]);
    let change = |spec: ProblemSpec| {
        let mut spec = spec.mask(mask);
        spec.softcap = softcap;
        spec
    };
    let (problem, layout) = match given {
        None => (
            change(dense(DTYPES[1], 2, lengths, heads, 64)).known().expect("it is valid"),
            Layout::Contiguous,
        ),
        Some(given) => {
            let lengths = [lengths, (0, 9), (30, 17)];
            // A wrong hint about the longest sequence changes no result.
            let hint = Sequences::packed(lengths.len()).longest(20);
            let (spec, [rows_q, rows_k]) = listed::spec(given, DTYPES[1], heads, 64, &lengths);
            let problem = change(spec).seqs_q(hint).seqs_k(hint).validate();
            let problem = problem.and_then(|problem| KnownProblem::new(problem, rows_q, rows_k));
            (problem.expect("it is valid"), given.layout(Layout::Contiguous))
        }
    };
    let case = case(text, problem, seed);
    let problem =
        case.problem.clone().with_score(&learned(&function(text), Lengths { q: lengths.0, k: lengths.1 }));
    BwdCase { case: Case { problem, ..case }, layout, dlse: true, slack: 1.0 }.trial(&device(3), &options)
}

/// Gradients of tables that are read by query and key. Their kernel has one tile.
fn of_biases(levels: &mut Levels, seed: u64) -> Trial {
    let (text, lengths) = (levels.pick(&BIASED), levels.pick(&[(1, 150), (147, 9), (40, 60)]));
    let kinds = [(MASKS[0], None), (MASKS[2], None), (MASKS[1], Some(Kind::SinkAndWindow))];
    let (mask, kind) = levels.pick(&kinds);
    let (batch, heads_q, heads_kv) = levels.pick(&[(2, 1, 1), (1, 2, 1)]);
    let (softcap, dtype) = (levels.pick(&SOFTCAPS), levels.pick(&DTYPES));
    let (division, sms) = (levels.pick(&[DIVISIONS[0], DIVISIONS[3]]), levels.pick(&[1, 100]));
    let division = if text == BIASED[2] { DIVISIONS[0] } else { division };
    let heads = (batch, heads_q, heads_kv);
    biased((text, seed), ((mask, kind), softcap), (lengths, heads, dtype), division, sms)
}

/// A trial of gradients of tables that are read by query and key.
fn biased(
    (text, seed): (&str, u64),
    ((mask, kind), softcap): ((Mask, Option<Kind>), Option<f64>),
    (lengths, (batch, heads_q, heads_kv), dtype): ((usize, usize), (usize, usize, usize), Dtype),
    division: Divided,
    sms: u32,
) -> Trial {
    let mut spec = dense(dtype, batch, lengths, (heads_q, heads_kv), 24).head_dim_v(32).mask(mask);
    spec.softcap = softcap;
    let rows = [lengths.0, lengths.1].map(|rows| SequenceRows::dense(batch, rows));
    let problem = under(kind, spec, rows, (false, true));
    let function = learned(&function(text), Lengths { q: lengths.0, k: lengths.1 });
    let case = Case { problem: problem.clone().with_score(&function), ..case(text, problem, seed) };
    let options = tiles(division, (2, [2, 1]), (64, 16), 16, [32, 32]);
    BwdCase { case, layout: Layout::Contiguous, dlse: true, slack: 1.0 }.trial(&device(sms), &options)
}

/// A trial with several tiles and heads of a table in one CTA.
fn biased_small(sms: u32) -> Trial {
    let of = ((130, 20), (1, 3, 1), DTYPES[1]);
    biased((BIASED[0], 4), ((Mask::Causal, None), None), of, DIVISIONS[5], sms)
}

fn of_features(texts: &[&str], levels: &mut Levels, seed: u64) -> Trial {
    // The order of dQ additions is no matter of the function.
    let (text, division) = (levels.pick(texts), levels.pick(&DIVISIONS[..5]));
    let rows = levels.pick(&[16, 48]);
    // Rows of a dQ tile, and keys of its blocks.
    let dq = levels.pick(&[(64, 48), (128, 16)]);
    let (mask, softcap) = (levels.pick(&BOUNDS), levels.pick(&SOFTCAPS));
    let (dtype, (batch, heads_q, heads_kv)) = (levels.pick(&DTYPES), levels.pick(&HEADS));
    let (layout, sink) = (levels.pick(&Layout::ALL), levels.pick(&SINKS));
    let lengths = levels.pick(&[(1, 150), (147, 9), (137, 200), (180, 60)]);
    let (dlse, sms) = (levels.pick(&[false, true]), levels.pick(&[2, 100]));
    let options = tiles(division, (2, [2, 1]), dq, rows, [64, 64]);
    let mut spec = layout.of(dense(dtype, batch, lengths, (heads_q, heads_kv), 64).mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    let case = case(text, spec.known().expect("all levels are valid"), seed);
    BwdCase { case, layout, dlse, slack: 1.0 }.trial(&device(sms), &options)
}

/// Sequences whose lengths are data. Code that they share with dense ones is covered there.
fn of_sequences(levels: &mut Levels, seed: u64) -> Trial {
    let (text, given) = (levels.pick(&[FUNCTIONS[0], FUNCTIONS[2], OF_NAN]), levels.pick(&GIVEN));
    let division = levels.pick(&[DIVISIONS[1], DIVISIONS[2], DIVISIONS[3], DIVISIONS[6]]);
    let (lengths, (_, heads_q, heads_kv)) = (levels.pick(&LENGTHS)(64, 64), levels.pick(&HEADS));
    let heads = few_of_many((heads_q, heads_kv), &lengths);
    let (layout, mask) = (given.layout(levels.pick(&LAYOUTS)), levels.pick(&[MASKS[1], MASKS[2]]));
    let options = tiles(division, (2, [2, 1]), (64, 48), 16, [64, 64]);
    let change = |spec: ProblemSpec| layout.of(spec).mask(mask);
    let case = case(text, listed::problem(given, DTYPES[1], heads, 64, &lengths, change), seed);
    let of_gradients = given.layout(Layout::Contiguous);
    BwdCase { case, layout: of_gradients, dlse: true, slack: 1.0 }.trial(&device(3), &options)
}

fn case(text: &str, problem: KnownProblem, seed: u64) -> Case {
    let problem = problem.with_score(&function(text));
    Case { name: text.to_owned(), problem, dist: Dist::Normal, poison: Poison::BeyondEnd, seed }
}

/// Several tiles and blocks, with each consumer that evaluates functions.
pub(super) fn small() -> Vec<Trial> {
    let of = |(division, text)| {
        let (tiny, options) = tiny(division, [2, 2, 1], Mask::Causal, (200, 150), (2, 1));
        trial(text, (tiny, options), 2)
    };
    let divisions = [1, 2, 4, 6].map(|index| DIVISIONS[index]);
    let learning = LEARNED.iter().step_by(2).map(|text| learning(text, (90, 120)));
    let texts = [FUNCTIONS[1], FUNCTIONS[2], FUNCTIONS[0], FUNCTIONS[4]];
    divisions.into_iter().zip(texts).map(of).chain(learning).chain([biased_small(2)]).collect()
}

/// A trial of a small case with gradients of tables.
fn learning(text: &str, lengths: (usize, usize)) -> Trial {
    let (tiny, options) = tiny(DIVISIONS[0], [2, 2, 1], Mask::Causal, lengths, (2, 1));
    let lens = Lengths { q: lengths.0, k: lengths.1 };
    let problem = tiny.case.problem.clone().with_score(&learned(&function(text), lens));
    let case = Case { problem, ..case(text, tiny.case.problem.clone(), 4) };
    BwdCase { case, ..tiny }.trial(&device(2), &options)
}

/// A trial of a small case with a function.
fn trial(text: &str, (tiny, options): (BwdCase, PlanOptions), sms: u32) -> Trial {
    let case = case(text, tiny.case.problem.clone(), 4);
    BwdCase { case, ..tiny }.trial(&device(sms), &options)
}

/// The kernels that evaluate functions, on the problems of the targets without functions.
pub(super) fn targets() -> Vec<Target> {
    let trials = |(text, division, mask, heads), lengths: &[(usize, usize)]| -> Vec<Trial> {
        let of = |&lengths| trial(text, tiny(division, [2, 2, 1], mask, lengths, heads), 1);
        lengths.iter().map(of).collect()
    };
    let keys = trials((FUNCTIONS[1], DIVISIONS[1], Mask::None, (1, 1)), &[(44, 300), (10, 520)]);
    let dq = trials((FUNCTIONS[0], DIVISIONS[0], Mask::Causal, (2, 1)), &[(90, 60), (70, 110), (20, 10)]);
    let [of_tables, of_diagonals] =
        [0, 2].map(|text| [(128, 60), (81, 110)].map(|x| learning(LEARNED[text], x)));
    vec![
        Target::of_step("bwd dkv, function", &keys, 1, KEYS),
        Target::of_step("bwd dq, function", &dq, 2, DQ),
        Target::of_step("bwd lines, keys", &of_tables, 3, LINES),
        Target::of_step("bwd lines, diagonals", &of_diagonals, 3, LINES),
        Target::of_step("bwd dtable by head", &of_tables, 4, TABLE_BY_HEAD).with_bounds(),
        Target::of_step("bwd dtable by query", &of_tables, 5, TABLE_BY_QUERY).with_bounds(),
        Target::of_step("bwd bias", &[biased_small(1)], 2, BIAS),
    ]
}
