//! Problems whose lengths lie in device memory: packed sequences (varlen), and dense sequences with seqused.

use fa3_sched::forward::{CtaTile, Loads, PlanOptions};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, ScoreFunction, SequenceRows, Shape};

use super::intervals::OWN;
use super::shapes::{INPUTS, TINY, TINY_FP8, dtype, laid_out, others};
use super::trials::{BOUNDS, MASKS, SINKS, SOFTCAPS, trial};
use super::{Layout, with_qv, with_tile};
use crate::intervals::{Kind, under};
use crate::strategies::{self, score_function};
use crate::values::Rng;
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Lengths of the sequences of Q and of K, for a tile of m rows and n keys.
pub(crate) type Lengths = fn(usize, usize) -> Vec<(usize, usize)>;

/// One sequence and no sequence; lengths of 0 and around the tile sizes; many short sequences, most of them without
/// queries or keys, beside a long one; more rows than keys.
pub(crate) const LENGTHS: [Lengths; 5] = [
    |m, n| vec![(m + 9, 3 * n + 7)],
    |_, _| vec![],
    |m, n| vec![(m - 1, n), (0, 5), (m, n - 1), (m + 1, n + 1), (3, 0), (0, 0), (1, 1)],
    |m, n| {
        let short = |i: usize| [(1 + i % 3, 2 + i % 5), (0, 0), (0, 2 + i % 5), (0, 0)][i % 4];
        (0..33).map(|i| if i == 17 { (m + 3, n + 1) } else { short(i) }).collect()
    },
    |m, n| vec![(m + 30, 29), (5, 2 * n), (m + 30, n / 2)],
];

/// These numbers of query heads and of key/value heads, or few heads of many sequences: each head of each sequence has
/// a tile of its own.
pub(crate) fn few_of_many(heads: (usize, usize), lengths: &[(usize, usize)]) -> (usize, usize) {
    if lengths.len() > 8 { (2, 1) } else { heads }
}

/// How lengths are given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Given {
    /// `cu_seqlens` for Q and for K.
    Packed,
    /// `cu_seqlens` for both, with rows after the last sequence.
    Behind,
    /// `cu_seqlens` and `seqused` for both.
    PackedInPart,
    /// `seqused` for dense Q and dense K.
    InPart,
    /// `seqused` for dense K alone.
    KeysInPart,
    /// `cu_seqlens` for Q and `seqused` for dense K: chunked prefill over a cache.
    PackedOverDense,
}

impl Given {
    /// `layout`, or a layout that varlen supports: rows of interleaved sequences have no common stride.
    pub(crate) fn layout(self, layout: Layout) -> Layout {
        let is_dense = matches!(self, Given::InPart | Given::KeysInPart | Given::PackedOverDense);
        if is_dense && layout == Layout::Interleaved { Layout::Contiguous } else { layout }
    }
}

pub(crate) const GIVEN: [Given; 6] = [
    Given::Packed,
    Given::Behind,
    Given::PackedInPart,
    Given::InPart,
    Given::KeysInPart,
    Given::PackedOverDense,
];

pub(crate) const LAYOUTS: [Layout; 3] = [Layout::Contiguous, Layout::HeadsFirst, Layout::Interleaved];
const DISTS: [Dist; 2] = [Dist::Normal, Dist::Increasing];

/// Warp-specialized tiles, which varlen kernels need.
fn tiles() -> Vec<CtaTile> {
    let wide = CtaTile { head_dim: 128, head_dim_v: 64, ..TINY };
    let of_16_bits = others().into_iter().filter(|tile| tile.loads == Loads::Producer);
    // Shapes choose the rows of a block scale of Q by consumers: 128 rows with the tile `blocks`, and 64 with `two`.
    let blocks = CtaTile { tile_n: 64, ..TINY_FP8 }.of_inputs(INPUTS[2]);
    let two = CtaTile { consumers: 2, tile_m: 128, ..blocks };
    of_16_bits.step_by(3).chain([wide, TINY_FP8, blocks, two]).collect()
}

/// The covering array: each pair of levels of two factors occurs in some case.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    let tiles = tiles();
    covering_cases(|levels| of_features(&tiles, levels, seed))
}

fn of_features(tiles: &[CtaTile], levels: &mut Levels, seed: u64) -> Trial {
    let (tile, mask, given) = (levels.pick(tiles), levels.pick(&BOUNDS), levels.pick(&GIVEN));
    let lengths = levels.pick(&LENGTHS)(tile.tile_m as usize, tile.tile_n as usize);
    let heads = few_of_many(levels.pick(&[(1, 1), (3, 1), (4, 2), (3, 3)]), &lengths);
    let (layout, softcap) = (levels.pick(&LAYOUTS), levels.pick(&SOFTCAPS));
    let of_16_bits = levels.pick(&[Dtype::F16, Dtype::Bf16]);
    let (dist, sink) = (levels.pick(&DISTS), levels.pick(&SINKS));
    let dtype = if tile.precision.is_fp8() { Dtype::E4m3 } else { of_16_bits };
    // A problem without sequences that has rows of e4m3 is refused.
    let is_refused = dtype == Dtype::E4m3 && lengths.is_empty();
    let given = if is_refused && given == Given::Behind { Given::Packed } else { given };
    let layout = given.layout(layout);
    let change = |spec: ProblemSpec| {
        let spec = laid_out(&tile, spec.head_dim_v(tile.head_dim_v as usize));
        let mut spec = layout.of(spec).mask(mask);
        (spec.softcap, spec.sink) = (softcap, sink);
        spec
    };
    let problem = problem(given, dtype, heads, tile.head_dim as usize, &lengths, change);
    let name = format!("{given:?}, {layout:?}, {dist:?}");
    let case = Case { name, problem, dist, poison: Poison::BeyondEnd, seed };
    trial(case, 3, &with_tile(tile))
}

/// A random problem with the tile sizes that the planner chooses. Seeds that are equal modulo `kernels` share their
/// kernels, so that many problems need few of them.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random_packed(seed: u64, kernels: u64) -> Trial {
    packed(seed, kernels, |_| None)
}

/// A random problem with a random function of the scores. `seed` is used as in [`random_packed`].
///
/// # Panics
/// If the planner refuses the problem.
pub fn random_function(seed: u64, kernels: u64) -> Trial {
    packed(seed, kernels, |seed| Some(strategies::seeded(score_function(), seed)))
}

/// A random problem, with the function that `function` makes of the number of its kernels.
fn packed(seed: u64, kernels: u64, function: fn(u64) -> Option<ScoreFunction>) -> Trial {
    let function = function(seed % kernels);
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0xf3d), Rng::new(seed ^ 0xf3d << 32));
    let dims: [(usize, usize); 7] =
        [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (128, 64)];
    // These head dimensions are for 16-bit problems only. The last two have `qv`.
    let wide = [(512, 512), (320, 384), (64, 512), (40, 256)];
    let dtypes = [Dtype::F16, Dtype::Bf16, if function.is_none() { Dtype::E4m3 } else { Dtype::Bf16 }];
    let (dim, dtype) = (of_kernel.below(11), dtypes[of_kernel.below(3)]);
    let (mut head_dim, mut head_dim_v) = dims[dim % 7];
    if dtype == Dtype::E4m3 {
        (head_dim, head_dim_v) = (head_dim.next_multiple_of(16), head_dim_v.next_multiple_of(16));
    } else if dim >= 7 {
        (head_dim, head_dim_v) = wide[dim - 7];
    }
    let has_qv = dim >= 9 && dtype != Dtype::E4m3 && function.is_none();
    let block_rows = [None, Some(64), Some(128)][of_kernel.below(3)].filter(|_| dtype == Dtype::E4m3);
    let (mask, given) = (MASKS[of_kernel.below(MASKS.len() as u64)], GIVEN[of_kernel.below(6)]);
    let softcap = SOFTCAPS[of_kernel.below(SOFTCAPS.len() as u64)];
    let has_intervals = of_kernel.below(2) == 0 && !has_qv && dtype != Dtype::E4m3;
    // Neither functions of scores nor gradients support trees.
    let kinds = if function.is_none() { &Kind::ALL[..] } else { Kind::WITH_GRADIENTS };
    let kind = has_intervals.then(|| kinds[of_kernel.below(kinds.len() as u64)]);
    let (heads_kv, group) = (1 + rng.below(3), 1 + rng.below(3));
    let any = |rng: &mut Rng| 1 + rng.below(400);
    let lengths = random_lengths(&mut rng, any);
    let layout = given.layout(LAYOUTS[rng.below(3)]);
    let change = |spec: ProblemSpec| {
        let spec = spec.head_dim_v(head_dim_v);
        let spec = if has_qv { with_qv(spec) } else { spec };
        let mut spec = layout.of(spec).mask(mask);
        if let Some(rows) = block_rows {
            spec = spec.block_scales(rows);
        }
        spec.softcap = softcap;
        spec
    };
    let (spec, rows) = spec(given, dtype, (heads_kv * group, heads_kv), head_dim, &lengths);
    let problem = under(kind, change(spec), rows, OWN[rng.below(3)]);
    let problem = match &function {
        None => problem,
        Some(function) => problem.with_score(function),
    };
    // If every block has a new row maximum, one e4m3 problem in 200 exceeds the error law's bound by a tenth.
    let dist = if dtype == Dtype::E4m3 { Dist::Normal } else { DISTS[rng.below(2)] };
    let case =
        Case { name: format!("random {seed}, {dist:?}"), problem, dist, poison: Poison::BeyondEnd, seed };
    trial(case, 132, &PlanOptions::default())
}

/// Rows of Q and of K of up to nine sequences, some of them short or empty. Another sequence, at a random index, has
/// the lengths that `one` gives.
pub(crate) fn random_lengths(rng: &mut Rng, one: impl Fn(&mut Rng) -> usize) -> Vec<(usize, usize)> {
    const MOST: u64 = 250;
    let any = |rng: &mut Rng| {
        let most = 1 + rng.below(MOST);
        rng.below(most as u64)
    };
    let mut lengths = vec![(one(rng), one(rng))];
    lengths.extend((0..rng.below(9)).map(|_| (any(rng), any(rng))));
    let at = rng.below(lengths.len() as u64);
    lengths.swap(0, at);
    lengths
}

/// Problems with several tiles per CTA, to run under many schedules.
pub(super) fn small() -> Vec<Trial> {
    let masks = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let cases = tiles().into_iter().enumerate().map(|(index, tile)| {
        let lengths = LENGTHS[2 + index % 3](tile.tile_m as usize, tile.tile_n as usize);
        let lengths = &lengths[..lengths.len().min(8)];
        let mask = masks[index % 3];
        let change =
            |spec: ProblemSpec| laid_out(&tile, spec.head_dim_v(tile.head_dim_v as usize)).mask(mask);
        let given = GIVEN[index % GIVEN.len()];
        let problem = problem(given, dtype(&tile), (2, 1), tile.head_dim as usize, lengths, change);
        let case = Case {
            name: format!("small, {given:?}"),
            problem,
            dist: Dist::Normal,
            poison: Poison::BeyondEnd,
            seed: 4,
        };
        trial(case, 3, &with_tile(tile))
    });
    cases.collect()
}

/// The problem with sequences of these lengths.
pub(crate) fn problem(
    given: Given,
    dtype: Dtype,
    heads: (usize, usize),
    head_dim: usize,
    lengths: &[(usize, usize)],
    change: impl Fn(ProblemSpec) -> ProblemSpec,
) -> KnownProblem {
    let (spec, [rows_q, rows_k]) = spec(given, dtype, heads, head_dim, lengths);
    change(spec).with_rows(rows_q, rows_k).expect("all levels are valid")
}

/// The specification of a problem, and the rows of its sequences of these lengths.
pub(crate) fn spec(
    given: Given,
    dtype: Dtype,
    heads: (usize, usize),
    head_dim: usize,
    lengths: &[(usize, usize)],
) -> (ProblemSpec, [SequenceRows; 2]) {
    let (of_q, of_k): (Vec<usize>, Vec<usize>) = lengths.iter().copied().unzip();
    let rows_q = match given {
        Given::Packed | Given::Behind | Given::PackedOverDense => SequenceRows::packed_lengths(&of_q),
        Given::PackedInPart => in_part(SequenceRows::packed_lengths(&more(&of_q)), &of_q),
        Given::InPart => in_part(SequenceRows::dense(of_q.len(), longest(&of_q) + 3), &of_q),
        Given::KeysInPart => SequenceRows::dense(of_q.len(), longest(&of_q)),
    };
    let rows_k = match given {
        Given::Packed | Given::Behind => SequenceRows::packed_lengths(&of_k),
        Given::PackedInPart => in_part(SequenceRows::packed_lengths(&more(&of_k)), &of_k),
        Given::InPart | Given::KeysInPart | Given::PackedOverDense => {
            in_part(SequenceRows::dense(of_k.len(), longest(&of_k) + 5), &of_k)
        }
    };
    let behind = if given == Given::Behind { (70, 9) } else { (0, 0) };
    let shape = |rows: &SequenceRows, behind, heads| {
        let batch = if rows.is_packed() { 1 } else { rows.count() };
        Shape { batch, seqlen: rows.end() + behind, heads, head_dim }
    };
    let spec =
        ProblemSpec::dense(dtype, shape(&rows_q, behind.0, heads.0), shape(&rows_k, behind.1, heads.1));
    (spec.seqs_q(rows_q.sequences()).seqs_k(rows_k.sequences()), [rows_q, rows_k])
}

/// Capacities that exceed these lengths by some rows.
fn more(lengths: &[usize]) -> Vec<usize> {
    lengths.iter().enumerate().map(|(index, len)| len + index % 4).collect()
}

fn in_part(rows: SequenceRows, used: &[usize]) -> SequenceRows {
    let used: Vec<i32> = used.iter().map(|&len| len as i32).collect();
    rows.with_used(&used).expect("no sequence uses more rows than it has")
}

fn longest(lengths: &[usize]) -> usize {
    lengths.iter().copied().max().unwrap_or(0)
}
