use fa3_types::{
    BackwardSpec, BlockSide, Intervals, IntervalsOfRow, Mask, ProblemSpec, ScoreFunction, Sequences, Shape,
    Strides,
};

use super::*;
use crate::{Longest, Order, Schedule, Scheduler, SeqLens};

const H100: DeviceLimits = DeviceLimits::h100_sxm();

fn spec(head_dim: usize) -> ProblemSpec {
    let q = Shape { batch: 2, seqlen: 1000, heads: 8, head_dim };
    ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 1200, heads: 2, ..q })
}

/// A backward problem without gaps between its tensors' rows.
fn backward(forward: ProblemSpec) -> BackwardProblem {
    BackwardSpec::contiguous(forward).validate().unwrap()
}

fn dense_plan(plan: &Plan) -> &DensePlan {
    plan.dense().unwrap()
}

/// A plan with a dQ kernel.
fn plan(forward: ProblemSpec) -> Result<Plan, PlanError> {
    let dq = DqTile::choose(forward.q.shape.head_dim as u32, forward.v.shape.head_dim as u32, &H100);
    let options = PlanOptions { dq, ..PlanOptions::default() };
    Plan::with(&backward(forward), &H100, &options)
}

fn dq(plan: &Plan) -> &Part<DqTile> {
    match plan.dq() {
        DqBy::Kernel(part) => part,
        DqBy::Additions | DqBy::AdditionsInOrder => panic!("{plan}"),
    }
}

#[test]
fn keys_are_the_rows_of_the_transposed_matrix() {
    let plan = plan(spec(128).causal()).unwrap();
    // 2 sequences with 2 heads of K and 10 tiles of 128 keys; with 8 heads of Q and 8 tiles of 128 rows.
    let of = dense_plan(&plan);
    let tiles = [of.dkv(), of.dq().unwrap(), of.stats()].map(Schedule::num_tiles);
    assert_eq!((tiles, of.lens()), ([40, 128, 2 * 8 * 16], SeqLens { q: 1000, k: 1200 }));
    // All rows see the first keys, and only the last rows see the last keys.
    let blocks = |tile| plan.dkv().tiling.kv_range(tile, of.lens().transposed());
    assert_eq!([0, 9].map(|tile| [blocks(tile).first, blocks(tile).end]), [[0, 16], [14, 16]]);
    assert!(matches!(of.dkv().order(), Order::LongestFirst { longest: Longest::First, .. }));
}

#[test]
fn what_no_kernel_computes_is_refused() {
    let error = plan(spec(264)).unwrap_err();
    assert_eq!(error, PlanError::HeadDim { head_dim: 264, head_dim_v: 264 });
    let f32 = ProblemSpec::dense(Dtype::F32, spec(64).q.shape, spec(64).k.shape);
    let (dtype, output) = (Dtype::F32, Dtype::F32);
    assert_eq!(plan(f32).unwrap_err(), PlanError::Dtype { dtype, output });
    let narrow = PlanOptions::default().dq(DqTile::choose(64, 64, &H100).unwrap());
    let problem = backward(spec(128));
    let refused = Plan::with(&problem, &H100, &narrow).unwrap_err();
    assert_eq!(refused, PlanError::Narrow { most: 64, most_v: 64, head_dim: 128, head_dim_v: 128 });
    let refused = plan(spec(33)).unwrap_err();
    assert_eq!(refused.to_string(), "q has head_dim 33, not a multiple of 8 as bf16 needs (16-byte rows)");
    assert!(refused.is_cpu_only());
    let mut odd = BackwardSpec::contiguous(spec(64));
    odd.dout.strides.heads += 1;
    let refused = Plan::new(&odd.validate().unwrap(), &H100).unwrap_err();
    assert_eq!(refused.to_string(), "dout has stride 65 in heads, not a multiple of 8 elements (16 bytes)");
}

/// Options may give two tiles, in either order, but not two tiles that both compute dQ.
#[test]
fn a_given_tile_is_taken_or_refused() {
    let problem = backward(spec(128));
    let dq = DqTile::choose(128, 128, &H100).unwrap();
    let adding = DkvTile::choose_adding([128, 128], AddOrder::Any, &H100).unwrap();
    let alone = DkvTile::choose(128, 128, &H100).unwrap();
    let with = |dkv| Plan::with(&problem, &H100, &PlanOptions::default().dkv(dkv).dq(dq));
    assert_eq!(with(adding).unwrap_err(), PlanError::DqTwice);
    let plan = with(alone).unwrap();
    assert_eq!((plan.dkv().tile, self::dq(&plan).tile), (alone, dq));
}

#[test]
fn functions_that_take_registers_have_smaller_blocks() {
    let rows = |text| {
        let function = ScoreFunction::parse(text, []).unwrap();
        let problem = backward(spec(64).score(function.form().clone()));
        Plan::new(&problem, &H100).unwrap().dkv().tile.tile_m
    };
    assert_eq!(["s + h * (k - q)", "2 * tanh(s / 2)", "s / (1 + abs(s))"].map(rows), [128, 128, 64]);
}

#[test]
fn it_says_what_it_does() {
    let expected = "\
problem    backward of bf16 batch 2 seqlen 1000 x 1200 heads 8/2 head_dim 128 mask none scale 0.088388
statistics 256 CTAs of 64 rows
dK, dV     128 keys, blocks of 64 rows, 3 stages and 2 of keys, 226 KiB of shared memory
           40 tiles, longest first, heads in sections of 4, one tile a CTA, 40 CTAs
dQ         128 rows, blocks of 112 keys, 2 stages of K and 2 of V, 177 KiB of shared memory
           128 tiles, longest first, heads in sections of 12, one tile a CTA, 128 CTAs";
    assert_eq!(plan(spec(128)).unwrap().to_string(), expected);
}

#[test]
fn dq_is_added_up_where_it_may_be() {
    let problem = |dim| backward(spec(dim));
    let plan = Plan::new(&problem(128), &H100).unwrap();
    assert_eq!(plan.dkv().tile.adds_dq, Some(AddOrder::LastKeysFirst), "1200 keys");
    assert!(matches!(plan.dq(), DqBy::AdditionsInOrder));
    assert!(plan.to_string().ends_with("dQ         rounded by the last to add"), "{plan}");
    let wide = Plan::new(&problem(256), &H100).unwrap();
    assert!(matches!(wide.dq(), DqBy::Kernel(_)), "dK, dV and dQ are more registers than there are");

    let seen = |keys, mask| {
        let shape = Shape { batch: 1, seqlen: keys, heads: 4, head_dim: 128 };
        let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape).mask(mask);
        backward(forward)
    };
    let (any, last) = (Some(AddOrder::Any), Some(AddOrder::LastKeysFirst));
    let window = Mask::Window { left: Some(1000), right: Some(0) };
    for (keys, mask, expected) in [
        (4096, Mask::None, last),
        (4097, Mask::None, any),
        (2049, Mask::Causal, last),
        // Rows see 1025 keys on average.
        (2050, Mask::Causal, any),
        (20_000, window, last),
    ] {
        let plan = Plan::new(&seen(keys, mask), &H100).unwrap();
        assert_eq!(plan.dkv().tile.adds_dq, expected, "{keys} {mask}");
    }

    let grouped = |keys, mask, heads_kv| {
        let q = Shape { batch: 8, seqlen: keys, heads: 32, head_dim: 128 };
        let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: heads_kv, ..q }).mask(mask);
        let problem = backward(forward);
        let adds = |options| Plan::with(&problem, &H100, &options).unwrap().dkv().tile.adds_dq;
        assert_eq!(adds(PlanOptions::default().deterministic()), last);
        adds(PlanOptions::default())
    };
    assert_eq!(grouped(2048, Mask::Causal, 8), any, "measured");
    assert_eq!(grouped(1538, Mask::Causal, 16), any, "rows see 769 keys");
    assert_eq!(grouped(1537, Mask::Causal, 16), last);
    assert_eq!(grouped(2048, Mask::Causal, 32), last, "each head has its own keys");
    assert_eq!(grouped(2048, Mask::None, 8), last, "tiles are equal");
    assert_eq!(grouped(20_000, window, 8), last, "nearly so");

    let long = seen(4097, Mask::None);
    let in_any_order = Plan::new(&long, &H100).unwrap();
    let text = in_any_order.to_string();
    assert!(text.ends_with("dQ         260 CTAs that round 64 rows of sums"), "{text}");
    let options = PlanOptions::default().deterministic();
    for options in [options, options.dkv(in_any_order.dkv().tile)] {
        let ordered = Plan::with(&long, &H100, &options).unwrap();
        assert_eq!(ordered.dkv().tile.adds_dq, Some(AddOrder::LastKeysFirst));
        let text = ordered.to_string();
        assert!(text.contains("adds to dQ in order"), "{text}");
    }
}

#[test]
fn rows_that_no_tile_visits() {
    let unvisited = |rows, keys, mask| {
        let q = Shape { batch: 1, seqlen: rows, heads: 1, head_dim: 128 };
        let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: keys, ..q }).mask(mask);
        let plan = Plan::new(&backward(forward), &H100).unwrap();
        let (tile, lens) = (plan.dkv().tile, dense_plan(&plan).lens().transposed());
        let visits = |row: u32| {
            let blocks = (0..lens.q.div_ceil(tile.tile_n)).map(|tile| plan.dkv().tiling.kv_range(tile, lens));
            blocks.into_iter().any(|blocks| (blocks.first..blocks.end).contains(&(row / tile.tile_m)))
        };
        let rows = dense_plan(&plan).unvisited_rows();
        assert!((0..lens.k).all(|row| visits(row) == (row >= rows)), "{plan}");
        rows
    };
    assert_eq!(unvisited(500, 100, Mask::None), 0);
    assert_eq!(unvisited(500, 0, Mask::None), 500);
    // Row 400 is the first row that sees a key. Its block begins at row 384.
    assert_eq!(unvisited(500, 100, Mask::Causal), 384);
    assert_eq!(unvisited(500, 600, Mask::Causal), 0);
    assert_eq!(unvisited(500, 100, Mask::Window { left: Some(3), right: Some(20) }), 320);
    assert_eq!(unvisited(500, 100, Mask::Window { left: Some(3), right: None }), 0);
}

#[test]
fn tiles_that_wait_come_after_those_that_they_wait_for() {
    let shape = Shape { batch: 1, seqlen: 4096, heads: 32, head_dim: 64 };
    let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape);
    let problem = backward(forward);
    let plan = Plan::with(&problem, &H100, &PlanOptions::default().deterministic()).unwrap();
    let schedule = dense_plan(&plan).dkv();
    // A tile has 32 blocks of 128 rows, so a section has 264 / 32 heads.
    let order = Order::LongestFirst { section: 8, longest: Longest::Last };
    assert_eq!((schedule.order(), schedule.scheduler()), (order, Scheduler::DynamicPersistent));
    let mut next = [32; 32];
    for tile in schedule.tiles() {
        next[tile.head as usize] -= 1;
        assert_eq!(tile.m_block, next[tile.head as usize]);
    }
}

#[test]
fn nothing_to_do() {
    let mut none = spec(64);
    let empty = Shape { seqlen: 0, ..none.q.shape };
    none = ProblemSpec::dense(Dtype::F16, empty, none.k.shape);
    let plan = plan(none).unwrap();
    assert_eq!((dense_plan(&plan).stats().grid(), dense_plan(&plan).dq().unwrap().grid()), (0, 0));
    assert_eq!(dense_plan(&plan).dkv().num_tiles(), 40);
}

/// Packed sequences with `total` rows of Q and of K.
fn packed(count: usize, longest: usize, dim: usize) -> ProblemSpec {
    let sequences = Sequences::packed(count).longest(longest);
    let q = Shape { batch: 1, seqlen: 16_384, heads: 32, head_dim: dim };
    ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: 8, ..q }).causal().seqs_q(sequences).seqs_k(sequences)
}

#[test]
fn sequences_whose_lengths_are_data_have_varlen_plans() {
    let planned = |forward: ProblemSpec, options: PlanOptions| {
        let plan = Plan::with(&backward(forward), &H100, &options).unwrap();
        assert!(plan.dense().is_none(), "{plan}");
        let PlanKind::Varlen(varlen) = plan.kind().clone() else { panic!("{plan}") };
        (plan, varlen)
    };
    // Blocks of 64 rows and tiles of 128 keys. 4096 keys of a causal mask use additions in any order.
    let (plan, long) = planned(packed(12, 4096, 128), PlanOptions::default());
    assert_eq!(plan.dkv().tile.adds_dq, Some(AddOrder::Any));
    assert_eq!((long.block_rows(), long.places()), (64, 64 * (256 + 12 + 1)));
    assert_eq!((long.stats().most(), long.stats_grid()), (269 * 32, 269 * 32));
    assert_eq!((long.dkv().most(), long.dkv().grid()), ((128 + 12 + 1) * 8, 132));
    let order = |section, longest| Order::LongestFirst { section, longest };
    assert_eq!(long.dkv().order(), order(4, Longest::First));
    let (_, in_order) = planned(packed(12, 4096, 128), PlanOptions::default().deterministic());
    // The 4 query heads of a KV head have 64 blocks each: one KV head is enough for a section.
    assert_eq!(in_order.dkv().order(), order(1, Longest::Last));
    assert!(plan.to_string().contains("dQ         8608 CTAs that round 64 rows"), "{plan}");
    assert!(plan.to_string().contains("at most 1128 tiles, longest first, heads in sections of 4"), "{plan}");
    let (grouped, _) = planned(packed(8, 2048, 128), PlanOptions::default());
    assert_eq!(grouped.dkv().tile.adds_dq, Some(AddOrder::Any), "32 heads share 8");
    // The dQ kernel of wide heads cuts rows into blocks of 128.
    let (wide, tiles) = planned(packed(300, 60, 256), PlanOptions::default());
    assert!(matches!(wide.dq(), DqBy::Kernel(_)) && tiles.block_rows() == 128, "{wide}");
    assert_eq!(tiles.dq().unwrap().order(), order(32, Longest::Last));
    assert_eq!(tiles.stats_grid(), 2 * tiles.stats().most());
    let given = PlanOptions::default().dq(DqTile::choose(64, 64, &H100).unwrap());
    assert_eq!(planned(packed(12, 4096, 64), given).0.dkv().tile.tile_m, 64, "blocks divide dQ's blocks");
    let nothing = Sequences::packed(3);
    let none = Shape { batch: 1, seqlen: 0, heads: 1, head_dim: 64 };
    let some = Shape { seqlen: 7, ..none };
    let nothing = ProblemSpec::dense(Dtype::F16, none, some).seqs_q(nothing).seqs_k(nothing);
    let (_, tiles) = planned(nothing, PlanOptions::default());
    assert_eq!((tiles.stats_grid(), tiles.dkv().grid()), (0, 4));
}

#[test]
fn what_no_table_serves_is_refused() {
    let refused = |spec: BackwardSpec, options: &PlanOptions| {
        Plan::with(&spec.validate().unwrap(), &H100, options).unwrap_err()
    };
    let dkv = DkvTile::choose(64, 64, &H100).unwrap();
    let options = PlanOptions::default().dkv(dkv);
    let tiles = refused(BackwardSpec::contiguous(packed(3, 500, 64)), &options);
    assert_eq!(tiles, PlanError::VarlenTiles { rows: 128, block: 96 });
    let shape = Shape { batch: 2, seqlen: 300, heads: 2, head_dim: 64 };
    let used = ProblemSpec::dense(Dtype::F16, shape, shape).seqs_k(Sequences::dense(2, 300).used());
    let mut apart = BackwardSpec::contiguous(used);
    apart.dout.strides = Strides { batch: 300 * 128 + 8, ..apart.dout.strides };
    let apart = refused(apart, &PlanOptions::default());
    let text = "of sequences whose lengths are data the backward kernels take dout with a batch stride that is a \
                multiple of the row stride, not 38408 of 128";
    assert_eq!(apart.to_string(), text);
    let tiles = refused(BackwardSpec::contiguous(packed(1 << 20, 1, 64)), &PlanOptions::default());
    assert!(matches!(tiles, PlanError::Tiles(_)), "{tiles}");
}

/// Under interval masks there are as many CTAs as SMs, even for few tiles: the data decide which tiles are split.
#[test]
fn tiles_under_intervals_may_be_split() {
    let form = Intervals { of_row: IntervalsOfRow::Two, per_sequence: false, per_head: false };
    let plan = |keys| {
        let of = spec(128);
        let k = Shape { seqlen: keys, ..of.k.shape };
        let forward = ProblemSpec::dense(Dtype::Bf16, of.q.shape, k).mask(Mask::of_intervals(form));
        Plan::new(&backward(forward), &H100).unwrap()
    };
    let tiles = plan(60);
    let tiles = tiles.dense().unwrap();
    let splits = tiles.splits().unwrap();
    assert_eq!((tiles.dkv().num_tiles(), tiles.dkv().grid(), splits.most_parts()), (4, 132, 396));
    // Without keys there are no tiles.
    assert_eq!(plan(0).dense().unwrap().dkv().grid(), 0);
    let text = plan(60).to_string();
    assert!(text.contains("dynamic persistent, 132 CTAs; tiles that many rows see are split"), "{text}");
    assert!(self::plan(spec(128)).unwrap().dense().unwrap().splits().is_none());
}

#[test]
fn tiles_divide_listed_blocks() {
    let q = spec(64).q.shape;
    let of = |head_dim, words: usize, options: PlanOptions| {
        let side = BlockSide::of_words(words).unwrap();
        let form = Intervals::of_shape([1, 1, q.seqlen.div_ceil(side.rows()), words], q).unwrap();
        Plan::with(&backward(spec(head_dim).mask(Mask::of_intervals(form))), &H100, &options)
    };
    for (head_dim, (words, side)) in
        [64, 96, 128, 192, 256].into_iter().flat_map(|dim| [(3, 128_u32), (6, 64)].map(|lists| (dim, lists)))
    {
        for options in [PlanOptions::default(), PlanOptions::default().deterministic()] {
            let plan = of(head_dim, words, options).unwrap();
            let tile = plan.dkv().tile;
            let of_dq = if tile.adds_dq.is_some() { 64 } else { dq(&plan).tile.tile_n };
            assert!([tile.tile_m, of_dq].iter().all(|block| side.is_multiple_of(*block)), "{plan}");
            // No kernel counts the blocks that see a tile before tiles are computed.
            assert!(dense_plan(&plan).splits().is_none());
        }
    }
    let (dkv, even) = (DkvTile::choose(64, 64, &H100).unwrap(), DqTile::choose_even(64, 64, &H100).unwrap());
    let refused = of(64, 3, PlanOptions::default().dkv(dkv).dq(even)).unwrap_err();
    assert_eq!(refused, PlanError::BlocksTile { given: 96, side: 128 });
    assert!(!refused.is_cpu_only());
    let odd = DqTile { tile_n: 112, ..even };
    for (words, of_dq, side) in [(3, odd, 128), (6, even, 64)] {
        let refused = of(64, words, PlanOptions::default().dq(of_dq)).unwrap_err();
        assert_eq!(refused, PlanError::BlocksTile { given: of_dq.tile_n, side });
    }
}
