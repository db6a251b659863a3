//! The shipped backward kernels. A name such as `bwd/dkv/bf16/d128/128x64x3x2/causal/cap/dynamic` gives a tile by four
//! numbers: the rows of the tile itself, the rows of a block on the other side, and two numbers of pipeline stages. In
//! the dK/dV kernel the stages are for blocks, then for K and V; in the dQ kernel, for K, then for V.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, BiasTile, Division, DkvTile, DqTile, Plan, PlanOptions};
use fa3_types::{
    BackwardSpec, BlockSide, Dtype, Intervals, IntervalsOfRow, Mask, ProblemSpec, ScoreGradients, Sequences,
    Shape,
};

use super::Shipped;
use super::scored::{ALIBI, BIAS, CAP, score_form, score_word};
use crate::kernels::bwd::{BwdSpec, Cleared, PartSpec, QBlocksSpec, ReduceSpec, RowsForm, SequenceForm};

/// The kernels of plans for the usual head dimensions, with each way to compute dQ. Problems differ in type, mask, soft
/// cap and number of tiles; some have packed sequences, chunks, intervals or functions of scores. The dK/dV and dQ
/// kernels do not depend on sinks.
pub(super) fn backward() -> impl Iterator<Item = Shipped> {
    const NONE: Mask = Mask::None;
    const BOTH: Mask = Mask::Window { left: Some(7), right: Some(3) };
    let dims = [(64, 64), (128, 128), (192, 128), (256, 256)];
    let listed = [(Dtype::Bf16, Mask::Causal, None), (Dtype::F16, BOTH, Some(30.0))];
    let listed = listed.into_iter().flat_map(move |of| {
        [dims[0], dims[1], dims[3]].into_iter().map(move |dims| {
            let sequences = Sequences::packed(3);
            spec(dims, of, 1).seqs_q(sequences).seqs_k(sequences)
        })
    });
    let others = [(Dtype::Bf16, Some(30.0), 400), (Dtype::F16, None, 1), (Dtype::F16, Some(30.0), 400)];
    let equal = dims.into_iter().enumerate().flat_map(move |(number, dims)| {
        let masks = [NONE, Mask::Causal, BOTH].into_iter().zip(others.into_iter().cycle().skip(number));
        masks.flat_map(move |(mask, other)| {
            let settings = [(Dtype::Bf16, None, 400), other];
            settings.map(|(dtype, softcap, heads)| spec(dims, (dtype, mask, softcap), heads))
        })
    });
    let chunks =
        Mask::Causal.and(Mask::from_chunk(7).expect("it is a size")).expect("one of them has chunks");
    let in_chunks = spec((128, 128), (Dtype::Bf16, chunks, None), 400);
    let sequences = Sequences::packed(3);
    let in_chunks = [in_chunks.clone(), in_chunks.seqs_q(sequences).seqs_k(sequences)];
    let of_rows = [
        IntervalsOfRow::Two,
        IntervalsOfRow::Blocks { words: 3, side: BlockSide::Of128 },
        IntervalsOfRow::Blocks { words: 6, side: BlockSide::Of64 },
    ];
    let [intervals, blocks, small] = of_rows.map(|of_row| Mask::of_intervals(intervals(of_row)));
    let under = move |mask, dims: &[(usize, usize)]| -> Vec<ProblemSpec> {
        dims.iter().map(|&dims| spec(dims, (Dtype::Bf16, mask, None), 400)).collect()
    };
    let under_intervals = under(intervals, &[dims[0], dims[1], dims[3]]);
    let blocks = under(blocks, &dims[..2]);
    let blocks = [blocks[1].clone().causal()].into_iter().chain(blocks).chain(under(small, &dims[..2]));
    let packed = [under_intervals[1].clone(), under_intervals[2].clone()];
    let packed = packed.map(|spec| spec.seqs_q(sequences).seqs_k(sequences));
    let beside = [under_intervals[1].clone().causal(), packed[0].clone().mask(chunks)];
    let under_intervals = under_intervals.into_iter().chain(packed).chain(beside);
    let scored = [(dims[0], ALIBI), (dims[0], CAP), (dims[1], CAP), (dims[3], ALIBI)];
    let scored =
        scored.map(|(dims, text)| spec(dims, (Dtype::Bf16, Mask::Causal, None), 400).score(score_form(text)));
    let learned = [(dims[1], ALIBI), (dims[0], "s + slope[q - k]")].map(|(dims, text)| {
        let form = score_form(text).with_gradients(ScoreGradients::of([true]));
        spec(dims, (Dtype::Bf16, Mask::Causal, None), 400).score(form)
    });
    let biased = [dims[0], dims[1], dims[3]].into_iter().map(|dims| {
        let form = score_form(BIAS).with_gradients(ScoreGradients::of([true]));
        spec(dims, (Dtype::Bf16, Mask::Causal, None), 400).score(form)
    });
    let biased = biased.flat_map(kernels).filter(|spec| matches!(spec, BwdSpec::Bias(_)));
    let specs = equal
        .chain(listed)
        .chain(in_chunks)
        .chain(under_intervals)
        .chain(blocks)
        .chain(scored)
        .chain(learned)
        .flat_map(kernels)
        .chain(biased);
    let mut seen = std::collections::HashSet::new();
    specs
        .chain([SequenceForm::Dense, SequenceForm::Varlen].map(BwdSpec::Sink))
        .filter(move |spec| seen.insert(spec.clone()))
        .map(|spec| Shipped::new(name(&spec), spec))
}

/// A problem with `heads` heads.
fn spec(
    (head_dim, head_dim_v): (usize, usize),
    (dtype, mask, softcap): (Dtype, Mask, Option<f64>),
    heads: usize,
) -> ProblemSpec {
    let shape = Shape { batch: 1, seqlen: 100, heads, head_dim };
    let mut forward = ProblemSpec::dense(dtype, shape, shape).head_dim_v(head_dim_v).mask(mask);
    forward.softcap = softcap;
    forward
}

/// The kernels of a problem, with each way to compute dQ.
fn kernels(forward: ProblemSpec) -> Vec<BwdSpec> {
    let problem = BackwardSpec::contiguous(forward).validate().expect("shapes agree");
    let dims = [problem.forward().head_dim(), problem.forward().head_dim_v()].map(|dim| dim as u32);
    let limits = DeviceLimits::h100_sxm();
    let plan = |options| Plan::with(&problem, &limits, &options).expect("the head dimensions have tiles");
    let learns = problem.forward().score().is_some_and(|form| !form.summed_gradients().is_empty());
    let adding = match problem.forward().mask().intervals() {
        _ if learns => vec![],
        None => [AddOrder::Any, AddOrder::LastKeysFirst]
            .into_iter()
            .filter_map(|order| DkvTile::choose_adding(dims, order, &limits))
            .map(|tile| PlanOptions::default().dkv(tile))
            .collect(),
        Some(_) => vec![PlanOptions::default()],
    };
    let choose = match problem.forward().mask().intervals().and_then(Intervals::block_side) {
        None => DqTile::choose,
        Some(BlockSide::Of128) => DqTile::choose_even,
        Some(BlockSide::Of64) => DqTile::choose_own_lists,
    };
    let apart = choose(dims[0], dims[1], &limits).map(|tile| PlanOptions::default().dq(tile));
    let ways = apart.into_iter().chain(adding);
    ways.flat_map(|options| BwdSpec::of(&plan(options))).collect()
}

fn name(spec: &BwdSpec) -> String {
    match spec {
        BwdSpec::Stats(spec) => {
            let clears = match spec.cleared {
                Cleared::Nothing => "",
                Cleared::Sums(_) => "/clears-sums",
                Cleared::InOrder(_) => "/in-order",
            };
            let dims = match spec.cleared {
                Cleared::InOrder(head_dim) if head_dim != spec.head_dim_v => {
                    format!("{head_dim}-{}", spec.head_dim_v)
                }
                Cleared::Nothing | Cleared::Sums(_) | Cleared::InOrder(_) => spec.head_dim_v.to_string(),
            };
            let intervals =
                spec.intervals.map(|of_row| super::sides_word(Mask::of_intervals(intervals(of_row))));
            let intervals = intervals.map_or(String::new(), |word| format!("/{word}"));
            format!("bwd/stats/{}/d{dims}{clears}{}{intervals}", spec.elem, rows_word(spec.rows))
        }
        BwdSpec::QBlocks(QBlocksSpec { of_row, mask, tile: [tile_n, tile_m], .. }) => {
            let intervals = Mask::of_intervals(intervals(*of_row)).and(*mask).expect("one has intervals");
            format!("bwd/seeing/{tile_n}x{tile_m}/{}", super::sides_word(intervals))
        }
        BwdSpec::SplitTiles => "bwd/splits".to_owned(),
        BwdSpec::Reduce(ReduceSpec {
            elem, tile_n, cols_of_k: [cols, _], cols_of_v: [cols_v, _], ..
        }) => {
            format!("bwd/join/{elem}/{tile_n}x{cols}-{cols_v}")
        }
        BwdSpec::Round(spec) => {
            format!("bwd/round/{}/d{}{}", spec.elem, spec.head_dim, rows_word(spec.rows))
        }
        BwdSpec::Lines(spec) => {
            let listed = if spec.sequences == SequenceForm::Varlen { "/listed" } else { "" };
            let lines = if spec.are_diagonals { "diagonals" } else { "keys" };
            format!("bwd/lines/{lines}/{}x{}/{}{listed}", spec.keys, spec.count, spec.first)
        }
        BwdSpec::Bias(spec) => {
            let BiasTile { tile_n, qk_stages, dov_stages, .. } = spec.part.tile;
            let tile = format!("{}x{tile_n}x{qk_stages}x{dov_stages}", BiasTile::ROWS);
            named(&format!("bias/t{}", spec.table), &spec.part, &tile)
        }
        BwdSpec::Table(spec) => {
            let listed = if spec.sequences == SequenceForm::Varlen { "/listed" } else { "" };
            format!("bwd/dtable/t{}/{}{listed}", spec.table, score_word(&spec.score))
        }
        BwdSpec::Sink(SequenceForm::Dense) => "bwd/sink".to_owned(),
        BwdSpec::Sink(SequenceForm::Varlen) => "bwd/sink/listed".to_owned(),
        BwdSpec::Dkv(spec) => {
            let DkvTile { tile_n, kv_stages, tile_m, stages, division, adds_dq, .. } = spec.tile;
            let divided = if division == Division::Gradients { "/divided" } else { "" };
            let adds = match adds_dq {
                None => "",
                Some(AddOrder::Any) => "/adds-dq",
                Some(AddOrder::LastKeysFirst) => "/adds-dq-in-order",
            };
            format!(
                "{}{divided}{adds}",
                named("dkv", spec, &format!("{tile_n}x{tile_m}x{stages}x{kv_stages}"))
            )
        }
        BwdSpec::Dq(spec) => {
            let DqTile { tile_m, tile_n, k_stages, v_stages, .. } = spec.tile;
            named("dq", spec, &format!("{tile_m}x{tile_n}x{k_stages}x{v_stages}"))
        }
    }
}

fn intervals(of_row: IntervalsOfRow) -> Intervals {
    Intervals { of_row, per_sequence: false, per_head: false }
}

fn rows_word(rows: RowsForm) -> String {
    match rows {
        RowsForm::Dense => String::new(),
        RowsForm::Varlen { parts, mask: Mask::None } => format!("/listed{parts}"),
        RowsForm::Varlen { parts, mask } => format!("/listed{parts}/{}", super::sides_word(mask)),
    }
}

fn named<T>(kernel: &str, spec: &PartSpec<T>, tile: &str) -> String {
    let PartSpec {
        elem,
        head_dim,
        head_dim_v,
        mask,
        softcap,
        ref score,
        gradients,
        scheduler,
        sequences,
        ..
    } = *spec;
    let listed = if sequences == SequenceForm::Varlen { "/listed" } else { "" };
    let dims = if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}-{head_dim_v}") };
    let learned = (!gradients.is_empty()).then(|| "dtables".to_owned());
    let of_scores = [softcap.then(|| "cap".to_owned()), score.as_ref().map(score_word), learned];
    let of_scores: String = of_scores.into_iter().flatten().map(|word| format!("/{word}")).collect();
    format!(
        "bwd/{kernel}/{elem}/d{dims}/{tile}/{}{of_scores}/{}{listed}",
        super::sides_word(mask),
        super::scheduler_word(scheduler)
    )
}
