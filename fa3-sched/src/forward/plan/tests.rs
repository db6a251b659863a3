//! Plans compared with the definition: every tile once, and every visible pair of a query and a key once.

use std::collections::HashMap;

use fa3_types::{Dim, Lengths, Mask, ProblemError, ProblemSpec, Shape, TensorName, TokenScales};
use proptest::prelude::*;

use super::*;
use crate::certified_bound;
use crate::forward::{Loads, TileError};
use crate::{KvRange, Longest, Schedule, TileCoord};

const H100: DeviceLimits = DeviceLimits::h100_sxm();

fn dense_plan(plan: &Plan) -> &DensePlan {
    plan.dense().unwrap()
}

fn schedule(plan: &Plan) -> &Schedule {
    dense_plan(plan).schedule()
}

/// The order in sections of heads, whose last tiles are the longest.
fn in_sections(section: u32) -> Order {
    Order::LongestFirst { section, longest: Longest::Last }
}

fn dense(batch: usize, seqlens: (usize, usize), heads: (usize, usize), mask: Mask) -> Problem {
    let q = Shape { batch, seqlen: seqlens.0, heads: heads.0, head_dim: 128 };
    let kv = Shape { batch, seqlen: seqlens.1, heads: heads.1, head_dim: 128 };
    ProblemSpec::dense(Dtype::Bf16, q, kv).mask(mask).validate().unwrap()
}

/// Asserts that every tile occurs once, and that the tiles contain every visible pair. Tests of [`crate::Decoder`] and
/// [`Tiling`] compare tiles and ranges with what a kernel computes.
fn covers(plan: &Plan) {
    let problem = plan.problem();
    let (tile_m, tile_n) = (plan.tile.tile_m as usize, plan.tile.tile_n as usize);
    let mut visits: HashMap<(usize, usize, usize), KvRange<u32>> = HashMap::new();
    for work in dense_plan(plan).works() {
        let TileCoord { m_block, head, batch } = work.tile;
        let twice = visits.insert((batch as usize, head as usize, m_block as usize), work.kv);
        assert_eq!(twice, None);
    }
    for (batch, head) in (0..problem.batch()).flat_map(|b| (0..problem.heads().q()).map(move |h| (b, h))) {
        let len = Lengths { q: problem.q().shape.seqlen, k: problem.k().shape.seqlen };
        for m_block in 0..len.q.div_ceil(tile_m) {
            let kv = visits.remove(&(batch, head, m_block)).expect("a tile is missing");
            let rows = m_block * tile_m..((m_block + 1) * tile_m).min(len.q);
            for (row, key) in rows.flat_map(|row| (0..len.k).map(move |key| (row, key))) {
                let visible = problem.mask().allows(row, key, len);
                let visited = (kv.first..kv.end).contains(&((key / tile_n) as u32));
                assert!(!visible || visited, "row {row} misses key {key}");
            }
        }
    }
    assert!(visits.is_empty(), "tiles outside the problem");
}

#[test]
fn the_talks_example() {
    let row = TileRow::table().iter().find(|row| (row.tile.head_dim, row.tile.tile_m) == (128, 128)).unwrap();
    let options = PlanOptions::default().tile(row.tile);
    let plan = Plan::with(&dense(4, (4096, 4096), (8, 8), Mask::None), &H100, &options).unwrap();
    assert_eq!((schedule(&plan).num_tiles(), schedule(&plan).grid()), (1024, 132));
    assert_eq!((plan.order(), plan.scheduler()), (Order::Linear, Scheduler::StaticPersistent));
    let mut tiles = [0; 132];
    dense_plan(&plan).simulate().spans().iter().for_each(|span| tiles[span.cta as usize] += 1);
    assert!(tiles.iter().all(|n| [7, 8].contains(n)));
}

#[test]
fn causal_tiles_of_a_section_never_get_longer() {
    let plan = Plan::new(&dense(4, (4096, 4096), (8, 8), Mask::Causal), &H100).unwrap();
    // A head has 32 tiles: 3 heads have a tile for every other SM.
    assert_eq!(plan.order(), in_sections(3));
    let costs: Vec<u64> = dense_plan(&plan).works().map(|work| work.cost()).collect();
    // There are eight sections of 3 heads, and a last section of 8 heads.
    let (sections, last) = costs.split_at(8 * 3 * 32);
    assert!(sections.chunks(3 * 32).chain([last]).all(|section| section.is_sorted_by(|a, b| a >= b)));
    assert!(dense_plan(&plan).simulate().length() * 100 <= 105 * certified_bound(&costs, H100.sms));

    let options = PlanOptions::default().order(in_sections(32));
    let plan = Plan::with(plan.problem(), &H100, &options).unwrap();
    let costs: Vec<u64> = dense_plan(&plan).works().map(|work| work.cost()).collect();
    assert!(costs.is_sorted_by(|a, b| a >= b));
    assert!(dense_plan(&plan).simulate().length() * 100 <= 101 * certified_bound(&costs, H100.sms));
    // Counted by hand: 32 heads of 1 + 2 + … + 32 blocks. One block per tile lies on the diagonal.
    assert_eq!(dense_plan(&plan).cost(), Cost { blocks: 32 * 32 * 33 / 2, masked_blocks: 1024, longest: 32 });
}

#[test]
fn sections_have_a_tile_for_every_other_sm_and_keep_groups_together() {
    // A KV head has 4 query heads of 16 tiles: 2 of the 72 KV heads have a tile for every other SM.
    let plan = Plan::new(&dense(9, (2048, 2048), (32, 8), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.order(), in_sections(8));
    // Fewer heads than that form one section.
    let plan = Plan::new(&dense(1, (2048, 2048), (4, 4), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.order(), in_sections(4));
}

#[test]
fn a_window_open_to_the_right_starts_at_the_first_tile() {
    let mask = Mask::Window { left: Some(100), right: None };
    let plan = Plan::new(&dense(1, (8192, 8192), (16, 16), mask), &H100).unwrap();
    let blocks: Vec<u32> = dense_plan(&plan).works().map(|work| work.kv.blocks()).collect();
    assert!(blocks[..2 * 64].is_sorted_by(|a, b| a >= b), "a section of 2 heads");
    assert_eq!(dense_plan(&plan).works().next().unwrap().tile.m_block, 0);
}

/// With one row and many keys, each head has one tile, which visits all keys.
#[test]
fn decoding() {
    let plan = Plan::new(&dense(1, (1, 65536), (64, 8), Mask::Causal), &H100).unwrap();
    assert_eq!((plan.tile.tile_m, plan.tile.threads()), (64, 256));
    assert_eq!((schedule(&plan).num_tiles(), plan.scheduler()), (64, Scheduler::OneTile));
    assert_eq!(dense_plan(&plan).cost(), Cost { blocks: 64 * 512, masked_blocks: 0, longest: 512 });
}

/// The tiles of one head are counted, and multiplied by any number of heads and sequences.
#[test]
fn many_sequences_are_counted_at_once() {
    let plan = Plan::new(&dense(1_000_000, (1024, 1024), (64, 64), Mask::Causal), &H100).unwrap();
    let Cost { blocks, masked_blocks, longest } = dense_plan(&plan).cost();
    assert_eq!((blocks, masked_blocks, longest), (64_000_000 * 36, 64_000_000 * 8, 8));
    let few = Plan::new(&dense(3, (1000, 700), (4, 2), Mask::Causal), &H100).unwrap();
    let works: Vec<Work> = dense_plan(&few).works().collect();
    let sum = |blocks: fn(&KvRange<u32>) -> u32| works.iter().map(|work| u64::from(blocks(&work.kv))).sum();
    let longest = works.iter().map(|work| work.kv.blocks()).max().unwrap();
    let counted = Cost { blocks: sum(KvRange::blocks), masked_blocks: sum(KvRange::masked_blocks), longest };
    assert_eq!(dense_plan(&few).cost(), counted);
}

/// Whether the CTAs of a cluster visit the same KV blocks of the same head at a time.
fn go_together(plan: &Plan) -> bool {
    let (together, group) = (plan.cluster() as usize, plan.problem().heads().group_size() as u32);
    let works: Vec<Work> = dense_plan(plan).works().collect();
    let keys = |work: &Work| (work.tile.head / group, work.tile.batch, work.kv);
    let same = |a: &Work, b: &Work| keys(a) == keys(b);
    (schedule(plan).grid() as usize).is_multiple_of(together)
        && works.chunks(together).all(|works| works.iter().all(|work| same(work, &works[0])))
}

#[test]
fn pairs_of_equal_tiles_are_clusters() {
    let of = |tokens, mask| dense(4, (tokens, tokens), (8, 8), mask);
    let cluster = |problem: &Problem, options: &PlanOptions| {
        let plan = Plan::with(problem, &H100, options).unwrap();
        assert!(go_together(&plan), "{plan}");
        plan.cluster()
    };
    let (free, short, even) = (PlanOptions::default(), of(768, Mask::None), of(4096, Mask::None));
    let first = Order::LongestFirst { section: 1, longest: Longest::First };
    let no_producer = CtaTile { loads: Loads::Consumers, ..Plan::new(&even, &H100).unwrap().tile };
    for (problem, options, expected) in [
        // Four query heads with one tile each.
        (&dense(64, (1, 4096), (8, 2), Mask::None), free, 1),
        // A head has 22 tiles, then 43. In the third of these problems two heads have the same keys.
        (&even, free, 2),
        (&of(8192, Mask::None), free, 1),
        (&dense(4, (8192, 8192), (8, 4), Mask::None), free, 2),
        // Short sequences gain nothing from clusters.
        (&short, free, 1),
        (&short, free.clusters(true), 2),
        (&of(4096, Mask::Causal), free, 1),
        (&even, free.clusters(false), 1),
        (&even, free.sms(NonZeroU32::new(101).unwrap()), 1),
        (&even, free.scheduler(Scheduler::OneTile), 1),
        (&even, free.scheduler(Scheduler::DynamicPersistent), 1),
        (&even, free.order(first), 1),
        (&even, free.tile(no_producer), 1),
    ] {
        assert_eq!(cluster(problem, &options), expected, "{problem} {options:?}");
    }
    let text = Plan::new(&even, &H100).unwrap().to_string();
    assert!(text.contains("132 CTAs of 512 threads, in clusters of 2"), "{text}");
}

/// Persistent e4m3 kernels are equally fast if all tiles run at once, and spill no registers.
#[test]
fn few_tiles_of_e4m3_have_persistent_ctas() {
    let scheduler = |dtype, tokens| {
        let x = Shape { batch: 1, seqlen: tokens, heads: 8, head_dim: 128 };
        let problem = ProblemSpec::dense(dtype, x, x).mask(Mask::Causal).validate().unwrap();
        Plan::new(&problem, &H100).unwrap().scheduler()
    };
    let of = |dtype| [1024, 8192].map(|tokens| scheduler(dtype, tokens));
    assert_eq!(of(Dtype::E4m3), [Scheduler::StaticPersistent, Scheduler::DynamicPersistent]);
    assert_eq!(of(Dtype::Bf16), [Scheduler::OneTile, Scheduler::DynamicPersistent]);
}

/// The plan of 2 sequences in e4m3: rows of Q and of K, heads of Q and of K, and the head dimension.
fn of_e4m3(
    (rows, keys): (usize, usize),
    (heads, heads_kv): (usize, usize),
    head_dim: usize,
    change: fn(ProblemSpec) -> ProblemSpec,
    options: PlanOptions,
) -> Plan {
    let q = Shape { batch: 2, seqlen: rows, heads, head_dim };
    let spec = ProblemSpec::dense(Dtype::E4m3, q, Shape { seqlen: keys, heads: heads_kv, ..q });
    Plan::with(&change(spec).validate().unwrap(), &H100, &options).unwrap()
}

/// The table's tile has 128 rows: 4096 rows visit each block 32 times.
#[test]
fn v_that_is_visited_often_is_transposed_before() {
    let dense = |spec| spec;
    let window = |spec: ProblemSpec| spec.mask(Mask::Window { left: Some(900), right: Some(124) });
    let (causal, channels) = (ProblemSpec::causal, ProblemSpec::v_channels);
    type Case = ((usize, usize), (usize, usize), usize, fn(ProblemSpec) -> ProblemSpec, bool);
    let cases: [Case; 17] = [
        ((3968, 3968), (4, 4), 128, dense, false),
        ((3969, 3969), (4, 4), 128, dense, true),
        ((4096, 4096), (4, 4), 128, causal, false),
        ((8192, 8192), (4, 4), 128, causal, true),
        ((512, 512), (4, 1), 256, dense, false),
        ((1024, 1024), (4, 1), 256, dense, true),
        ((8192, 8192), (4, 4), 128, window, false),
        ((8192, 8192), (4, 1), 128, window, true),
        ((8192, 8192), (4, 4), 64, dense, false),
        ((8192, 8192), (4, 4), 128, channels, false),
        ((8192, 8192), (4, 4), 256, channels, true),
        ((8192, 8192), (4, 4), 128, ProblemSpec::transposed_v, false),
        // With more rows than keys, few rows see a key. With fewer rows, each row sees most keys.
        ((8192, 1024), (8, 8), 128, causal, false),
        ((768, 8192), (8, 1), 128, causal, true),
        ((8192, 8192), (4, 4), 128, dense, true),
        // O in bf16 takes as much memory as V in e4m3 with twice the number of rows.
        ((4096, 8192), (4, 4), 128, dense, true),
        ((4096, 8193), (4, 4), 128, dense, false),
    ];
    for (rows, heads, head_dim, change, expected) in cases {
        let plan = of_e4m3(rows, heads, head_dim, change, PlanOptions::default());
        assert_eq!(dense_plan(&plan).v_tiles().is_some(), expected, "{plan}");
    }
    // The kernel that transposes V takes all SMs.
    let most = PlanOptions::default().sms(NonZeroU32::new(131).unwrap());
    assert_eq!(dense_plan(&of_e4m3((8192, 8192), (4, 4), 128, dense, most)).v_tiles(), None);

    let plan = of_e4m3((4100, 4100), (4, 4), 128, dense, PlanOptions::default());
    assert_eq!(dense_plan(&plan).v_tiles().unwrap().m_blocks, 33);
    assert_eq!(dense_plan(&plan).transposed_v_bytes(), 2 * 4 * 128 * 33 * 128);
    let text = plan.to_string();
    let of_v = "memory     0 bytes for the tile counter, and 4325376 for V, which is transposed before";
    assert!(text.contains("V transposed,") && text.ends_with(of_v), "{text}");
}

/// The tile states whether V is transposed before attention.
#[test]
fn a_given_tile_may_take_v_transposed() {
    let q = Shape { batch: 2, seqlen: 100, heads: 4, head_dim: 128 };
    let spec = ProblemSpec::dense(Dtype::E4m3, q, q);
    let with = |spec: ProblemSpec, tile| {
        Plan::with(&spec.validate().unwrap(), &H100, &PlanOptions::default().tile(tile))
    };
    let [rows, transposed] = [spec.clone(), spec.clone().transposed_v()]
        .map(|spec| Plan::new(&spec.validate().unwrap(), &H100).unwrap().tile());
    assert_eq!(with(spec.clone(), rows).unwrap().dense().unwrap().v_tiles(), None);
    assert_eq!(with(spec.clone(), transposed).unwrap().dense().unwrap().v_tiles().unwrap().m_blocks, 1);
    let transposed_v = spec.transposed_v();
    assert_eq!(with(transposed_v.clone(), transposed).unwrap().dense().unwrap().v_tiles(), None);
    let error = with(transposed_v, rows).unwrap_err();
    assert_eq!(error, PlanError::Precision { given: rows.precision, needed: transposed.precision });
}

#[test]
fn without_a_producer_nobody_draws() {
    let problem = dense(1, (8192, 8192), (16, 16), Mask::Causal);
    let tile = CtaTile { loads: Loads::Consumers, ..Plan::new(&problem, &H100).unwrap().tile };
    let options = PlanOptions::default().tile(tile);
    let plan = Plan::with(&problem, &H100, &options).unwrap();
    assert_eq!((plan.scheduler(), schedule(&plan).counter_bytes()), (Scheduler::StaticPersistent, 0));
    let text = plan.to_string();
    assert!(text.contains("no producer") && text.contains("132 CTAs of 384 threads"), "{text}");
    assert!(text.contains("registers  168 a thread"), "{text}");
    let scheduler = Scheduler::DynamicPersistent;
    let error = Plan::with(&problem, &H100, &options.scheduler(scheduler)).unwrap_err();
    assert_eq!(error, PlanError::NoProducer { scheduler });
}

#[test]
fn some_sms_are_left_to_other_work() {
    let problem = dense(4, (4096, 4096), (8, 8), Mask::Causal);
    let some = |sms| PlanOptions::default().sms(NonZeroU32::new(sms).unwrap());
    let plan = Plan::with(&problem, &H100, &some(100)).unwrap();
    assert_eq!((schedule(&plan).sms().get(), schedule(&plan).grid()), (100, 100));
    assert_eq!(plan.order(), in_sections(2));
    let plan = Plan::with(&problem, &H100, &some(1000)).unwrap();
    assert_eq!((schedule(&plan).sms(), schedule(&plan).grid()), (H100.sms, 132));
}

#[test]
fn nothing_to_do_is_an_empty_plan() {
    for problem in [dense(0, (128, 128), (4, 4), Mask::Causal), dense(3, (0, 128), (4, 2), Mask::None)] {
        let plan = Plan::new(&problem, &H100).unwrap();
        let schedule = schedule(&plan);
        assert_eq!((schedule.num_tiles(), schedule.grid(), schedule.tile(0)), (0, 0, None));
        let of = dense_plan(&plan);
        assert_eq!((of.works().count(), of.cost(), of.simulate().length()), (0, Cost::default(), 0));
    }
    // Queries without keys still have tiles, which write O = 0.
    let plan = Plan::new(&dense(2, (200, 0), (4, 4), Mask::Causal), &H100).unwrap();
    assert_eq!((schedule(&plan).num_tiles(), dense_plan(&plan).cost().blocks), (16, 0));
}

/// Problems that only the CPU computes are refused, with their numbers.
#[test]
fn what_no_forward_kernel_computes() {
    let refused = |spec: ProblemSpec| {
        let error = Plan::new(&spec.validate().unwrap(), &H100).unwrap_err();
        assert!(error.is_cpu_only(), "{error}");
        error
    };
    let shape = Shape { batch: 2, seqlen: 64, heads: 1, head_dim: 64 };
    let spec = |dtype| ProblemSpec::dense(dtype, shape, shape);
    assert_eq!(refused(spec(Dtype::F32)), PlanError::Dtype { dtype: Dtype::F32 });
    assert_eq!(refused(spec(Dtype::F32)).to_string(), "the forward kernels take f16, bf16 and e4m3, not f32");

    let wide = |spec: ProblemSpec| refused(spec.head_dim_v(512)).to_string();
    let none = "the forward kernels have no tile for head_dim 64 and head_dim_v 512";
    assert_eq!(wide(spec(Dtype::E4m3)), format!("{none}: of FP8 they take up to 256 and 256"));
    let q = Shape { head_dim: 576, ..shape };
    let none = "the forward kernels have no tile for head_dim 576 and head_dim_v 512";
    let converted = format!("{none}: of 16 bits, converted from e4m3 they take up to 512 and 512");
    assert_eq!(wide(ProblemSpec::dense(Dtype::F16, q, q).e4m3_keys()), converted);
    let q = Shape { head_dim: 512, ..shape };
    let tokens = ProblemSpec::dense(Dtype::F16, q, q).e4m3_keys().token_scales(TokenScales::contiguous(q));
    let error = PlanError::TokenScales { head_dim: 512, head_dim_v: 512, most: 256 };
    assert_eq!(refused(tokens), error);
    let q = Shape { head_dim: 72, ..shape };
    let latent = ProblemSpec::dense(Dtype::F16, q, q).head_dim_v(64);
    let (head_dim, head_dim_v) = (72, 64);
    let error = PlanError::Latent { head_dim, head_dim_v, most: 64, most_v: 512 };
    assert_eq!(refused(latent.clone().qv(latent.o)), error);

    let (dtype, tensor, multiple) = (Dtype::F16, TensorName::O, 8);
    let rows = ProblemError::HeadDimMultiple { tensor: TensorName::V, given: 33, multiple, dtype };
    assert_eq!(refused(spec(dtype).head_dim_v(33)), Box::new(rows).into());
    let mut odd = spec(dtype);
    odd.o.strides.seqlen += 1;
    odd.o.strides.batch *= 2;
    let stride = ProblemError::StrideMultiple { tensor, dim: Dim::Seqlen, given: 65, multiple };
    assert_eq!(refused(odd), Box::new(stride).into());
}

#[test]
fn what_cannot_be_planned() {
    let refused = |problem: &Problem, limits, options| {
        let error = Plan::with(problem, limits, &options).unwrap_err();
        assert!(!error.is_cpu_only(), "{error}");
        error
    };
    let open = PlanOptions::default();
    let small = H100.smem_bytes(100 << 10);
    let memory = TileError::SharedMemory { needed: (168 << 10) + 1024, available: 100 << 10 };
    let problem = dense(1, (4096, 4096), (8, 8), Mask::None);
    assert_eq!(refused(&problem, &small, open), PlanError::Tile(memory));

    let many = dense(1 << 20, (1 << 20, 1), (1, 1), Mask::None);
    let text = "8589934592 tiles are too many to number, the limit is 2147483647";
    assert_eq!(refused(&many, &H100, open).to_string(), text);

    let narrow = open.tile(TileRow::table()[0].tile);
    let text = "the given tile takes head_dim up to 64 and head_dim_v up to 64, not 128 and 128";
    assert_eq!(refused(&problem, &H100, narrow).to_string(), text);
}

#[test]
fn the_largest_lengths_plan() {
    let longest = i32::MAX as usize;
    let plan = Plan::new(&dense(1, (longest, longest), (1, 1), Mask::Causal), &H100).unwrap();
    let last = dense_plan(&plan).works().next().unwrap();
    assert_eq!(last.tile.m_block as usize, longest.div_ceil(192) - 1);
    assert_eq!(last.kv.end as usize, longest.div_ceil(80));
    let plan = Plan::new(&dense(1, (longest, 1 << 18), (100, 100), Mask::None), &H100).unwrap();
    assert_eq!(schedule(&plan).num_tiles(), 100 * longest.div_ceil(192) as u32);
}

#[test]
fn a_plan_prints() {
    let text = "\
problem    bf16 batch 4 seqlen 4096 x 4096 heads 8/8 head_dim 128 mask causal scale 0.088388
tile       128 x 128, 3 stages, QK and PV issued together, lazy rescaling, ping-pong
           fewer rows and square tiles waste less where sequences are short; without turns -2 to -9 %
heads      8 of Q, 8 of K and V
order      longest first, heads in sections of 3
scheduler  dynamic persistent, 132 CTAs of 384 threads
tiles      1024
KV blocks  16896, 1024 of them masked, at most 32 a tile
registers  168 at entry, then 24 a producer and 240 a consumer thread
           160 of them hold S, P and O
shared     225 KiB: Q 32, K 96, V 96, reserve 1
memory     4 bytes for the tile counter";
    let plan = Plan::new(&dense(4, (4096, 4096), (8, 8), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.to_string(), text);
}

prop_compose! {
    fn masks()(
        kind in 0usize..3, left in proptest::option::of(0u32..300), right in proptest::option::of(0u32..300),
        chunk in prop_oneof![2 => Just(0), 1 => 1_i64..300],
    ) -> Mask {
        let mask = [Mask::None, Mask::Causal, Mask::Window { left, right }][kind];
        mask.and(Mask::from_chunk(chunk).unwrap()).unwrap()
    }
}

prop_compose! {
    fn problems()(
        batch in 0usize..4,
        (q, k) in (0usize..300, 0usize..500),
        mask in masks(),
        (heads_kv, group) in (1usize..4, 1usize..9),
        head_dims in (1usize..=16, 1usize..=16),
        dtype in prop_oneof![Just(Dtype::F16), Just(Dtype::Bf16)],
    ) -> Problem {
        let q = Shape { batch, seqlen: q, heads: heads_kv * group, head_dim: 16 * head_dims.0 };
        let kv = Shape { seqlen: k, heads: heads_kv, ..q };
        ProblemSpec::dense(dtype, q, kv).head_dim_v(16 * head_dims.1).mask(mask).validate().unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn causal_tiles_of_one_section_never_get_longer(q in 1usize..3000, k in 0usize..3000, heads in 1usize..4) {
        let options = PlanOptions::default().order(in_sections(u32::MAX));
        let plan = Plan::with(&dense(2, (q, k), (heads, heads), Mask::Causal), &H100, &options).unwrap();
        prop_assert!(dense_plan(&plan).works().map(|work| work.cost()).is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn any_problem_plans_and_is_covered(problem in problems(), sms in 1u32..150) {
        let options = PlanOptions::default().clusters(true);
        let plan = Plan::with(&problem, &H100.sms(NonZeroU32::new(sms).unwrap()), &options).unwrap();
        covers(&plan);
        prop_assert!(go_together(&plan));
        prop_assert_eq!(plan.to_string().lines().count(), 12);
        let schedule = schedule(&plan);
        prop_assert_eq!(dense_plan(&plan).simulate().spans().len(), schedule.num_tiles() as usize);
        prop_assert!(schedule.grid() <= schedule.num_tiles() && (schedule.grid() > 0 || schedule.num_tiles() == 0));
    }

    #[test]
    fn any_order_is_covered(problem in problems(), section in 0u32..9, linear: bool) {
        let longest = Longest::from(problem.mask());
        let order = if linear { Order::Linear } else { Order::LongestFirst { section, longest } };
        let plan = Plan::with(&problem, &H100, &PlanOptions::default().order(order)).unwrap();
        prop_assert_eq!(schedule(&plan).order(), order);
        covers(&plan);
    }
}
