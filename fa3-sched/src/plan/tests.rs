//! Plans against the definition: every tile once, every visible pair of a query and a key once.

use std::collections::HashMap;

use fa3_types::{Dtype, ProblemSpec, Sequences, Shape};
use proptest::prelude::*;

use super::*;
use crate::checked::Checked;
use crate::{CtaTile, Inputs, certified_bound};

const H100: DeviceLimits = DeviceLimits::h100_sxm();

fn dense(batch: usize, seqlens: (usize, usize), heads: (usize, usize), mask: Mask) -> Problem {
    let q = Shape { batch, seqlen: seqlens.0, heads: heads.0, head_dim: 128 };
    let kv = Shape { batch, seqlen: seqlens.1, heads: heads.1, head_dim: 128 };
    ProblemSpec::dense(Dtype::Bf16, q, kv).mask(mask).validate().unwrap()
}

fn packed(q: &[i32], k: &[i32], mask: Mask) -> Problem {
    let seqs = |rows: &[i32]| Sequences::packed(rows).unwrap();
    ProblemSpec::packed(Dtype::F16, (4, 4), 64, seqs(q), seqs(k)).mask(mask).validate().unwrap()
}

/// What a kernel would compute for tile `index` of `run`: the generic functions over checked integers.
fn as_a_kernel(plan: &Plan, run: &Run<u32>, index: u32) -> Work {
    let (run, tiling) = (run.map(Checked::from), plan.tiling.map(Checked::from));
    let tile = run.decode(index.into());
    let kv = tiling.kv_range(tile.m_block, run.lens);
    let kv = kv.split(tile.split, run.decoder.splits());
    let [m_block, head, batch, split] = [tile.m_block, tile.head, tile.batch, tile.split].map(|n| n.0 as u32);
    let [first, unmasked_first, unmasked_end, end] =
        [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end].map(|n| n.0 as u32);
    let tile = Tile { m_block, head, batch, split };
    Work { tile, kv: KvRange { first, unmasked_first, unmasked_end, end } }
}

/// Every tile once, none besides, and in them every visible pair once.
fn covers(plan: &Plan) {
    let problem = &plan.problem;
    let group = problem.heads().group_size();
    let pack = if plan.tiling.is_packed() { group } else { 1 };
    // Groups are not cut: a tile has as many rows as whole groups give it.
    let tile_m = plan.row.shape.tile_m as usize / pack * pack;
    let tile_n = plan.row.shape.tile_n as usize;
    let mut visits: HashMap<(usize, usize, usize), Vec<KvRange<u32>>> = HashMap::new();
    for (index, work) in plan.tiles().enumerate() {
        assert_eq!(plan.tile(index as u32), Some(work));
        let run = plan.runs.iter().rfind(|run| run.first_tile as usize <= index).unwrap();
        assert_eq!(as_a_kernel(plan, run, index as u32), work);
        let Tile { m_block, head, batch, .. } = work.tile;
        visits.entry((batch as usize, head as usize, m_block as usize)).or_default().push(work.kv);
    }
    assert_eq!(plan.tile(plan.num_tiles), None);
    for batch in 0..problem.batch() {
        let len = problem.lengths(batch);
        for m_block in 0..(len.q * pack).div_ceil(tile_m) {
            let mut blocks = vec![0; len.k.div_ceil(tile_n)];
            for head in 0..problem.heads().q() / pack {
                let parts = visits.remove(&(batch, head, m_block)).expect("a tile is missing");
                assert_eq!(parts.len(), plan.splits as usize);
                let visited = parts.into_iter().flat_map(|kv| kv.first..kv.end);
                visited.for_each(|block| blocks[block as usize] += 1);
            }
            let heads = problem.heads().q() / pack;
            assert!(
                blocks.iter().all(|&n| n == 0 || n == heads),
                "every head's blocks are the same, each once"
            );
            let rows = m_block * tile_m..((m_block + 1) * tile_m).min(len.q * pack);
            for (row, key) in rows.step_by(pack).flat_map(|row| (0..len.k).map(move |key| (row, key))) {
                let visible = problem.mask().allows(row / pack, key, len);
                assert!(!visible || blocks[key / tile_n] > 0, "row {row} misses key {key}");
            }
        }
    }
    assert!(visits.is_empty(), "tiles outside the problem");
}

#[test]
fn the_talks_example() {
    let row =
        TileRow::table().iter().find(|row| (row.shape.head_dim, row.shape.tile_m) == (128, 128)).copied();
    let options = PlanOptions { row, ..PlanOptions::default() };
    let plan = Plan::with(&dense(4, (4096, 4096), (8, 8), Mask::None), &H100, &options).unwrap();
    assert_eq!((plan.num_tiles, plan.grid, plan.splits), (1024, 132, 1));
    assert_eq!((plan.order, plan.scheduler), (Order::Linear, Scheduler::StaticPersistent));
    let mut tiles = [0; 132];
    plan.simulate().spans().iter().for_each(|span| tiles[span.cta as usize] += 1);
    assert!(tiles.iter().all(|n| [7, 8].contains(n)));
}

#[test]
fn causal_tiles_of_a_section_never_get_longer() {
    let plan = Plan::new(&dense(4, (4096, 4096), (8, 8), Mask::Causal), &H100).unwrap();
    // A head has 32 tiles: 3 heads have one for every other SM.
    assert_eq!(plan.order, Order::LongestFirst { section: 3, longest: Longest::Last });
    let costs: Vec<u64> = plan.tiles().map(|work| work.cost()).collect();
    // Eight of 3 heads, and a last one of 8.
    let (sections, last) = costs.split_at(8 * 3 * 32);
    assert!(sections.chunks(3 * 32).chain([last]).all(|section| section.is_sorted_by(|a, b| a >= b)));
    assert!(plan.simulate().length() * 100 <= 105 * certified_bound(&costs, H100.sms));

    let options = PlanOptions {
        order: Some(Order::LongestFirst { section: 32, longest: Longest::Last }),
        ..PlanOptions::default()
    };
    let plan = Plan::with(&plan.problem, &H100, &options).unwrap();
    let costs: Vec<u64> = plan.tiles().map(|work| work.cost()).collect();
    assert!(costs.is_sorted_by(|a, b| a >= b));
    assert!(plan.simulate().length() * 100 <= 101 * certified_bound(&costs, H100.sms));
    // By hand: 32 heads of 1 + 2 + … + 32 blocks, of which one a tile lies on the diagonal.
    assert_eq!(plan.cost(), Cost { blocks: 32 * 32 * 33 / 2, masked_blocks: 1024, longest: 32 });
}

#[test]
fn sections_have_a_tile_for_every_other_sm_and_keep_groups_together() {
    // A KV head has 4 query heads of 16 tiles: 2 of the 72 have one for every other SM, with their query heads.
    let plan = Plan::new(&dense(9, (2048, 2048), (32, 8), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.order, Order::LongestFirst { section: 8, longest: Longest::Last });
    // Fewer heads than that are one section.
    let plan = Plan::new(&dense(1, (2048, 2048), (4, 4), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.order, Order::LongestFirst { section: 4, longest: Longest::Last });
}

#[test]
fn a_window_open_to_the_right_starts_at_the_first_tile() {
    let mask = Mask::Window { left: Some(100), right: None };
    let plan = Plan::new(&dense(1, (8192, 8192), (16, 16), mask), &H100).unwrap();
    let blocks: Vec<u32> = plan.tiles().map(|work| work.kv.blocks()).collect();
    assert!(blocks[..2 * 64].is_sorted_by(|a, b| a >= b), "a section of 2 heads");
    assert_eq!(plan.tiles().next().unwrap().tile.m_block, 0);
}

#[test]
fn decoding_packs_and_splits() {
    let plan = Plan::new(&dense(1, (1, 65536), (64, 8), Mask::Causal), &H100).unwrap();
    assert!(plan.tiling.is_packed());
    assert_eq!((plan.row.shape.tile_m, plan.row.shape.threads()), (64, 256));
    assert_eq!((plan.splits, plan.num_tiles, plan.scheduler), (14, 112, Scheduler::OneTile));
    let rows = 64;
    let Workspace { partial_o, partial_lse, counter } = plan.workspace;
    assert_eq!((partial_o, partial_lse, counter), (14 * rows * 128 * 4, 14 * rows * 4, 0));
    let one = PlanOptions { splits: NonZeroU32::new(1), ..PlanOptions::default() };
    let plan = Plan::with(&plan.problem, &H100, &one).unwrap();
    assert_eq!((plan.splits, plan.num_tiles, plan.workspace.total()), (1, 8, 0));

    let shape = |seqlen| Shape { batch: 1, seqlen, heads: 1, head_dim: 192 };
    let narrow = ProblemSpec::dense(Dtype::Bf16, shape(1), shape(65536)).head_dim_v(128);
    let plan = Plan::new(&narrow.validate().unwrap(), &H100).unwrap();
    assert_eq!(plan.workspace.partial_o, u64::from(plan.splits) * 128 * 4);
}

#[test]
fn without_a_producer_nobody_draws() {
    let problem = dense(1, (8192, 8192), (16, 16), Mask::Causal);
    let row = Plan::new(&problem, &H100).unwrap().row;
    let row = TileRow { shape: CtaTile { loads: Loads::Consumers, ..row.shape }, ..row };
    let options = PlanOptions { row: Some(row), ..PlanOptions::default() };
    let plan = Plan::with(&problem, &H100, &options).unwrap();
    assert_eq!((plan.scheduler, plan.workspace.total()), (Scheduler::StaticPersistent, 0));
    let text = plan.to_string();
    assert!(text.contains("no producer") && text.contains("132 CTAs of 384 threads"), "{text}");
    assert!(text.contains("registers  168 a thread"), "{text}");
}

/// Makespans in parts and whole, the first without the combination.
fn with_and_without_splits(problem: &Problem) -> (u32, u64, u64) {
    let plan = Plan::new(problem, &H100).unwrap();
    let one = PlanOptions { splits: NonZeroU32::new(1), ..PlanOptions::default() };
    let whole = Plan::with(problem, &H100, &one).unwrap();
    (plan.splits, plan.simulate().length(), whole.simulate().length())
}

#[test]
fn the_last_wave_is_spread() {
    // Decoding against 32 Ki keys: 136, 160 and 192 tiles of 256 blocks, a second wave of 4, 28 and 60.
    for (batch, splits, length) in [(17, 4, 325), (20, 3, 348), (24, 2, 387)] {
        let problem = dense(batch, (1, 32768), (64, 8), Mask::Causal);
        assert_eq!(with_and_without_splits(&problem), (splits, length, 514), "batch {batch}");
    }
    // 32 tiles of a head, of 1 to 32 blocks: one wave, as long as its longest tile.
    let problem = dense(1, (4096, 4096), (4, 4), Mask::Causal);
    assert_eq!(with_and_without_splits(&problem), (2, 19, 33));
    // Where tiles come in many waves they stay whole.
    for mask in [Mask::None, Mask::Causal] {
        assert_eq!(Plan::new(&dense(8, (4096, 4096), (16, 16), mask), &H100).unwrap().splits, 1);
    }
}

#[test]
fn heads_beyond_l2_are_cut_if_their_tiles_sweep_them_twice() {
    // K and V of 128 Ki keys have 64 MiB. 264 tiles of 192 rows are two waves.
    let splits = |q| Plan::new(&dense(1, (q, 128 << 10), (1, 1), Mask::None), &H100).unwrap().splits;
    assert_eq!([263 * 192, 263 * 192 + 1].map(splits), [1, 2]);
    // 132 heads of a third of a wave are many more tiles, but no head is swept twice.
    let many = dense(1, (44 * 128, 128 << 10), (132, 132), Mask::None);
    assert_eq!(Plan::new(&many, &H100).unwrap().splits, 1);
    // One long sequence is enough.
    let keys = [0, 256 << 10, 512 << 10];
    let long = |q| Plan::new(&packed(&[0, 1280, 1280 + q], &keys, Mask::None), &H100).unwrap().splits;
    assert_eq!(long(264 * 192), 2);
}

/// The longest sequence decides where it alone keeps the device waiting; many short ones are split with it.
#[test]
fn one_long_sequence_splits_the_batch() {
    let ends = |lens: &[i32]| {
        let sums = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        std::iter::once(0).chain(sums).collect::<Vec<_>>()
    };
    let splits = |keys: &[i32]| {
        Plan::new(&packed(&ends(&vec![1; keys.len()]), &ends(keys), Mask::Causal), &H100).unwrap().splits
    };
    assert_eq!(splits(&[256; 33]), 1);
    let mut keys = [256; 33];
    keys[7] = 65536;
    assert!(splits(&keys) > 8);
}

#[test]
fn any_group_that_fits_a_tile_packs() {
    for (heads, used) in
        [((28, 4), 63), ((24, 8), 63), ((40, 8), 60), ((48, 8), 60), ((96, 8), 60), ((71, 1), 71)]
    {
        let plan = Plan::new(&dense(2, (1, 300), heads, Mask::Causal), &H100).unwrap();
        assert!(plan.tiling.is_packed());
        assert_eq!(
            (plan.tiling.tile_m(), plan.num_tiles / plan.splits),
            (used, 2 * heads.1 as u32),
            "{heads:?}"
        );
        covers(&plan);
    }
    // A whole group must fit.
    let problem = dense(1, (1, 300), (129, 1), Mask::Causal);
    assert!(!Plan::new(&problem, &H100).unwrap().tiling.is_packed());
    let pack = PlanOptions { pack_gqa: Some(true), ..PlanOptions::default() };
    let error = Plan::with(&problem, &H100, &pack).unwrap_err();
    assert_eq!(error, PlanError::Packing { group: 129, tile_m: 128 });
}

#[test]
fn a_packed_tile_that_does_not_fit_is_not_chosen() {
    // 60 rows fit a decoding tile of 146 KiB, 120 packed rows take one of 162 KiB.
    let problem = dense(1, (60, 4096), (8, 4), Mask::None);
    let small = DeviceLimits { smem_bytes: 155 << 10, ..H100 };
    let plan = Plan::new(&problem, &small).unwrap();
    assert_eq!((plan.tiling.is_packed(), plan.row.shape.tile_m), (false, 64));
    let pack = PlanOptions { pack_gqa: Some(true), ..PlanOptions::default() };
    let error = Plan::with(&problem, &small, &pack).unwrap_err();
    assert_eq!(error, PlanError::SharedMemory { needed: (160 << 10) + 2048, available: 155 << 10 });
}

#[test]
fn packing_can_be_asked_for_or_refused() {
    // 4 packed heads of 210 rows take 8 tiles instead of 12; groups of 3 leave 2 of 128 rows unused.
    let plan = Plan::new(&dense(1, (70, 1000), (12, 4), Mask::None), &H100).unwrap();
    assert_eq!((plan.tiling.is_packed(), plan.tiling.tile_m(), plan.num_tiles / plan.splits), (true, 126, 8));
    assert!(plan.to_string().contains("groups packed into tiles, 126 of 128 rows used"), "{plan}");
    covers(&plan);
    let problem = dense(1, (4096, 4096), (16, 4), Mask::None);
    let with = |pack| {
        Plan::with(&problem, &H100, &PlanOptions { pack_gqa: pack, ..PlanOptions::default() }).unwrap()
    };
    assert!(!with(None).tiling.is_packed());
    assert!(!with(Some(false)).tiling.is_packed());
    assert!(with(Some(true)).tiling.is_packed());
    covers(&with(Some(true)));
}

#[test]
fn unequal_sequences_come_longest_first() {
    let rows = [0, 300, 300, 1324, 1400];
    let plan = Plan::new(&packed(&rows, &rows, Mask::Causal), &H100).unwrap();
    let runs: Vec<_> = plan.runs.iter().map(|run| (run.first_batch, run.lens.q)).collect();
    assert_eq!(runs, [(2, 1024), (0, 300), (3, 76)]);
    covers(&plan);
    let linear = PlanOptions { order: Some(Order::Linear), ..PlanOptions::default() };
    let plan = Plan::with(&plan.problem, &H100, &linear).unwrap();
    assert!(plan.runs.iter().map(|run| run.first_batch).eq([0, 2, 3]));
    covers(&plan);
    // Equal sequences are one run only if no other lies between them, not even an empty one.
    let plan = Plan::new(&packed(&[0, 90, 90, 180, 270], &[0, 9, 18, 27, 36], Mask::None), &H100).unwrap();
    assert!(plan.runs.iter().map(|run| run.first_batch).eq([0, 2]));
    covers(&plan);
}

#[test]
fn nothing_to_do_is_an_empty_plan() {
    for problem in [
        dense(0, (128, 128), (4, 4), Mask::Causal),
        dense(3, (0, 128), (4, 2), Mask::None),
        packed(&[0], &[0], Mask::None),
        packed(&[0, 0, 0], &[0, 5, 9], Mask::Causal),
    ] {
        let plan = Plan::new(&problem, &H100).unwrap();
        assert_eq!((plan.num_tiles, plan.grid, plan.tiles().count(), plan.cost().blocks), (0, 0, 0, 0));
        assert_eq!((plan.simulate().length(), plan.tile(0)), (0, None));
    }
    // Queries without keys have tiles all the same: O is 0 there, and someone must write it.
    let plan = Plan::new(&dense(2, (200, 0), (4, 4), Mask::Causal), &H100).unwrap();
    assert_eq!((plan.num_tiles, plan.cost().blocks), (16, 0));
}

#[test]
fn what_cannot_be_planned() {
    let shape = Shape { batch: 1, seqlen: 64, heads: 1, head_dim: 64 };
    let f32 = ProblemSpec::dense(Dtype::F32, shape, shape).validate().unwrap();
    assert_eq!(Plan::new(&f32, &H100).unwrap_err(), PlanError::Dtype { dtype: Dtype::F32 });

    let small = DeviceLimits { smem_bytes: 100 << 10, ..H100 };
    let error = Plan::new(&dense(1, (4096, 4096), (8, 8), Mask::None), &small).unwrap_err();
    assert_eq!(error, PlanError::SharedMemory { needed: (168 << 10) + 2048, available: 100 << 10 });

    let many = dense(1 << 20, (1 << 20, 1), (1, 1), Mask::None);
    let tiles = (1u128 << 20) * (1 << 13);
    assert_eq!(Plan::new(&many, &H100).unwrap_err(), PlanError::Tiles { tiles, limit: TILE_LIMIT });

    let large = PlanOptions { splits: NonZeroU32::new(u32::MAX), ..PlanOptions::default() };
    let error =
        Plan::with(&dense(1 << 20, (1, 1 << 20), (1 << 10, 1), Mask::None), &H100, &large).unwrap_err();
    assert!(matches!(error, PlanError::Tiles { .. }), "{error}");

    let row = TileRow::table().iter().find(|row| row.shape.inputs == Inputs::E4m3).copied();
    let error = Plan::with(&many, &H100, &PlanOptions { row, ..PlanOptions::default() }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the chosen tile takes e4m3 up to head_dim 64 and head_dim_v 64, not bf16 with 128 and 128"
    );
}

#[test]
fn the_largest_lengths_plan() {
    let longest = i32::MAX as usize;
    let plan = Plan::new(&dense(1, (longest, longest), (1, 1), Mask::Causal), &H100).unwrap();
    let last = plan.tile(0).unwrap();
    assert_eq!(last, as_a_kernel(&plan, &plan.runs[0], 0));
    assert_eq!(last.tile.m_block as usize, longest.div_ceil(192) - 1);
    assert_eq!(last.kv.end as usize, longest.div_ceil(80));
    // K and V exceed L2 and would be cut, but twice as many tiles could not be numbered.
    let plan = Plan::new(&dense(1, (longest, 1 << 18), (100, 100), Mask::None), &H100).unwrap();
    assert_eq!((plan.splits, plan.num_tiles), (1, 100 * longest.div_ceil(192) as u32));
    // The most rows of 8 heads that pack; with one more, row numbers do not fit 31 bits.
    let most = (1 << 28) - 16;
    let pack = PlanOptions { pack_gqa: Some(true), ..PlanOptions::default() };
    let plan = Plan::with(&dense(1, (most, 1), (8, 1), Mask::Causal), &H100, &pack).unwrap();
    let last = plan.tile(0).unwrap();
    assert_eq!(last, as_a_kernel(&plan, &plan.runs[0], 0));
    assert_eq!((plan.num_tiles, last.tile.m_block, last.kv.blocks()), ((1 << 24) - 1, (1 << 24) - 2, 1));
    let error = Plan::with(&dense(1, (most + 1, 1), (8, 1), Mask::None), &H100, &pack).unwrap_err();
    assert_eq!(error, PlanError::Packing { group: 8, tile_m: 128 });
}

#[test]
fn a_plan_prints() {
    let text = "\
problem    bf16 batch 4 seqlen 4096 x 4096 heads 8/8 head_dim 128 mask causal scale 0.088388
tile       128 x 128, 3 stages, P in registers, softmax under GEMM, rescale when needed, ping-pong
           fewer rows and square tiles waste less where sequences are short; without turns -2 to -9 %
heads      8 of Q, 8 of K and V
order      longest first, heads in sections of 3
scheduler  dynamic persistent, 132 CTAs of 384 threads
tiles      1024
KV blocks  16896, 1024 of them masked, at most 32 a tile
registers  168 at entry, then 24 a producer and 240 a consumer thread
           160 of them hold S, P and O
shared     226 KiB: Q 32, K 96, V 96, reserve 2
workspace  4 bytes";
    let plan = Plan::new(&dense(4, (4096, 4096), (8, 8), Mask::Causal), &H100).unwrap();
    assert_eq!(plan.to_string(), text);

    let decode = Plan::new(&dense(1, (1, 65536), (64, 8), Mask::Causal), &H100).unwrap().to_string();
    assert!(decode.contains("heads      64 of Q, 8 of K and V, groups packed into tiles"), "{decode}");
    assert!(decode.contains("tiles      112, KV ranges in 14 parts"), "{decode}");
    let rows = [0, 300, 8300];
    let unequal = Plan::new(&packed(&rows, &rows, Mask::None), &H100).unwrap().to_string();
    assert!(unequal.contains("tiles      352, KV ranges in 2 parts, 2 runs of sequences"), "{unequal}");
    assert!(unequal.contains("scheduler  dynamic persistent"), "{unequal}");
}

prop_compose! {
    fn sequences(batch: usize, longest: i32)(
        lens in proptest::collection::vec(0..longest, batch),
        used in proptest::option::of(proptest::collection::vec(0.0f64..1.1, batch)),
        is_packed: bool,
    ) -> Sequences {
        let ends = std::iter::once(0).chain(lens.iter().scan(0, |end, len| { *end += len; Some(*end) }));
        let capacity = lens.iter().max().map_or(0, |&len| len as usize);
        let seqs = match is_packed {
            true => Sequences::packed(&ends.collect::<Vec<_>>()).unwrap(),
            false => Sequences::dense(batch, capacity),
        };
        let Some(used) = used else { return seqs };
        let rows = |(i, share): (usize, f64)| (seqs.capacity(i) as f64 * share.min(1.0)) as i32;
        let used: Vec<i32> = used.into_iter().enumerate().map(rows).collect();
        seqs.with_used(&used).unwrap()
    }
}

prop_compose! {
    fn masks()(
        kind in 0usize..3, left in proptest::option::of(0u32..300), right in proptest::option::of(0u32..300),
    ) -> Mask {
        [Mask::None, Mask::Causal, Mask::Window { left, right }][kind]
    }
}

prop_compose! {
    fn problems()(batch in 0usize..4)(
        seqs_q in sequences(batch, 300),
        seqs_k in sequences(batch, 500),
        mask in masks(),
        heads_kv in 1usize..4,
        group in 1usize..9,
        head_dims in (1usize..=16, 1usize..=16),
        dtype in prop_oneof![Just(Dtype::F16), Just(Dtype::Bf16), Just(Dtype::E4m3)],
    ) -> Problem {
        let shape = |seqs: &Sequences, heads, head_dim| {
            let rows = || (0..seqs.count()).map(|index| seqs.capacity(index));
            let (batch, seqlen) = match seqs.is_packed() {
                true => (1, rows().sum()),
                false => (seqs.count(), rows().max().unwrap_or(0)),
            };
            Shape { batch, seqlen, heads, head_dim }
        };
        let (head_dim, head_dim_v) = (16 * head_dims.0, 16 * head_dims.1);
        let q = shape(&seqs_q, heads_kv * group, head_dim);
        let kv = shape(&seqs_k, heads_kv, head_dim);
        let spec = ProblemSpec::dense(dtype, q, kv).seqs_q(seqs_q).seqs_k(seqs_k);
        spec.head_dim_v(head_dim_v).mask(mask).validate().unwrap()
    }
}

proptest! {
    #[test]
    fn causal_tiles_of_one_section_never_get_longer(q in 1usize..3000, k in 0usize..3000, heads in 1usize..4) {
        let order = Some(Order::LongestFirst { section: u32::MAX, longest: Longest::Last });
        let options = PlanOptions { order, splits: NonZeroU32::new(1), ..PlanOptions::default() };
        let plan = Plan::with(&dense(2, (q, k), (heads, heads), Mask::Causal), &H100, &options).unwrap();
        prop_assert!(plan.tiles().map(|work| work.cost()).is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn any_problem_plans_and_is_covered(problem in problems(), sms in 1u32..150) {
        let limits = DeviceLimits { sms: NonZeroU32::new(sms).unwrap(), ..H100 };
        let plan = Plan::new(&problem, &limits).unwrap();
        covers(&plan);
        prop_assert!(plan.to_string().lines().count() > 8);
        prop_assert_eq!(plan.simulate().spans().len(), plan.num_tiles as usize);
        prop_assert!(plan.grid <= plan.num_tiles && (plan.grid > 0 || plan.num_tiles == 0));
    }

    #[test]
    fn any_choice_is_covered(
        problem in problems(), pack in proptest::option::of(any::<bool>()), splits in 1u32..6, section in 0u32..9,
        linear: bool,
    ) {
        let longest = Longest::from(problem.mask());
        let order = Some(if linear { Order::Linear } else { Order::LongestFirst { section, longest } });
        let options = PlanOptions { pack_gqa: pack, splits: NonZeroU32::new(splits), order, ..PlanOptions::default() };
        match Plan::with(&problem, &H100, &options) {
            Ok(plan) => {
                prop_assert_eq!((plan.splits, Some(plan.order)), (splits, order));
                prop_assert!(pack.is_none_or(|pack| pack == plan.tiling.is_packed() || problem.heads().group_size() == 1));
                covers(&plan);
            }
            Err(error) => prop_assert!(matches!(error, PlanError::Packing { .. }), "{error}"),
        }
    }
}
