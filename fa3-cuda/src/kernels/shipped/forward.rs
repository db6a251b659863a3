//! The shipped forward kernels. `fwd/bf16/d128/128x128x3/causal/cap/dynamic` names the element type, head dimension,
//! tile (rows x keys x stages), bounded sides of the mask, soft cap and scheduler. More words follow for everything
//! that differs from the tile table.

use std::collections::HashSet;

use fa3_ir::Elem;
use fa3_sched::combine::Team;
use fa3_sched::forward::{
    CtaTile, Fp8Inputs, Loads, Pipeline, Plan, PlanKind, PlanOptions, Precision, ReductionSource, SplitKeys,
};
use fa3_sched::{DeviceLimits, Order, Scheduler};
use fa3_types::{
    BlockSide, Dtype, Intervals, IntervalsOfRow, Mask, ProblemSpec, Sequences, Shape, TensorDesc, ValueLayout,
};

use super::chunks::chunks;
use super::e4m3_cache::e4m3_cache;
use super::fixed_size::fixed_size;
use super::lists::listed;
use super::packed::rows_word;
use super::scored::{score_word, scored};
use super::wide_cache::wide_cache;
use super::{Shipped, scheduler_word, sides_word};
use crate::kernels::fwd::{FwdCombineSpec, FwdSpec, SequenceForm, ShareForm};

/// A number of heads with which tiles outnumber a GPU's SMs.
pub(super) const MANY_HEADS: usize = 400;

pub(super) const SOFTCAP: f64 = 30.0;

/// Pairs of head dimensions: that of Q and K, then that of V.
const DIMS: [(usize, usize); 7] =
    [(64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
pub(super) const CACHE_DIMS: [(usize, usize); 6] =
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// Masks with no bounded side, with both, and with each side alone.
pub(super) const MASKS: [Mask; 5] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(256), right: Some(256) },
    Mask::Window { left: Some(256), right: None },
    Mask::Window { left: None, right: Some(256) },
];

/// The kernels of plans for problems of every head dimension that has a tile, and the kernels of the ablation.
pub(super) fn forward() -> impl Iterator<Item = Shipped> {
    let mut seen = HashSet::new();
    // They are collected: one iterator of all problems is larger than a thread's stack.
    let problems: [Vec<_>; 8] = [
        half().collect(),
        fp8().collect(),
        packed().collect(),
        sinks().collect(),
        wide().collect(),
        intervals().collect(),
        max_logits().collect(),
        scored().collect(),
    ];
    let specs = problems.into_iter().flatten();
    let specs = specs.map(|spec| planned(spec, PlanOptions::default())).chain(ablation());
    let specs = specs.chain(given().map(|spec| planned(spec, PlanOptions::default().given_table())));
    let specs = specs.chain(shared_plans().map(|plan| FwdSpec::of(&plan)));
    let specs = specs.filter(move |spec| seen.insert(spec.clone()));
    combines().chain(specs.map(|spec| Shipped::new(name(&spec), spec)))
}

/// Problems of lengths that select all tiles: in bf16 with many tiles under no mask, a causal one and one with a left
/// side. One of them is there a second time, with a soft cap, in f16 with few tiles, or both.
fn half() -> impl Iterator<Item = ProblemSpec> {
    let lengths = [(64, 4096), (128, 4096), (512, 512), (4096, 4096), (8192, 8192)];
    let tiles = DIMS.into_iter().flat_map(move |dims| lengths.map(|lengths| (dims, lengths)));
    let capped = Some(SOFTCAP);
    let others = [(Dtype::Bf16, MANY_HEADS, capped), (Dtype::F16, 1, None), (Dtype::F16, 1, capped)];
    tiles.enumerate().flat_map(move |(number, (dims, lengths))| {
        let masks = [Mask::None, Mask::Causal, MASKS[2 + number % 2]];
        let plain = masks.map(|mask| ((Dtype::Bf16, MANY_HEADS, None), mask));
        let second = (others[number % 3], masks[number / 3 % 3]);
        plain.into_iter().chain([second]).map(move |((dtype, heads, softcap), mask)| {
            let mut spec = problem(dtype, lengths, heads, dims.0).head_dim_v(dims.1).mask(mask);
            spec.softcap = softcap;
            spec
        })
    })
}

/// Problems in e4m3 of each head dimension, mask and length: one without and one with some of six features. In eight
/// such problems every two features meet in all four combinations: whether a problem has a feature is the parity of
/// some bits of the problem's number. Every head dimension meets all eight.
fn fp8() -> impl Iterator<Item = ProblemSpec> {
    let cells = [64, 128, 256].into_iter().flat_map(|head_dim| MASKS.map(|mask| (head_dim, mask)));
    let cells = cells.flat_map(|cell| [(512, 512), (512, 8192)].map(|lengths| (cell, lengths)));
    cells.enumerate().flat_map(|(cell, ((head_dim, mask), lengths))| {
        [0, 1 + cell % 7].map(|number| {
            let has = |bits: usize| (number & bits).count_ones() % 2 == 1;
            let heads = if has(1) { MANY_HEADS } else { 1 };
            let mut spec = problem(Dtype::E4m3, lengths, heads, head_dim).mask(mask);
            spec.softcap = has(2).then_some(SOFTCAP);
            spec.o.dtype = if has(4) { Dtype::F16 } else { Dtype::Bf16 };
            if has(3) {
                spec = spec.transposed_v();
            }
            if has(5) {
                spec = spec.block_scales(64);
            }
            if has(6) { spec.v_channels() } else { spec }
        })
    })
}

/// The kernels of the ablation, at head_dim 128 with the tile of the longest sequences: other pipelines, with fewer
/// keys where a pipeline needs more registers, and other orders of tiles.
fn ablation() -> impl Iterator<Item = FwdSpec> {
    let dense = || problem(Dtype::Bf16, (4096, 4096), MANY_HEADS, 128);
    let options = || PlanOptions::default().clusters(false).scheduler(Scheduler::StaticPersistent);
    let tile = planned(dense(), options()).tile;
    let two_stage = CtaTile { pipeline: Pipeline::TwoStage, ..tile };
    let tiles = [
        CtaTile { pipeline: Pipeline::Serial, ..tile },
        two_stage,
        CtaTile { pipeline: Pipeline::ThreeStage, tile_n: 48, ..tile },
        CtaTile { pipeline: Pipeline::Serial, ping_pong: false, ..tile },
        CtaTile { ping_pong: false, ..two_stage },
        CtaTile { loads: Loads::Consumers, ..two_stage },
    ];
    let pipelines = tiles.map(|tile| planned(dense(), options().tile(tile)));
    let fetched = options().scheduler(Scheduler::DynamicPersistent);
    let orders = [options(), options().order(Order::Linear), fetched.order(Order::Linear)];
    let orders = orders.map(|options| planned(dense().causal(), options.tile(tile)));
    pipelines.into_iter().chain(orders)
}

/// Problems of packed sequences: every head dimension with the tiles of short and of long sequences. Masks, types and
/// soft caps alternate, so that each meets many tiles. Problems of e4m3 have scales of heads first, then scales of
/// blocks.
fn packed() -> impl Iterator<Item = ProblemSpec> {
    let half = DIMS.into_iter().flat_map(|dims| [64, 128, 512, 8192].map(|longest| (None, dims, longest)));
    let fp8 = [64, 128, 256]
        .into_iter()
        .flat_map(|dim| [512, 8192].map(|keys| (Some(Dtype::E4m3), (dim, dim), keys)));
    let of_heads = half.chain(fp8).enumerate().map(|(number, (dtype, (head_dim, head_dim_v), longest))| {
        let shifted = number + number / 4;
        let dtype = dtype.unwrap_or([Dtype::Bf16, Dtype::F16][shifted / 2 % 2]);
        let sequences = Sequences::packed(2).longest(longest);
        let spec = problem(dtype, (2 * longest, 2 * longest), MANY_HEADS, head_dim).head_dim_v(head_dim_v);
        let mut spec = spec.mask(MASKS[number % 5]).seqs_q(sequences).seqs_k(sequences);
        spec.softcap = shifted.is_multiple_of(4).then_some(SOFTCAP);
        spec
    });
    let of_blocks = [64, 128, 256].into_iter().flat_map(|head_dim| {
        [(Mask::None, 8192), (Mask::Causal, 512)].map(|(mask, longest)| {
            let sequences = Sequences::packed(2).longest(longest);
            let spec =
                problem(Dtype::E4m3, (2 * longest, 2 * longest), MANY_HEADS, head_dim).block_scales(128);
            spec.mask(mask).seqs_q(sequences).seqs_k(sequences)
        })
    });
    of_heads.chain(of_blocks)
}

/// Problems of packed sequences whose table the caller gives, for every type of elements.
fn given() -> impl Iterator<Item = ProblemSpec> {
    let dims = [(Dtype::Bf16, 64), (Dtype::Bf16, 128), (Dtype::F16, 256), (Dtype::E4m3, 128)];
    dims.into_iter().flat_map(|(dtype, head_dim)| {
        MASKS.into_iter().take(2).map(move |mask| {
            let sequences = Sequences::packed(2).longest(4096);
            let spec = problem(dtype, (8192, 8192), MANY_HEADS, head_dim);
            spec.mask(mask).seqs_q(sequences).seqs_k(sequences)
        })
    })
}

/// Problems with sinks, whose kernels have a few more instructions at the end of a tile. GPT-OSS has head_dim 64,
/// causal masks and windows; kernels of wider heads have the fewest free registers at the end of a tile.
fn sinks() -> impl Iterator<Item = ProblemSpec> {
    let left = Mask::Window { left: Some(127), right: Some(0) };
    let bf16 = [Mask::Causal, left].into_iter().flat_map(|mask| {
        let sequences = Sequences::packed(2).longest(4096);
        let dense = move |head_dim| problem(Dtype::Bf16, (4096, 4096), MANY_HEADS, head_dim).mask(mask);
        [dense(64), dense(64).seqs_q(sequences).seqs_k(sequences), dense(128), dense(256)]
    });
    let e4m3 = [128, 256].into_iter().flat_map(|head_dim| {
        let spec = problem(Dtype::E4m3, (512, 8192), MANY_HEADS, head_dim);
        [spec.clone(), spec.transposed_v().v_channels().block_scales(64)]
    });
    bf16.chain(e4m3).map(ProblemSpec::sink)
}

/// Problems whose largest scores are a result, dense and packed.
fn max_logits() -> impl Iterator<Item = ProblemSpec> {
    let sequences = Sequences::packed(2).longest(4096);
    let causal = |head_dim| problem(Dtype::Bf16, (4096, 4096), MANY_HEADS, head_dim).causal().max_logits();
    [causal(128), causal(128).seqs_q(sequences).seqs_k(sequences), causal(256)].into_iter()
}

/// Problems under masks of intervals, dense and packed, with another mask beside, and under lists of blocks.
fn intervals() -> impl Iterator<Item = ProblemSpec> {
    let of = |of_row, dtype, keys: usize, dims: (usize, usize)| {
        let mask = Mask::of_intervals(Intervals { of_row, per_sequence: false, per_head: false });
        problem(dtype, (keys, keys), MANY_HEADS, dims.0).head_dim_v(dims.1).mask(mask)
    };
    let wide = [(512, 512), (320, 320)];
    let two = DIMS.into_iter().chain(wide).map(move |dims| of(IntervalsOfRow::Two, Dtype::Bf16, 8192, dims));
    let one = [64, 128, 256].map(|dim| of(IntervalsOfRow::One, Dtype::Bf16, 8192, (dim, dim)));
    let short = [(Dtype::F16, (64, 64)), (Dtype::F16, (128, 128)), (Dtype::Bf16, (576, 512))];
    let short = short.map(|(dtype, dims)| {
        let mut spec = of(IntervalsOfRow::Two, dtype, 512, dims).sink();
        spec.softcap = Some(SOFTCAP);
        spec
    });
    let sequences = Sequences::packed(2).longest(4096);
    let some = IntervalsOfRow::Causal { sequences: 2 };
    let [one_of, two_of] = [IntervalsOfRow::One, IntervalsOfRow::Two];
    let packed = [(two_of, 64), (one_of, 128), (two_of, 256), (some, 128), (two_of, 512), (some, 512)];
    let packed = packed
        .map(|(of_row, dim)| of(of_row, Dtype::Bf16, 8192, (dim, dim)).seqs_q(sequences).seqs_k(sequences));
    let causal = of(IntervalsOfRow::One, Dtype::Bf16, 8192, (128, 128)).causal();
    let chunks = of(IntervalsOfRow::Two, Dtype::Bf16, 8192, (256, 256)).causal();
    let chunks = chunks.mask(Mask::from_chunk(7).expect("it is a size")).seqs_q(sequences).seqs_k(sequences);
    let [small, large] = [(6, BlockSide::Of64), (3, BlockSide::Of128)];
    let of = |dim, (words, side)| of(IntervalsOfRow::Blocks { words, side }, Dtype::Bf16, 8192, (dim, dim));
    let sinks = of(128, large).causal().sink();
    let blocks = [sinks, of(128, large), of(64, large).causal(), of(128, small), of(64, small).causal()];
    two.chain(one).chain(short).chain(packed).chain([causal, chunks]).chain(blocks)
}

/// Problems with more columns of V than one warpgroup's registers hold, dense and packed. Some have all columns of a
/// tile, and some have fewer.
fn wide() -> impl Iterator<Item = ProblemSpec> {
    let dense = |dtype, heads, dims: (usize, usize), mask| {
        problem(dtype, (4096, 4096), heads, dims.0).head_dim_v(dims.1).mask(mask)
    };
    let sequences = Sequences::packed(2).longest(4096);
    let mut capped = dense(Dtype::Bf16, MANY_HEADS, (576, 512), MASKS[2]).sink();
    capped.softcap = Some(SOFTCAP);
    [
        dense(Dtype::Bf16, MANY_HEADS, (512, 512), Mask::None),
        dense(Dtype::Bf16, MANY_HEADS, (512, 512), Mask::Causal),
        dense(Dtype::F16, 1, (320, 320), Mask::Causal),
        dense(Dtype::Bf16, MANY_HEADS, (320, 320), Mask::Causal).seqs_q(sequences).seqs_k(sequences),
        dense(Dtype::Bf16, MANY_HEADS, (512, 512), MASKS[3]).seqs_q(sequences).seqs_k(sequences).sink(),
        capped,
        with_qv(dense(Dtype::Bf16, MANY_HEADS, (64, 512), Mask::Causal)),
        with_qv(dense(Dtype::Bf16, MANY_HEADS, (64, 256), Mask::Causal)),
        with_qv(dense(Dtype::Bf16, MANY_HEADS, (64, 512), Mask::None)),
        with_qv(dense(Dtype::F16, MANY_HEADS, (64, 512), MASKS[2]).seqs_q(sequences).seqs_k(sequences)),
    ]
    .into_iter()
}

/// The problem with a contiguous `qv`.
pub(super) fn with_qv(spec: ProblemSpec) -> ProblemSpec {
    let qv = TensorDesc::contiguous(spec.q.dtype, spec.o.shape);
    spec.qv(qv)
}

/// Problems over caches: decoding with every head dimension and several group sizes, and chunked prefill, in pages of
/// several sizes, with padding on the left and without.
fn cache() -> impl Iterator<Item = ProblemSpec> {
    let decoding = CACHE_DIMS.into_iter().enumerate().flat_map(|(number, (head_dim, head_dim_v))| {
        (0..2).map(move |turn| {
            let (group, rows) = [(4, 16), (8, 64), (16, 128), (1, 8), (3, 256)][(2 * number + turn) % 5];
            let kv = Shape { batch: 40, seqlen: rows, heads: 2, head_dim };
            let q = Shape { batch: 2, seqlen: 1 + turn, heads: 2 * group, head_dim };
            let dtype = [Dtype::Bf16, Dtype::F16][(number + turn) % 2];
            let spec = ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v);
            let mut spec = spec.mask(MASKS[(number + 3 * turn) % 5]).seqs_k(Sequences::paged(2, 20).used());
            spec.sink = turn == 1;
            spec.softcap = (number % 3 == 1).then_some(SOFTCAP);
            spec
        })
    });
    let prefill = [(64, 16), (128, 64), (128, 16), (256, 128)].into_iter().map(|(head_dim, rows)| {
        let q = Shape { batch: 2, seqlen: 4096, heads: 32, head_dim };
        let kv = Shape { batch: 1000, seqlen: rows, heads: 8, head_dim };
        let sequences = Sequences::paged(2, 8192 / rows).used();
        ProblemSpec::dense(Dtype::Bf16, q, kv).causal().seqs_k(sequences)
    });
    let padded = |sequences: Sequences, batch| {
        let q = Shape { batch: 2, seqlen: 1, heads: 8, head_dim: 128 };
        let kv = Shape { batch, seqlen: 4096, heads: 2, head_dim: 128 };
        ProblemSpec::dense(Dtype::Bf16, q, kv).causal().seqs_k(sequences.used().left_padded())
    };
    let padded = [padded(Sequences::dense(2, 4096), 2), padded(Sequences::paged(2, 1), 9)];
    // Decoding and prefill under masks of intervals: boxes of pages, and rows of pages one by one. Then other decoding.
    let two = IntervalsOfRow::Two;
    let other = [IntervalsOfRow::Causal { sequences: 2 }, IntervalsOfRow::Tree { words: 2 }];
    let intervals = [(16, 64, two), (4096, 64, two), (4096, 1, two), (16, 64, other[0]), (16, 64, other[1])];
    let intervals = intervals.map(|(seqlen, rows, of_row)| {
        let q = Shape { batch: 2, seqlen, heads: 32, head_dim: 128 };
        let kv = Shape { batch: 10_000, seqlen: rows, heads: 8, head_dim: 128 };
        let mask = Mask::of_intervals(Intervals { of_row, per_sequence: true, per_head: false });
        ProblemSpec::dense(Dtype::Bf16, q, kv).mask(mask).seqs_k(Sequences::paged(2, 8192 / rows).used())
    });
    decoding.chain(prefill).chain(e4m3_cache()).chain(padded).chain(intervals)
}

/// Problems over pages whose rows are copied one by one: small pages, and pages of any size with padding on the left.
fn gathered() -> impl Iterator<Item = ProblemSpec> {
    let decoding = CACHE_DIMS.into_iter().zip([1, 2, 4, 1, 12, 1]).enumerate();
    let decoding = decoding.map(|(number, ((head_dim, head_dim_v), rows))| {
        let kv = Shape { batch: 400, seqlen: rows, heads: 2, head_dim };
        let q = Shape { batch: 2, seqlen: 1, heads: 8, head_dim };
        let sequences = match number % 3 {
            0 => Sequences::paged(2, 100),
            1 => Sequences::indexed(2, [3, 100]),
            _ => Sequences::indexed(2, [3, 100]).left_padded(),
        };
        let dtype = [Dtype::Bf16, Dtype::F16][number / 3];
        ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v).causal().seqs_k(sequences.used())
    });
    let prefill = [(64, 1, false), (128, 1, false), (128, 16, true), (256, 4, false)];
    let prefill = prefill.into_iter().map(|(head_dim, rows, is_padded)| {
        let q = Shape { batch: 2, seqlen: 4096, heads: 32, head_dim };
        let kv = Shape { batch: 20_000, seqlen: rows, heads: 8, head_dim };
        let sequences = Sequences::paged(2, 8192 / rows).used();
        let sequences = if is_padded { sequences.left_padded() } else { sequences };
        ProblemSpec::dense(Dtype::Bf16, q, kv).causal().seqs_k(sequences)
    });
    decoding.chain(prefill)
}

/// Plans for problems over caches. Most are split-KV plans with equal shares; a few have splits of fixed size.
fn shared_plans() -> impl Iterator<Item = Plan> {
    let equally = PlanOptions::default().split_keys(SplitKeys::Even);
    let shared: [Vec<_>; 5] = [
        cache().collect(),
        gathered().collect(),
        chunks().collect(),
        wide_cache().collect(),
        listed().collect(),
    ];
    let shared = shared.into_iter().flatten().map(move |spec| (spec, equally));
    shared.chain(fixed_size()).map(|(spec, options)| plan(spec, options))
}

/// The kernels that reduce splits.
fn combines() -> impl Iterator<Item = Shipped> {
    let mut seen = HashSet::new();
    let specs = shared_plans().filter_map(|plan| match plan.kind() {
        PlanKind::SplitKv(shared) if shared.needs_reduction() => Some(FwdCombineSpec::of(&plan, shared)),
        PlanKind::SplitKv(_) | PlanKind::Dense(_) | PlanKind::Varlen(_) => None,
    });
    specs.filter(move |spec| seen.insert(*spec)).map(|spec| {
        let words = [
            (spec.sink, "/sink"),
            (spec.lse_without_sink, "/lse-without"),
            (spec.stored_lse, "/lse-form"),
            (spec.max_logits, "/max-logits"),
        ];
        let words: String = words.iter().filter(|(is_so, _)| *is_so).map(|(_, word)| *word).collect();
        let pieces = spec.pieces.map_or(String::new(), |(ShareForm { q, k, .. }, mask)| {
            format!("/pieces/{}/{}/{}", rows_word(q), rows_word(k), sides_word(mask))
        });
        let Team { warps, at_once, .. } = spec.team;
        let name = format!("merge/{}/d{}/{warps}x{at_once}{words}{pieces}", spec.output, spec.head_dim_v);
        Shipped::new(name, spec)
    })
}

pub(super) fn problem(
    dtype: Dtype,
    (rows, keys): (usize, usize),
    heads: usize,
    head_dim: usize,
) -> ProblemSpec {
    let q = Shape { batch: 1, seqlen: rows, heads, head_dim };
    ProblemSpec::dense(dtype, q, Shape { seqlen: keys, ..q })
}

/// The kernel of the plan for a problem.
fn planned(spec: ProblemSpec, options: PlanOptions) -> FwdSpec {
    FwdSpec::of(&plan(spec, options))
}

fn plan(spec: ProblemSpec, options: PlanOptions) -> Plan {
    let problem = spec.validate().expect("shapes agree");
    Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).expect("the head dimension has a tile")
}

/// The name of a forward kernel.
fn name(spec: &FwdSpec) -> String {
    let FwdSpec { elem, output, tile, mask, softcap, sink, order, scheduler, cluster, sequences, .. } = *spec;
    let FwdSpec { shares, pack, page_block, gathered_cols, indexed, given_table, .. } = *spec;
    let FwdSpec { lse_without_sink, stored_lse, max_logits, .. } = *spec;
    let CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, .. } = tile;
    let dims = if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}-{head_dim_v}") };
    let of = if elem == Elem::E4m3 { elem } else { output };
    let mut words = vec![format!("fwd/{of}/d{dims}/{tile_m}x{tile_n}x{stages}")];
    let mut word = |word: &str| words.push(word.to_owned());
    word(&sides_word(mask));
    let of_scores = [softcap.then(|| "cap".to_owned()), spec.score.as_ref().map(score_word)];
    of_scores.into_iter().flatten().for_each(|of_scores| word(&of_scores));
    word(scheduler_word(scheduler));
    match tile.precision {
        Precision::Converted { q: false } if spec.token_scales == Some(Elem::U8) => word("over-int8"),
        Precision::Converted { q: false } => word("over-e4m3"),
        Precision::Converted { q: true } => word("of-e4m3"),
        Precision::Half | Precision::Fp8(_) => {}
    }
    if elem == Elem::E4m3 && output == Elem::F16 {
        word("to-f16");
    }
    if let Precision::Fp8(Fp8Inputs { v_layout, block_scales, v_channels }) = tile.precision {
        let is_transposed = v_layout == ValueLayout::Transposed;
        let differs =
            [(is_transposed, "v-transposed"), (block_scales, "block-scales"), (v_channels, "v-channels")];
        differs.iter().filter(|(differs, _)| *differs).for_each(|(_, what)| word(what));
    }
    let differs = [
        (tile.pipeline == Pipeline::Serial, "serial"),
        (tile.pipeline == Pipeline::TwoStage, "two-stage"),
        (tile.pipeline == Pipeline::ThreeStage, "three-stage"),
        (tile.consumers > 1 && !tile.ping_pong, "no-turns"),
        (tile.loads == Loads::Consumers, "no-producer"),
        (mask != Mask::None && order == Order::Linear, "linear"),
        (cluster > 1, "clusters"),
        (tile.qv, "qv"),
        (sequences == SequenceForm::Varlen && shares.is_none(), "listed"),
        (given_table, "given-table"),
        (sink, "sink"),
        (lse_without_sink, "lse-without"),
        (stored_lse, "lse-form"),
        (spec.merges.is_some(), "merged-pieces"),
        (max_logits, "max-logits"),
        (spec.row_scales, "row-scales"),
        (spec.token_scales.is_some(), "token-scales"),
    ];
    differs.iter().filter(|(differs, _)| *differs).for_each(|(_, what)| word(what));
    if let Some(ShareForm { q, k, said_by, twins, reduces_whole: _, lists }) = shares {
        let by = match said_by {
            ReductionSource::Units => "units",
            ReductionSource::Ctas => "ctas",
            ReductionSource::Lengths => "pieces",
        };
        let twins = if twins { "/twins" } else { "" };
        word(&format!("shares-of-{by}/{}/{}/pack{pack}{twins}", rows_word(q), rows_word(k)));
        match lists.map(|lists| lists.second_used) {
            None => {}
            Some(None) => word("lists"),
            Some(Some(false)) => word("two-lists"),
            Some(Some(true)) => word("two-used-lists"),
        }
    }
    if let Some(rows) = page_block {
        word(&format!("pages{rows}"));
    }
    if spec.head_dim_v != head_dim_v {
        word(&format!("cols-of-v{}", spec.head_dim_v));
    }
    if let Some(cols) = gathered_cols.filter(|&cols| cols != head_dim) {
        word(&format!("cols{cols}"));
    }
    if indexed {
        word("indexed");
    }
    words.join("/")
}
