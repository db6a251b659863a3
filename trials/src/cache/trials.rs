//! Problems over every kind of KV cache.

use fa3_sched::forward::SplitKeys;
use fa3_types::{Dtype, Mask};

use super::{Case, Keys, Pages, Queries};
use crate::fwd::{LSE_FORMS, Layout};
use crate::intervals::Kind;
use crate::values::Rng;
use crate::{Dist, Levels, Trial, chunks, covering_cases};

const KEYS: [Keys; 12] = [
    Keys::Dense,
    Keys::Padded,
    Keys::Indexed,
    Keys::IndexedPadded,
    // These pages are copied in boxes.
    Keys::Pages(Pages::of(8)),
    Keys::Pages(Pages::of(16).indexed()),
    Keys::Pages(Pages::of(24).sliced()),
    Keys::Pages(Pages::of(128)),
    // These pages are copied row by row.
    Keys::Pages(Pages::of(1)),
    Keys::Pages(Pages::of(4).indexed().sliced()),
    Keys::Pages(Pages::of(12).padded()),
    Keys::Pages(Pages::of(64).padded().indexed()),
];
const QUERIES: [Queries; 6] =
    [Queries::Dense(1), Queries::Dense(4), Queries::InPart(5), Queries::Packed(3), Queries::Packed(20), LONG];
/// A prompt: more rows than a tile.
const LONG: Queries = Queries::Dense(70);

/// `queries`, or fewer of a prompt whose query heads share a tile: just enough rows for a second tile of 128.
fn of_heads(queries: Queries, (heads_q, heads_kv): (usize, usize)) -> Queries {
    let group = heads_q / heads_kv;
    if queries == LONG && group > 4 { Queries::Dense(128 / group + 1) } else { queries }
}

/// heads_q and heads_kv: MHA, GQA groups that fill a tile's rows, and groups that do not.
const HEADS: [(usize, usize); 7] = [(1, 1), (4, 1), (6, 2), (16, 1), (3, 3), (9, 1), (10, 1)];
const COLUMNS: [(usize, usize); 5] = [(64, 64), (128, 128), (96, 96), (192, 128), (40, 72)];
/// Head dimensions of wide random problems, and whether they have `qv`.
const WIDE: [((usize, usize), bool); 4] =
    [((512, 512), false), ((576, 328), false), ((64, 512), true), ((40, 256), true)];
/// Head dimensions of [`random_wide`], whether there is `qv`, and heads_q and heads_kv. Some groups of query heads fill
/// one tile or several tiles.
const RANDOM_WIDE: [((usize, usize), bool); 10] = [
    ((64, 512), true),
    ((64, 256), true),
    ((64, 320), true),
    ((40, 448), true),
    ((576, 512), false),
    ((512, 512), false),
    ((448, 448), false),
    ((384, 384), false),
    ((320, 320), false),
    ((448, 264), false),
];
const RANDOM_WIDE_HEADS: [(usize, usize); 7] =
    [(128, 1), (64, 1), (16, 1), (8, 1), (20, 2), (3, 3), (192, 1)];
const DTYPES: [Dtype; 2] = [Dtype::F16, Dtype::Bf16];
const MASKS: [Mask; 6] = [
    Mask::Causal,
    Mask::None,
    Mask::Window { left: Some(100), right: Some(0) },
    Mask::Window { left: Some(20), right: None },
    Mask::Window { left: None, right: Some(13) },
    chunks(96, Some(0)),
];
const SOFTCAPS: [Option<f64>; 2] = [None, Some(3.0)];
const SINKS: [bool; 2] = [false, true];
const LAYOUTS: [Layout; 2] = [Layout::Contiguous, Layout::HeadsFirst];
const DISTS: [Dist; 3] = [Dist::Normal, Dist::Increasing, Dist::Decreasing];
const SPLITS: [Option<SplitKeys>; 5] = [
    Some(SplitKeys::Even),
    Some(SplitKeys::Whole),
    None,
    Some(SplitKeys::FixedSize { keys: 128 }),
    Some(SplitKeys::FixedSize { keys: 384 }),
];
/// The covering array: each pair of levels of two factors occurs in some case.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let intervals = on_devices(covering_cases(of_intervals));
    let cases = on_devices(covering_cases(of_features)).chain(intervals).chain(of_e4m3());
    cases.map(|case| Case { seed, ..case }.trial()).collect()
}

/// The cases on devices of 2, 5 and 17 SMs in turn. With few SMs a CTA has many work units; with many SMs a work unit
/// has many splits.
fn on_devices(cases: Vec<Case>) -> impl Iterator<Item = Case> {
    [2, 5, 17].into_iter().cycle().zip(cases).map(|(sms, case)| Case { sms, ..case })
}

/// A covering array (pairs) of e4m3 caches with 16-bit Q, and some cases with e4m3 Q.
fn of_e4m3() -> impl Iterator<Item = Case> {
    let converted = covering_cases(|levels| {
        let case = Case {
            keys: levels.pick(&[
                Keys::Dense,
                Keys::Padded,
                Keys::IndexedPadded,
                Keys::Pages(Pages::of(8)),
                Keys::Pages(Pages::of(24).indexed()),
                Keys::Pages(Pages::of(128)),
                Keys::Pages(Pages::of(1)),
                Keys::Pages(Pages::of(64).padded().indexed()),
            ]),
            columns: levels.pick(&[(128, 128), (64, 64), (96, 96), (192, 128), (256, 256), (48, 80)]),
            queries: levels.pick(&[Queries::Dense(1), Queries::InPart(5), Queries::Packed(3), LONG]),
            heads: levels.pick(&[(4, 1), (6, 2), (16, 1), (3, 3)]),
            lengths: levels.pick(&[&[400][..], &[0, 1, 64, 65, 200, 0], &[130; 3]]).to_vec(),
            split_keys: levels.pick(&SPLITS),
            mask: levels.pick(&MASKS[..3]),
            e4m3_keys: true,
            token_scales: levels.pick(&[Some(Dtype::E4m3), None, Some(Dtype::Int8)]),
            ..of_options(levels)
        };
        Case { queries: of_heads(case.queries, case.heads), ..case }
    });
    // FP8 kernels; kernels that dequantize, with split-KV; kernels that copy row by row.
    let of_q = [
        (Keys::Pages(Pages::of(16)), LONG, (64, 64), SPLITS[0]),
        (Keys::Pages(Pages::of(64)), Queries::Packed(20), (128, 128), SPLITS[1]),
        (Keys::Pages(Pages::of(8)), Queries::Dense(1), (256, 256), SPLITS[1]),
        (Keys::IndexedPadded, Queries::InPart(5), (128, 128), SPLITS[0]),
        (Keys::Pages(Pages::of(8)), Queries::Dense(1), (256, 256), SPLITS[0]),
        (Keys::Pages(Pages::of(16)), Queries::Packed(3), (192, 192), SPLITS[2]),
        (Keys::Pages(Pages::of(1)), Queries::Packed(3), (96, 96), SPLITS[0]),
        (Keys::Pages(Pages::of(64).padded().indexed()), LONG, (128, 128), SPLITS[1]),
        (Keys::Pages(Pages::of(12)), Queries::Packed(20), (256, 256), SPLITS[1]),
    ];
    let of_q = of_q.map(|(keys, queries, columns, split_keys)| {
        let lengths = vec![200, 0, 65, 300];
        Case { lengths, keys, queries, columns, split_keys, dtype: Dtype::E4m3, ..SMALL }
    });
    on_devices(converted).chain(of_q)
}

fn of_features(levels: &mut Levels) -> Case {
    let (keys, queries, heads) = (levels.pick(&KEYS), levels.pick(&QUERIES), levels.pick(&HEADS[..6]));
    // One long sequence; equal lengths; no key, one key and many keys; more sequences than lanes of a warp, most of
    // them empty.
    let lengths = levels.pick::<fn() -> Vec<usize>>(&[
        || vec![500],
        || vec![130; 3],
        || vec![0, 1, 64, 65, 300, 0],
        || vec![333, 5, 0, 64],
        || (0..37).map(|i| if i == 20 { 400 } else { [i % 7 * 5, 0, 0][i % 3] }).collect(),
    ])();
    // If there are many sequences, they have few rows.
    let has_many = matches!(queries, LONG | Queries::Packed(20));
    let queries = if has_many && lengths.len() > 10 { Queries::Dense(2) } else { of_heads(queries, heads) };
    let (split_keys, mask) = (levels.pick(&SPLITS), levels.pick(&MASKS));
    let columns = levels.pick(&COLUMNS);
    Case { lengths, keys, queries, heads, columns, mask, split_keys, ..of_options(levels) }
}

/// Masks of intervals: boxes of pages, whose blocks a warp finds, and rows of pages and splits, which have all blocks.
fn of_intervals(levels: &mut Levels) -> Case {
    let keys = [KEYS[0], KEYS[3], KEYS[5], KEYS[7], KEYS[8], KEYS[10]];
    let (kind, per_head) = (levels.pick(&Kind::ALL), levels.pick(&[false, true]));
    let (keys, queries, heads) = (levels.pick(&keys), levels.pick(&QUERIES), levels.pick(&HEADS[1..4]));
    let queries = of_heads(queries, heads);
    let lengths = levels.pick(&[&[500][..], &[0, 1, 64, 65, 300, 0], &[130; 3]]).to_vec();
    let (split_keys, mask) = (levels.pick(&SPLITS), levels.pick(&[Mask::None, MASKS[0], MASKS[2], MASKS[5]]));
    Case {
        lengths,
        keys,
        queries,
        heads,
        mask,
        intervals: Some((kind, per_head)),
        split_keys,
        ..of_options(levels)
    }
}

/// A case with levels of the factors that all covering arrays here have in common.
fn of_options(levels: &mut Levels) -> Case {
    Case {
        dtype: levels.pick(&DTYPES),
        softcap: levels.pick(&SOFTCAPS),
        sink: levels.pick(&SINKS),
        lse: levels.pick(&LSE_FORMS),
        layout: levels.pick(&LAYOUTS),
        dist: levels.pick(&DISTS),
        ..SMALL
    }
}

pub(super) const SMALL: Case = paged((64, 64));

/// A case with these head dimensions over a paged cache, with split-KV. Its lengths are empty until a caller sets them.
pub const fn paged(columns: (usize, usize)) -> Case {
    Case {
        lengths: Vec::new(),
        keys: Keys::Pages(Pages::of(16)),
        queries: Queries::Dense(2),
        heads: (4, 2),
        columns,
        dtype: Dtype::Bf16,
        e4m3_keys: false,
        token_scales: None,
        qv: false,
        mask: Mask::Causal,
        intervals: None,
        softcap: None,
        sink: true,
        lse: LSE_FORMS[0],
        layout: Layout::Contiguous,
        dist: Dist::Normal,
        split_keys: Some(SplitKeys::Even),
        split_bytes: None,
        sms: 5,
        seed: 3,
    }
}

/// Problems with several work units per CTA and several splits per unit, to run under many schedules.
pub(crate) fn small() -> Vec<Trial> {
    let cases = [
        Case { lengths: vec![500, 20, 130], ..SMALL },
        Case { lengths: vec![700], heads: (3, 1), queries: Queries::Packed(4), ..SMALL },
        Case { lengths: vec![200, 90], split_keys: None, queries: LONG, ..SMALL },
        Case { lengths: vec![500, 20, 130], split_keys: SPLITS[2], ..SMALL },
        Case { lengths: vec![300, 90], split_keys: SPLITS[3], queries: LONG, ..SMALL },
        Case { lengths: vec![500, 20], split_keys: SPLITS[3], split_bytes: Some(0), ..SMALL },
        Case { lengths: vec![200, 90, 3], keys: Keys::IndexedPadded, mask: chunks(70, None), ..SMALL },
        Case { lengths: vec![300, 20, 130], keys: Keys::Pages(Pages::of(1)), ..SMALL },
        Case { lengths: vec![500, 20, 130], token_scales: Some(Dtype::Int8), ..SMALL },
        Case {
            lengths: vec![500, 20, 130],
            mask: Mask::None,
            intervals: Some((Kind::FarApart, true)),
            ..SMALL
        },
        Case {
            lengths: vec![200, 90],
            split_keys: None,
            queries: LONG,
            intervals: Some((Kind::SinkAndWindow, false)),
            ..SMALL
        },
        Case {
            lengths: vec![200, 90],
            keys: Keys::Pages(Pages::of(4).padded().indexed()),
            split_keys: None,
            queries: LONG,
            ..SMALL
        },
        Case { lengths: vec![200, 90], e4m3_keys: true, split_keys: None, queries: LONG, ..SMALL },
    ];
    cases.into_iter().map(Case::trial).collect()
}

/// A random problem with fixed-size splits, in which each sequence has the same bits as in a batch of its own
/// ([`Case::check_alone`]). Seeds that are equal modulo `kernels` share their kernels, unless sizes of pages or groups
/// differ.
pub fn in_pieces(seed: u64, kernels: u64) -> Case {
    let split = match Rng::new(seed ^ 0x51ece).below(9) {
        0 => SplitKeys::Fixed,
        pieces => SplitKeys::FixedSize { keys: 128 * pieces as u64 },
    };
    // e4m3 scales and intervals are indexed by batch entry, and the index changes if the sequence is a batch of its
    // own.
    Case {
        split_keys: Some(split),
        e4m3_keys: false,
        token_scales: None,
        intervals: None,
        ..any(seed, kernels)
    }
}

/// A random problem. Seeds that are equal modulo `kernels` share their kernels, unless sizes of pages or groups differ.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random(seed: u64, kernels: u64) -> Trial {
    any(seed, kernels).trial()
}

/// A random problem of wide heads or of latent attention, like `random`, but with more query heads, and with few
/// enough rows and keys for the oracle.
///
/// # Panics
/// If the planner refuses the problem.
pub fn random_wide(seed: u64, kernels: u64) -> Trial {
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0x1a7e7), Rng::new(seed ^ 0x1a7e7 << 32));
    let (columns, qv) = RANDOM_WIDE[of_kernel.below(RANDOM_WIDE.len() as u64)];
    let heads = RANDOM_WIDE_HEADS[of_kernel.below(RANDOM_WIDE_HEADS.len() as u64)];
    let case = any(seed, kernels);
    let most = 1 + rng.below(1 + 256 / heads.0 as u64);
    let positions = 1 + rng.below(most as u64);
    let queries = match rng.below(4) {
        0 => Queries::Dense(1),
        1 => Queries::Dense(positions),
        2 => Queries::InPart(positions),
        _ => Queries::Packed(positions),
    };
    let lengths = case.lengths.iter().take(4).map(|&length| length % 2000).collect();
    let of_e4m3 = columns.0 <= 512 && [columns.0, columns.1].iter().all(|cols| cols.is_multiple_of(16));
    let e4m3_keys = of_kernel.below(2) == 1 && of_e4m3;
    let token_scales = None;
    let intervals = case.intervals.filter(|_| !qv && !e4m3_keys);
    Case { lengths, queries, heads, columns, qv, e4m3_keys, token_scales, intervals, ..case }.trial()
}

fn any(seed: u64, kernels: u64) -> Case {
    let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0xcac4e), Rng::new(seed ^ 0xcac4e << 32));
    let narrow = COLUMNS.map(|columns| (columns, false));
    let choice = [&narrow[..], &WIDE].concat();
    let (columns, qv) = choice[of_kernel.below(choice.len() as u64)];
    let heads = HEADS[of_kernel.below(7)];
    let most = if rng.below(4) == 0 { 9000 } else { 900 };
    let any = |rng: &mut Rng| {
        let below = 1 + rng.below(most);
        rng.below(below as u64)
    };
    let lengths = (0..1 + rng.below(12)).map(|_| any(&mut rng)).collect();
    let queries = match rng.below(4) {
        0 => Queries::Dense(1),
        1 => Queries::Dense(1 + rng.below(9)),
        2 => Queries::InPart(1 + rng.below(9)),
        _ => Queries::Packed(1 + rng.below(30)),
    };
    let case = Case {
        lengths,
        keys: KEYS[of_kernel.below(KEYS.len() as u64)],
        queries,
        heads: (heads.0 * 2, heads.1 * 2),
        columns,
        dtype: DTYPES[of_kernel.below(2)],
        e4m3_keys: false,
        token_scales: None,
        qv,
        mask: MASKS[of_kernel.below(MASKS.len() as u64)],
        intervals: None,
        softcap: SOFTCAPS[of_kernel.below(2)],
        sink: SINKS[of_kernel.below(2)],
        lse: LSE_FORMS[of_kernel.below(3)],
        layout: LAYOUTS[rng.below(2)],
        dist: DISTS[rng.below(3)],
        split_keys: SPLITS[of_kernel.below(3)],
        split_bytes: None,
        sms: 132,
        seed,
    };
    let is_16 = |columns: usize| columns.is_multiple_of(16);
    let is_narrow = !qv && columns.0.max(columns.1) <= 256;
    let e4m3_keys = of_kernel.below(3) == 0 && is_16(columns.0) && is_16(columns.1) && is_narrow;
    let has_intervals = of_kernel.below(2) == 0 && !qv && !e4m3_keys;
    let intervals =
        has_intervals.then(|| (Kind::ALL[of_kernel.below(Kind::ALL.len() as u64)], rng.below(2) == 0));
    let token_scales =
        [None, Some(Dtype::E4m3), Some(Dtype::Int8), None][of_kernel.below(4)].filter(|_| e4m3_keys);
    Case { e4m3_keys, token_scales, intervals, ..case }
}
