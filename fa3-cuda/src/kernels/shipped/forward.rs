//! The forward kernels that are shipped: `fwd/bf16/d128/128x128x3/causal/cap/dynamic` is named after its elements, head
//! dimension, tile (rows x keys x stages), the bounded sides of its mask, soft cap and scheduler. Words follow for what
//! differs from the tile table.

use std::collections::HashSet;

use fa3_ir::Elem;
use fa3_sched::combine::Team;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Loads, Pipeline, Plan, PlanOptions, Precision, Way};
use fa3_sched::{DeviceLimits, Order, Scheduler};
use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape, ValueLayout};

use super::packed::rows_word;
use super::{Shipped, scheduler_word, sides_word};
use crate::kernels::fwd::{FwdSpec, MergeSpec, SequenceForm, ShareForm};

/// Tiles of so many heads are more than a GPU has SMs.
const MANY_HEADS: usize = 400;

const SOFTCAP: f64 = 30.0;

/// Each bounded side of a mask alone, both and none.
const MASKS: [Mask; 5] = [
    Mask::None,
    Mask::Causal,
    Mask::Window { left: Some(256), right: Some(256) },
    Mask::Window { left: Some(256), right: None },
    Mask::Window { left: None, right: Some(256) },
];

/// The kernels of plans for problems of every head dimension that has a tile, and of the ablation.
pub(super) fn forward() -> impl Iterator<Item = Shipped> {
    let mut seen = HashSet::new();
    let specs = half().chain(fp8()).map(|spec| planned(spec, PlanOptions::default())).chain(ablation());
    let specs = specs.chain(packed().chain(sinks()).map(|spec| planned(spec, PlanOptions::default())));
    let given = given().map(|spec| planned(spec, PlanOptions::default().given_table()));
    let specs = specs.chain(given);
    let specs = specs.chain(cache().map(|spec| planned(spec, PlanOptions::default().split_keys())));
    let specs = specs.filter(move |spec| seen.insert(*spec)).map(|spec| Shipped::new(name(&spec), spec));
    merges().chain(specs)
}

/// Problems in bf16 with many tiles and in f16 with few, with a soft cap and without, of lengths that have all tiles.
fn half() -> impl Iterator<Item = ProblemSpec> {
    let dims = [(64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
    let lengths = [(64, 4096), (128, 4096), (512, 512), (4096, 4096), (8192, 8192)];
    let settings = [(Dtype::Bf16, MANY_HEADS), (Dtype::F16, 1)];
    let settings = settings.into_iter().flat_map(|setting| [(setting, None), (setting, Some(SOFTCAP))]);
    let problems = settings.flat_map(move |setting| dims.map(|dims| (setting, dims)));
    problems.flat_map(move |(((dtype, heads), softcap), (head_dim, head_dim_v))| {
        let lengths = lengths.into_iter().flat_map(|lengths| MASKS.map(|mask| (lengths, mask)));
        lengths.map(move |(lengths, mask)| {
            let mut spec = problem(dtype, lengths, heads, head_dim).head_dim_v(head_dim_v).mask(mask);
            spec.softcap = softcap;
            spec
        })
    })
}

/// Problems in e4m3. Of each tile and mask there are eight, in which every two of six features meet in all four ways:
/// a feature is the parity of some bits of the problem's number.
fn fp8() -> impl Iterator<Item = ProblemSpec> {
    let cells = [64, 128, 256].into_iter().flat_map(|head_dim| MASKS.map(|mask| (head_dim, mask)));
    let cells = cells.flat_map(|cell| [(512, 512), (512, 8192)].map(|lengths| (cell, lengths)));
    cells.flat_map(|((head_dim, mask), lengths)| {
        (0..8_u32).map(move |number| {
            let has = |bits: u32| (number & bits).count_ones() % 2 == 1;
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
/// keys where one needs more registers, and other orders of tiles.
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
    let drawn = options().scheduler(Scheduler::DynamicPersistent);
    let orders = [options(), options().order(Order::Linear), drawn.order(Order::Linear)];
    let orders = orders.map(|options| planned(dense().causal(), options.tile(tile)));
    pipelines.into_iter().chain(orders)
}

/// Problems of packed sequences: every head dimension with the tiles of short and of long ones. Masks, types and soft
/// caps go round, so that each of them meets many tiles. Those of e4m3 have scales of heads, then of blocks.
fn packed() -> impl Iterator<Item = ProblemSpec> {
    let dims = [(64, 64), (64, 256), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
    let half = dims.into_iter().flat_map(|dims| [64, 128, 512, 8192].map(|longest| (None, dims, longest)));
    let fp8 = [64, 128, 256]
        .into_iter()
        .flat_map(|dim| [512, 8192].map(|keys| (Some(Dtype::E4m3), (dim, dim), keys)));
    let of_heads =
        half.chain(fp8).enumerate().flat_map(|(number, (dtype, (head_dim, head_dim_v), longest))| {
            let dtype = dtype.unwrap_or([Dtype::Bf16, Dtype::F16][number / 2 % 2]);
            let masks = [MASKS[number % 2], MASKS[2 + number % 3]];
            masks.into_iter().map(move |mask| {
                let sequences = Sequences::packed(2).longest(longest);
                let spec =
                    problem(dtype, (2 * longest, 2 * longest), MANY_HEADS, head_dim).head_dim_v(head_dim_v);
                let mut spec = spec.mask(mask).seqs_q(sequences).seqs_k(sequences);
                spec.softcap = number.is_multiple_of(4).then_some(SOFTCAP);
                spec
            })
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

/// Problems of packed sequences whose table the caller gives, of every kind of elements.
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

/// Problems with sinks, of which a kernel has a few instructions more at the end of a tile. GPT-OSS has head_dim 64,
/// causal masks and windows; wider heads leave the fewest registers there.
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

/// Problems over caches: decoding with every head dimension and groups of several sizes, and chunks of prefill; in
/// pages, in other entries and behind padding.
fn cache() -> impl Iterator<Item = ProblemSpec> {
    let dims = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];
    let decoding = dims.into_iter().enumerate().flat_map(|(number, (head_dim, head_dim_v))| {
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
    decoding.chain(prefill).chain([padded(Sequences::dense(2, 4096), 2), padded(Sequences::paged(2, 1), 9)])
}

/// The kernels that merge parts of shared keys.
fn merges() -> impl Iterator<Item = Shipped> {
    let mut seen = HashSet::new();
    let plans = cache().map(|spec| plan(spec, PlanOptions::default().split_keys()));
    let specs = plans.filter_map(|plan| match plan.way() {
        Way::Shared(shared) => Some(MergeSpec::of(&plan, shared)),
        Way::Numbered(_) | Way::Listed(_) => None,
    });
    specs.filter(move |spec| seen.insert(*spec)).map(|spec| {
        let sink = if spec.sink { "/sink" } else { "" };
        let Team { warps, at_once } = spec.team;
        let name = format!("merge/{}/d{}/{warps}x{at_once}{sink}", spec.output, spec.head_dim_v);
        Shipped::new(name, spec)
    })
}

fn problem(dtype: Dtype, (rows, keys): (usize, usize), heads: usize, head_dim: usize) -> ProblemSpec {
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
    let FwdSpec { shares, pack, page_block, given_table, .. } = *spec;
    let CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, .. } = tile;
    let dims = if head_dim == head_dim_v { head_dim.to_string() } else { format!("{head_dim}-{head_dim_v}") };
    let mut words = vec![format!("fwd/{elem}/d{dims}/{tile_m}x{tile_n}x{stages}")];
    let mut word = |word: &str| words.push(word.to_owned());
    word(sides_word(mask));
    if softcap {
        word("cap");
    }
    word(scheduler_word(scheduler));
    if elem == Elem::E4m3 && output == Elem::F16 {
        word("to-f16");
    }
    if let Precision::Fp8(Fp8Inputs { v_layout, block_scales, v_channels }) = tile.precision {
        if v_layout == ValueLayout::Transposed {
            word("v-transposed");
        }
        if block_scales {
            word("block-scales");
        }
        if v_channels {
            word("v-channels");
        }
    }
    let differs = [
        (tile.pipeline == Pipeline::Serial, "serial"),
        (tile.pipeline == Pipeline::TwoStage, "two-stage"),
        (tile.pipeline == Pipeline::ThreeStage, "three-stage"),
        (tile.consumers > 1 && !tile.ping_pong, "no-turns"),
        (tile.loads == Loads::Consumers, "no-producer"),
        (mask != Mask::None && order == Order::Linear, "linear"),
        (cluster > 1, "clusters"),
        (sequences == SequenceForm::Listed && shares.is_none(), "listed"),
        (given_table, "given-table"),
        (sink, "sink"),
    ];
    differs.iter().filter(|(differs, _)| *differs).for_each(|(_, what)| word(what));
    if let Some(ShareForm { q, k, by_unit }) = shares {
        let by = if by_unit { "units" } else { "ctas" };
        word(&format!("shares-of-{by}/{}/{}/pack{pack}", rows_word(q), rows_word(k)));
    }
    if let Some(rows) = page_block {
        word(&format!("pages{rows}"));
    }
    words.join("/")
}

#[cfg(test)]
mod tests {
    use fa3_sched::forward::TileRow;

    use super::*;

    #[test]
    fn every_row_of_the_tile_table_is_shipped() {
        let shipped: HashSet<CtaTile> =
            forward().filter_map(|shipped| shipped.forward().map(|spec| spec.tile)).collect();
        for row in TileRow::table() {
            assert!(shipped.contains(&row.tile), "{}", row.tile);
        }
    }
}
