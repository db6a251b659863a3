//! Tests of plans with split-KV.

use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape};

use super::*;
use crate::DeviceLimits;
use crate::forward::{Plan, PlanKind, Precision};

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
    // A sequence with more blocks than exact division supports.
    assert!(split_kv(1, 1, 1 << 26, (32, 32)).is_none());
}

#[test]
fn fixed_size_splits_do_not_depend_on_the_batch() {
    let plan =
        |batch, rows, keys| plan_of([batch, rows, 512], (32, 8), SplitKeys::FixedSize { keys }, |spec| spec);
    for (batch, rows) in [(1, 1), (64, 1), (3, 300)] {
        let plan = plan(batch, rows, 1024).unwrap();
        let PlanKind::SplitKv(split_kv) = plan.kind() else { panic!("{plan}") };
        assert_eq!(plan.tile().tile_m, ROWS);
        assert_eq!(
            (split_kv.team(128).in_order, split_kv.per_sm(), split_kv.reduction_entries()),
            (true, 1, None)
        );
        assert_eq!(split_kv.reduction_source(), ReductionSource::Lengths);
        // Parts of many rows would exceed the L2 cache, and there are enough units for all CTAs.
        let merges = rows == 300;
        let dims = if merges { [132, ROWS] } else { [8, (batch * rows * 32) as u32] };
        assert_eq!((split_kv.merges_splits(), split_kv.partial_dims(plan.problem())), (merges, dims));
    }
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
    let most = "a sequence may have 67633152 KV blocks in all of its tiles, more than 16777216, for splits of a fixed size";
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
