//! Tests of plans with split-KV.

use fa3_types::{Dtype, ExtraCache, Mask, ProblemSpec, Sequences, Shape, TensorDesc};

use super::*;
use crate::DeviceLimits;
use crate::forward::{Pieces, Plan, PlanKind, Precision, RunningO};

/// Attention of `batch` sequences with `rows` rows of Q and `pages` pages of 16 rows each.
fn plan_of(
    [batch, rows, pages]: [usize; 3],
    heads: (usize, usize),
    split_keys: SplitKeys,
    change: impl Fn(ProblemSpec) -> ProblemSpec,
) -> Result<Plan, PlanError> {
    let q = Shape { batch, seqlen: rows, heads: heads.0, head_dim: 128 };
    let kv = Shape { batch: 1000, seqlen: 16, heads: heads.1, head_dim: 128 };
    let spec = change(ProblemSpec::dense(Dtype::Bf16, q, kv).mask(Mask::Causal));
    let problem = spec.seqs_k(Sequences::paged(batch, pages).used()).validate().unwrap();
    let options = PlanOptions::default().split_keys(split_keys);
    Plan::with(&problem, &DeviceLimits::h100_sxm(), &options)
}

fn plan(batch: usize, rows: usize, pages: usize, heads: (usize, usize)) -> Plan {
    plan_of([batch, rows, pages], heads, SplitKeys::Even, |spec| spec).unwrap()
}

#[test]
fn few_rows_share_keys() {
    let split_kv = |batch, rows, pages, heads| match plan(batch, rows, pages, heads).kind() {
        PlanKind::SplitKv(split_kv) => Some(*split_kv),
        PlanKind::Dense(_) | PlanKind::Varlen(_) => None,
    };
    let one = split_kv(1, 1, 64, (32, 8)).unwrap();
    assert_eq!((one.ctas(), one.reduction_entries()), (132, Some(8)));
    assert_eq!((one.pack(), one.positions(), one.per_sm()), (4, 16, 2));
    let plan_of_one = plan(1, 1, 64, (32, 8));
    assert_eq!(
        (
            one.team(128).warps,
            one.partial_dims(plan_of_one.problem()),
            plan_of_one.pages().unwrap().block_rows
        ),
        (4, [264, 64], 16)
    );
    let registers = "registers  128 at entry, then 56 a producer and 200 a consumer thread";
    assert!(plan_of_one.to_string().contains(registers), "{plan_of_one}");
    // There are more work tiles than CTAs: the plan states the work tile that begins in each CTA.
    let many = split_kv(64, 1, 256, (32, 8)).unwrap();
    assert_eq!(
        (many.ctas(), many.reduction_entries(), many.per_sm(), many.team(128).at_once),
        (132, Some(132), 1, 4)
    );
    assert_eq!([one, many].map(|of| of.reduction_source()), [ReductionSource::Units, ReductionSource::Ctas]);
    // 17 rows of four heads exceed a tile. An empty problem has no split-KV.
    assert!(split_kv(1, 16, 64, (32, 8)).is_some());
    assert!(split_kv(1, 17, 64, (32, 8)).is_none());
    // Sequences of a few positions use split-KV, even if their heads have many tiles.
    let two = split_kv(4, 8, 64, (128, 1)).unwrap();
    assert_eq!((two.pack(), two.positions(), two.heads(), two.reduction_entries()), (64, 1, 2, Some(64)));
    assert!(split_kv(4, 9, 64, (128, 1)).is_none());
    assert!(split_kv(0, 1, 64, (32, 8)).is_none() && split_kv(1, 0, 64, (32, 8)).is_none());
    // 5 million keys, in each of 16 sequences or of one, are no more than that.
    for batch in [16, 1] {
        assert_eq!(split_kv(batch, 1, 5_000_000 / 16, (64, 8)).unwrap().ctas(), 132);
    }
    let pieces = plan_of([1, 1, 5_000_000 / 16], (8, 1), SplitKeys::Fixed, |spec| spec).unwrap();
    let PlanKind::SplitKv(split_kv_of_pieces) = pieces.kind() else { panic!("{pieces}") };
    assert_eq!(split_kv_of_pieces.partial_dims(pieces.problem()), [5_000_000_u32.div_ceil(256), 8]);
    // A sequence with more blocks than exact division supports.
    assert!(split_kv(1, 1, 1 << 26, (32, 32)).is_none());
}

#[test]
fn fixed_size_splits_do_not_depend_on_the_batch() {
    let plan =
        |batch, rows, keys| plan_of([batch, rows, 512], (32, 8), SplitKeys::FixedSize { keys }, |spec| spec);
    for (batch, rows) in [(1, 1), (64, 1), (3, 16)] {
        let plan = plan(batch, rows, 1024).unwrap();
        let PlanKind::SplitKv(split_kv) = plan.kind() else { panic!("{plan}") };
        assert_eq!(plan.tile().tile_m, ROWS);
        assert_eq!(
            (split_kv.team(128).in_order, split_kv.per_sm(), split_kv.reduction_entries()),
            (true, 1, None)
        );
        assert_eq!(split_kv.reduction_source(), ReductionSource::Lengths);
        let dims = [8, (batch * rows * 32) as u32];
        assert_eq!((plan.pieces(), split_kv.partial_dims(plan.problem())), (None, dims));
    }
    // Parts of more rows would exceed the L2 cache, and there are enough units for all CTAs.
    let merging = plan(512, 16, 1024).unwrap();
    let in_registers = |keys| Some(Pieces { keys, running: RunningO::Registers });
    assert!(
        matches!(merging.kind(), PlanKind::SplitKv(split_kv) if split_kv.pack() == 4 && !split_kv.needs_reduction())
    );
    assert_eq!((merging.tile().tile_m, merging.pieces()), (64, in_registers(1024)));
    // Many rows take the tiles of a prefill, with the blocks of decoding.
    let prefill = plan(3, 300, 1024).unwrap();
    assert!(matches!(prefill.kind(), PlanKind::Varlen(_)), "{prefill}");
    assert_eq!((prefill.tile().tile_m, prefill.tile().tile_n), (128, 64));
    assert_eq!(prefill.pieces(), in_registers(1024));
    assert!(prefill.to_string().contains("pieces     of 1024 keys, with the sum in registers"), "{prefill}");
    let whole = plan(1, 1, 8192).unwrap();
    assert!(matches!(whole.kind(), PlanKind::SplitKv(split_kv) if !split_kv.needs_reduction()));
    let text = whole.to_string();
    assert!(text.contains("split-KV, splits of 128 KV blocks, 132 CTAs of 256 threads"), "{text}");
    let refused = |keys, rows| plan(1, rows, keys).unwrap_err().to_string();
    for keys in [0, 100] {
        let expected = format!("a split of {keys} keys is not one or several blocks of 64 keys");
        assert_eq!(refused(keys, 1), expected);
    }
    // Tiles of more columns than one warpgroup holds are not merged.
    let shape = |heads| Shape { batch: 1, seqlen: 8192, heads, head_dim: 512 };
    let wide = ProblemSpec::dense(Dtype::Bf16, shape(32), shape(8)).validate().unwrap();
    let options = PlanOptions::default().split_keys(SplitKeys::Fixed);
    let refused_wide = Plan::with(&wide, &DeviceLimits::h100_sxm(), &options).unwrap_err();
    let bytes =
        "splits of a fixed size would leave 8606711808 bytes of partial results, more than 1073741824";
    assert_eq!(refused_wide.to_string(), bytes);
    // O of the pieces before lies where there is room, and a third warpgroup serves narrow heads.
    let of = |head_dim, seqlen, change: fn(ProblemSpec) -> ProblemSpec| {
        let shape = Shape { batch: 2, seqlen, heads: 8, head_dim };
        let problem = change(ProblemSpec::dense(Dtype::Bf16, shape, shape).causal()).validate().unwrap();
        let plan = Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).unwrap();
        let (tile, pieces) = (plan.tile(), plan.pieces().unwrap());
        assert_eq!(plan.dense().map(|dense| dense.schedule().grid()), Some(plan.ctas()));
        (tile.tile_m, tile.tile_n, pieces.keys, pieces.running)
    };
    let same = |spec: ProblemSpec| spec;
    assert_eq!(of(64, 1024, same), (128, 128, 256, RunningO::Registers));
    assert_eq!(of(64, 2048, same), (192, 128, 256, RunningO::Shared));
    assert_eq!(of(128, 2048, same), (128, 64, 256, RunningO::Registers));
    assert_eq!(of(256, 2048, same), (128, 64, 512, RunningO::Workspace));
    assert_eq!(of(256, 100, ProblemSpec::e4m3_keys), (64, 64, 512, RunningO::Workspace));
    let most = "a sequence may have 67633152 KV blocks in all of its tiles, more than 16777216, for splits of a fixed \
                size and for lists of keys";
    assert_eq!(refused(1024, 1 << 20), most);
}

#[test]
fn heads_share_a_tile_where_keys_are_not_split() {
    let plan = |rows, heads| {
        let q = Shape { batch: 3, seqlen: rows, heads, head_dim: 64 };
        let kv = Shape { batch: 1000, seqlen: 1, heads: 1, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::Bf16, q, kv).seqs_k(Sequences::paged(3, 9000).used());
        let options = PlanOptions::default().split_keys(SplitKeys::Whole);
        Plan::with(&problem.validate().unwrap(), &DeviceLimits::h100_sxm(), &options).unwrap()
    };
    let few = plan(1, 16);
    let PlanKind::SplitKv(split_kv) = few.kind() else { panic!("{few}") };
    assert_eq!(
        (split_kv.pack(), split_kv.needs_reduction(), split_kv.partial_dims(few.problem())[0]),
        (16, false, 1)
    );
    for (rows, heads) in [(1, 1), (70, 16)] {
        let plan = plan(rows, heads);
        assert!(!matches!(plan.kind(), PlanKind::SplitKv(_)), "{plan}");
    }
}

#[test]
fn keys_of_e4m3_are_shared() {
    let plan = |change: fn(ProblemSpec) -> ProblemSpec| {
        plan_of([2, 1, 60], (8, 2), SplitKeys::Even, change).unwrap()
    };
    let converted = plan(ProblemSpec::e4m3_keys);
    let PlanKind::SplitKv(split_kv) = converted.kind() else { panic!("{converted}") };
    // The dequantizing warps use the registers that a second CTA would need.
    assert_eq!((split_kv.per_sm(), converted.tile().precision), (1, Precision::Converted { q: false }));
    assert_eq!(converted.tile().tile_n, plan(|spec| spec).tile().tile_n, "the same sums");
    let text = converted.to_string();
    assert!(text.contains("56 a producer, 96 a converting and 256 a consumer thread"), "{text}");
    let of_e4m3 = plan(|spec| ProblemSpec::dense(Dtype::E4m3, spec.q.shape, spec.k.shape));
    assert!(matches!(of_e4m3.kind(), PlanKind::SplitKv(_)));
    let tile = CtaTile { precision: Precision::Converted { q: true }, ..converted.tile() };
    assert_eq!(of_e4m3.tile(), tile, "the same sums");
}

#[test]
fn heads_of_a_group_are_rows_of_a_tile() {
    let packs = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 32, 64, 71, 128].map(|group| {
        let pack = pack(group);
        (pack, packed_positions(pack, ROWS))
    });
    let of_groups = [(1, 64), (2, 32), (3, 16), (4, 16), (5, 8), (6, 8), (7, 8), (8, 8), (3, 16)];
    let of_more = [(10, 4), (12, 4), (1, 64), (5, 8), (16, 4), (32, 2), (64, 1), (1, 64), (64, 1)];
    assert_eq!(packs[..], [of_groups, of_more].concat());
    assert!(packs.iter().all(|(pack, positions)| (pack * positions).is_multiple_of(PERIOD)));
}

/// The plan of tokens of latent attention, each of which lists 2048 rows of a cache of 100 pages.
fn plan_of_lists(
    tokens: usize,
    heads: usize,
    options: &PlanOptions,
    change: impl Fn(ProblemSpec) -> ProblemSpec,
) -> Result<(Tiling<u32>, SplitKvPlan), PlanError> {
    let q = Shape { batch: tokens, seqlen: 1, heads, head_dim: 576 };
    let kv = Shape { batch: 100, seqlen: 64, heads: 1, ..q };
    let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).head_dim_v(512);
    let problem = change(spec.seqs_k(Sequences::listed(tokens, 2048))).validate().unwrap();
    let limits = DeviceLimits::h100_sxm();
    match SplitKvPlan::choose(&problem, &limits, limits.sms, options)? {
        Some(Choice::Split { tiling, plan, .. }) => Ok((tiling, plan)),
        Some(Choice::Tiles { .. }) | None => panic!("lists of keys are split"),
    }
}

/// Latent attention over V of e4m3, whose rows have their own scales.
fn scaled(ProblemSpec { q, k, seqs_k, .. }: ProblemSpec) -> ProblemSpec {
    let [q, k] = [q, k].map(|x| Shape { head_dim: 64, ..x.shape });
    let mut spec = ProblemSpec::dense(Dtype::Bf16, q, k).head_dim_v(512).seqs_k(seqs_k);
    spec.v.dtype = Dtype::E4m3;
    let qv = spec.o;
    spec.qv(qv)
}

#[test]
fn scaled_rows_have_the_plan_of_16_bit_rows() {
    let options = PlanOptions::default().split_keys(SplitKeys::Even);
    let of_16_bits = |spec| {
        let mut spec = scaled(spec);
        spec.v.dtype = Dtype::Bf16;
        spec
    };
    let [one, other] = [plan_of_lists(8, 128, &options, scaled), plan_of_lists(8, 128, &options, of_16_bits)];
    let [(tiling, plan), (other_tiling, other)] = [one.unwrap(), other.unwrap()];
    assert_eq!((tiling, plan.ctas, plan.split), (other_tiling, other.ctas, other.split));
}

#[test]
fn lists_of_keys_take_tiles_of_one_position() {
    let even = PlanOptions::default().split_keys(SplitKeys::Even);
    let plan = |tokens, heads| plan_of_lists(tokens, heads, &even, |spec| spec).unwrap().1;
    // Heads are packed without padding: up to 64 of them, also where their number is no multiple of 8.
    for (heads, pack) in
        [(1, 1), (8, 8), (9, 9), (12, 12), (40, 40), (64, 64), (96, 48), (120, 60), (128, 64)]
    {
        let plan = plan(3, heads);
        assert_eq!((plan.pack(), plan.positions(), plan.heads()), (pack, 1, heads as u32 / pack));
    }
    let prefill = plan(4096, 128);
    assert!(prefill.co_schedules_tiles() && prefill.lists().is_some());
    // Two tiles of 32 blocks and a start each, co-scheduled by 66 pairs of CTAs.
    let space = prefill.decomposition().equal().unwrap().space;
    assert_eq!((space.total, space.share), (4096 * 33, (4096 * 33_u32).div_ceil(66)));
    assert_eq!(prefill.decomposition().equal().unwrap().sequence(70), [2, 66]);
    // Without any choice, one CTA computes all keys of a tile.
    let (_, whole) = plan_of_lists(3, 1, &PlanOptions::default(), |spec| spec).unwrap();
    assert!(!whole.needs_reduction());
}

#[test]
fn lists_of_two_caches() {
    let even = PlanOptions::default().split_keys(SplitKeys::Even);
    let second = |spec: ProblemSpec, used: bool| {
        let page = |head_dim| Shape { batch: 7, seqlen: 2, heads: 1, head_dim };
        let [k, v] = [576, 512].map(|head_dim| TensorDesc::contiguous(Dtype::Bf16, page(head_dim)));
        let lists = Sequences::listed(3, 65);
        spec.extra(ExtraCache { k, v, sequences: if used { lists.used() } else { lists } })
    };
    let (tiling, plan) = plan_of_lists(3, 16, &even, |spec| second(spec, false)).unwrap();
    // 32 blocks of the first list, and 2 of the second one.
    assert_eq!(plan.sequences().k().rows, 34 * 64);
    assert_eq!(tiling.kv_range(0, SeqLens { q: 1, k: 34 * 64 }).blocks(), 34);
    assert_eq!(plan.decomposition().equal().unwrap().space.total, 3 * 34);
    // Where lengths are data, only the device knows the iterations.
    let (_, plan) = plan_of_lists(3, 16, &even, |spec| second(spec, true)).unwrap();
    assert_eq!(plan.decomposition().equal(), None);
    let (_, plan) =
        plan_of_lists(3, 16, &even, |spec| spec.seqs_k(Sequences::listed(3, 2048).used())).unwrap();
    assert_eq!(plan.decomposition().equal(), None);
}

#[test]
fn lists_that_no_plan_takes() {
    let refused = |options: &PlanOptions, change: fn(ProblemSpec) -> ProblemSpec| {
        plan_of_lists(2, 16, options, change).unwrap_err()
    };
    let default = PlanOptions::default();
    let rows = |spec: ProblemSpec| {
        let q = Shape { seqlen: 3, ..spec.q.shape };
        let kv = spec.k.shape;
        ProblemSpec::dense(Dtype::Bf16, q, kv).head_dim_v(512).seqs_k(Sequences::listed(2, 64))
    };
    assert_eq!(refused(&default, rows), PlanError::ListRows { rows: 3 });
    let one = Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 64 };
    let (tile, _) = tile(&ProblemSpec::dense(Dtype::Bf16, one, one).validate().unwrap()).unwrap();
    assert_eq!(refused(&default.tile(tile), |spec| spec), PlanError::SplitTile);
    let long = |spec: ProblemSpec| spec.seqs_k(Sequences::listed(2, i32::MAX as usize));
    assert!(matches!(refused(&default, long), PlanError::Table(packed::PlanError::Rows { .. })));
    let far = |mut spec: ProblemSpec| {
        spec.v.strides.batch = 1 << 30;
        spec
    };
    let (tensor, given) = (TensorName::V, 2 * (99 * (1 << 30) + 64 * 512));
    assert_eq!(refused(&default, far), PlanError::ListedBytes { tensor, given, limit: 16 * 0xffff_ffff });
    let e4m3 = refused(&default, ProblemSpec::e4m3_keys).to_string();
    assert_eq!(
        e4m3,
        "the forward kernels of listed keys cannot compute attention with k and v of e4m3 beside q of 16 bits"
    );
    let two_caches = |spec: ProblemSpec| {
        let spec = scaled(spec);
        let extra = ExtraCache { k: spec.k, v: spec.v, sequences: spec.seqs_k };
        spec.extra(extra)
    };
    assert_eq!(
        refused(&default, two_caches).to_string(),
        "the forward kernels of listed rows with their own scales cannot compute attention with a second cache"
    );
    // K of more columns than the tile has, and no qv.
    let joined = |mut spec: ProblemSpec| {
        spec.v.dtype = Dtype::E4m3;
        spec
    };
    assert!(matches!(refused(&default, joined), PlanError::HeadDim { .. }));
    let many = |spec: ProblemSpec| spec.seqs_k(Sequences::listed(2, (1 << 30) + 64));
    assert!(matches!(refused(&default, many), PlanError::SplitBlocks { .. }));
}
