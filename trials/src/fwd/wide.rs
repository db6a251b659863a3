//! Kernels for latent attention, and for wide heads, where two warpgroups share the rows and each computes half of O's
//! columns. This small family also tests the code that these kernels share with the other forward kernels.

use fa3_sched::Scheduler;
use fa3_sched::forward::{CtaTile, Precision, SplitKeys};
use fa3_types::{Dtype, Mask, ProblemSpec, SequenceRows};

use super::listed::{self, GIVEN, Given, LAYOUTS, LENGTHS};
use super::shapes::{TINY, laid_out};
use super::trials::{BOUNDS, SCHEDULERS, SINKS, SOFTCAPS, of_two_heads, trial};
use super::{LSE_FORMS, Layout, dense, with_tile};
use crate::cache::{self, Keys, Pages, Queries};
use crate::intervals::{self, Kind};
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// The smallest tile: each warpgroup has one panel of V.
pub(crate) const HALVES: CtaTile = CtaTile { head_dim_v: 128, consumers: 2, stages: 1, ..TINY };

/// Tiles with one and several stages of K and of halves of V, and with more than one panel of V per warpgroup.
const TILES: [CtaTile; 6] = [
    HALVES,
    CtaTile { head_dim_v: 256, tile_n: 32, stages: 2, ..HALVES },
    CtaTile { head_dim: 96, stages: 3, ..HALVES },
    CtaTile { head_dim: 192, tile_n: 48, ..HALVES },
    CONVERTED,
    CtaTile { head_dim: 192, head_dim_v: 256, ..CONVERTED },
];

/// [`HALVES`] whose producer converts rows of e4m3.
const CONVERTED: CtaTile = CtaTile { precision: Precision::Converted { q: false }, tile_n: 64, ..HALVES };

/// Kinds of masks of intervals of problems without `qv` and e4m3.
const KINDS: [Option<Kind>; 4] = [None, Some(Kind::FarApart), Some(Kind::Causal), Some(Kind::Tree)];

/// Tiles for latent attention: one warpgroup; two warpgroups with separate rows; two warpgroups that share the rows;
/// and two and three blocks of V.
const LATENT: [CtaTile; 6] = [
    CtaTile { qv: true, stages: 2, ..HALVES },
    CtaTile { qv: true, stages: 3, head_dim_v: 256, tile_n: 32, ..HALVES },
    CtaTile { qv: true, head_dim_v: 96, ..TINY },
    CtaTile { qv: true, head_dim_v: 64, tile_m: 128, consumers: 2, tile_n: 32, ping_pong: true, ..TINY },
    CtaTile { qv: true, head_dim_v: 96, stages: 3, ..TINY },
    CtaTile { qv: true, head_dim_v: 256, stages: 2, ..CONVERTED },
];

/// The covering arrays (pairs) of small tiles without and with `qv`, and the planner's tiles over KV caches.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let small = [&TILES[..], &LATENT].into_iter();
    let small = small.flat_map(|tiles| covering_cases(|levels| of_features(tiles, levels, seed)));
    small.chain(caches(seed).into_iter().map(cache::Case::trial)).collect()
}

fn of_features(tiles: &[CtaTile], levels: &mut Levels, seed: u64) -> Trial {
    let tile = levels.pick(tiles);
    // Number of columns by which Q and K, and V, are narrower than the tile: none; some; for V, all but 8 columns of
    // the second warpgroup; for V, all columns of the second warpgroup and some of the first.
    let (less, less_v) = levels.pick(&[(0, 0), (8, 8), (24, 56), (0, 72)]);
    let less_v = less_v.min(tile.head_dim_v - 24);
    // Rows of e4m3 have a multiple of 16 columns.
    let multiple = if tile.converts_rows() { 16 } else { 8 };
    let [head_dim, head_dim_v] = [tile.head_dim - less, tile.head_dim_v - less_v]
        .map(|columns| columns.next_multiple_of(multiple) as usize);
    let mask = levels.pick(&BOUNDS);
    let given = levels.pick(&[&[None][..], &GIVEN.map(Some)].concat());
    let lengths = levels.pick(&LENGTHS)(tile.tile_m as usize, tile.tile_n as usize);
    // Rows of O have the scales of a sequence.
    let has_none = tile.converts_rows() && lengths.is_empty();
    let lengths = if has_none { vec![(1, 3)] } else { lengths };
    let (heads, layout) = (levels.pick(&[(1, 1), (4, 2), (3, 1)]), levels.pick(&LAYOUTS));
    let (scheduler, softcap, sink) = (levels.pick(&SCHEDULERS), levels.pick(&SOFTCAPS), levels.pick(&SINKS));
    // Work tiles come from a table.
    let (scheduler, layout) = match tile.converts_rows() {
        true => (Scheduler::DynamicPersistent, Given::InPart.layout(layout)),
        false => (scheduler, layout),
    };
    let (lse, max_logits) = (levels.pick(&LSE_FORMS), levels.pick(&[false, true]));
    let dtype = levels.pick(&[Dtype::F16, Dtype::Bf16]);
    let dist = levels.pick(&[Dist::Normal, Dist::Increasing, Dist::OneHot]);
    let kind = levels.pick(&KINDS).filter(|_| tile.precision == Precision::Half && !tile.qv);
    let scheduler = if kind.is_some() { Scheduler::DynamicPersistent } else { scheduler };
    let change = |spec: ProblemSpec, layout: Layout| {
        let spec = laid_out(&tile, spec.head_dim_v(head_dim_v));
        let mut spec = layout.of(spec).mask(mask);
        (spec.softcap, spec.sink, spec.lse) = (softcap, sink, lse);
        spec.max_logits = max_logits;
        spec
    };
    let options = with_tile(tile);
    let (poison, (spec, rows), layout, options) = match given {
        None => {
            let (rows, keys) = lengths.first().copied().unwrap_or((1, 3));
            let spec = dense(dtype, 2, (rows, keys), heads, head_dim);
            let rows = [rows, keys].map(|rows| SequenceRows::dense(2, rows));
            (Poison::None, (spec, rows), layout, options.scheduler(scheduler))
        }
        Some(given) => {
            let spec = listed::spec(given, dtype, heads, head_dim, &lengths);
            (Poison::BeyondEnd, spec, given.layout(layout), options)
        }
    };
    let problem = intervals::under(kind, change(spec, layout), rows, (true, true));
    let case =
        Case { name: format!("{given:?}, {layout:?}, {dist:?}, {kind:?}"), problem, dist, poison, seed };
    trial(case, 3, &options)
}

/// Decoding and prefill over a cache of wide heads.
const CACHE: cache::Case = cache::paged((512, 512));

/// Pages that are copied in boxes and row by row, with every kind of split-KV.
fn caches(seed: u64) -> Vec<cache::Case> {
    let pieces = Some(SplitKeys::FixedSize { keys: 64 });
    let window = Mask::Window { left: Some(60), right: Some(0) };
    let cases = [
        cache::Case { lengths: vec![150, 20, 0], ..CACHE },
        cache::Case {
            lengths: vec![200],
            keys: Keys::Pages(Pages::of(1)),
            queries: Queries::Dense(1),
            heads: (16, 1),
            columns: (320, 512),
            dtype: Dtype::F16,
            ..CACHE
        },
        cache::Case {
            lengths: vec![130, 3],
            keys: Keys::Pages(Pages::of(64).padded().indexed()),
            queries: Queries::InPart(5),
            heads: (3, 1),
            columns: (512, 328),
            split_keys: pieces,
            ..CACHE
        },
        cache::Case {
            lengths: vec![90],
            keys: Keys::Dense,
            queries: Queries::Packed(3),
            heads: (9, 1),
            columns: (576, 512),
            softcap: Some(3.0),
            sink: false,
            ..CACHE
        },
        cache::Case {
            lengths: vec![100, 70],
            keys: Keys::IndexedPadded,
            queries: Queries::Dense(1),
            heads: (64, 1),
            columns: (64, 512),
            mask: window,
            dist: Dist::Increasing,
            split_keys: pieces,
            ..CACHE
        },
        cache::Case {
            lengths: vec![100],
            keys: Keys::Pages(Pages::of(24)),
            queries: Queries::Packed(20),
            heads: (2, 1),
            columns: (384, 200),
            mask: window,
            split_keys: None,
            ..CACHE
        },
        cache::Case {
            lengths: vec![80],
            keys: Keys::Pages(Pages::of(4)),
            queries: Queries::Dense(70),
            heads: (1, 1),
            split_keys: None,
            ..CACHE
        },
    ];
    let latent = cache::Case { columns: (64, 512), heads: (20, 1), qv: true, ..CACHE };
    let latent = [
        // There are two tiles of two positions each.
        cache::Case { lengths: vec![150, 20], queries: Queries::Dense(4), ..latent.clone() },
        cache::Case {
            lengths: vec![130],
            keys: Keys::Pages(Pages::of(1)),
            queries: Queries::InPart(3),
            columns: (64, 256),
            softcap: Some(3.0),
            dtype: Dtype::F16,
            ..latent.clone()
        },
        cache::Case {
            lengths: vec![200, 64],
            keys: Keys::Pages(Pages::of(64).indexed()),
            queries: Queries::Packed(2),
            heads: (128, 1),
            columns: (64, 512),
            layout: Layout::HeadsFirst,
            split_keys: pieces,
            ..latent.clone()
        },
        cache::Case {
            lengths: vec![100, 3],
            queries: Queries::Packed(70),
            heads: (2, 1),
            columns: (40, 328),
            mask: window,
            split_keys: None,
            ..latent
        },
    ];
    let others = of_intervals().into_iter().chain(of_e4m3());
    cases.into_iter().chain(others).chain(latent).map(|case| cache::Case { seed, ..case }).collect()
}

/// Caches under masks of intervals: a warp finds blocks; all blocks are visited; blocks of new keys have the mask.
fn of_intervals() -> [cache::Case; 3] {
    let window = Mask::Window { left: Some(60), right: Some(0) };
    [
        cache::Case {
            lengths: vec![150],
            queries: Queries::Packed(70),
            heads: (1, 1),
            mask: window,
            intervals: Some((Kind::FarApart, false)),
            split_keys: None,
            ..CACHE
        },
        cache::Case {
            lengths: vec![150, 20],
            keys: Keys::Pages(Pages::of(1)),
            columns: (576, 328),
            mask: Mask::None,
            intervals: Some((Kind::SinkAndWindow, true)),
            ..CACHE
        },
        cache::Case {
            lengths: vec![130, 70],
            queries: Queries::InPart(5),
            intervals: Some((Kind::Tree, false)),
            split_keys: Some(SplitKeys::FixedSize { keys: 64 }),
            ..CACHE
        },
    ]
}

/// Caches of e4m3.
fn of_e4m3() -> [cache::Case; 6] {
    let pieces = Some(SplitKeys::FixedSize { keys: 64 });
    let window = Mask::Window { left: Some(60), right: Some(0) };
    let e4m3 = cache::Case { e4m3_keys: true, ..CACHE };
    [
        cache::Case { lengths: vec![200, 20, 0], ..e4m3.clone() },
        cache::Case {
            lengths: vec![150, 3],
            keys: Keys::Pages(Pages::of(64).padded().indexed()),
            queries: Queries::InPart(5),
            heads: (3, 1),
            columns: (336, 272),
            dtype: Dtype::F16,
            softcap: Some(3.0),
            split_keys: pieces,
            ..e4m3.clone()
        },
        cache::Case {
            lengths: vec![100],
            keys: Keys::IndexedPadded,
            queries: Queries::Packed(70),
            heads: (2, 1),
            mask: window,
            split_keys: None,
            ..e4m3.clone()
        },
        cache::Case {
            lengths: vec![90, 130],
            keys: Keys::Dense,
            layout: Layout::HeadsFirst,
            sink: false,
            ..e4m3.clone()
        },
        cache::Case {
            lengths: vec![200, 64],
            keys: Keys::Pages(Pages::of(1)),
            queries: Queries::Packed(2),
            heads: (128, 1),
            columns: (64, 512),
            qv: true,
            ..e4m3.clone()
        },
        cache::Case {
            lengths: vec![100, 3],
            queries: Queries::InPart(70),
            heads: (2, 1),
            columns: (48, 336),
            qv: true,
            mask: window,
            split_keys: None,
            ..e4m3
        },
    ]
}

/// Several tiles per CTA, several blocks, and several splits per work unit, to run under many schedules.
pub(crate) fn small() -> Vec<Trial> {
    let masks = [Mask::Causal, Mask::Window { left: Some(40), right: Some(3) }];
    let of_tile = |(index, tile): (usize, CtaTile)| {
        let scheduler =
            if tile.converts_rows() { Scheduler::DynamicPersistent } else { SCHEDULERS[index % 3] };
        let options = with_tile(tile).scheduler(scheduler);
        of_two_heads(&tile, tile.tile_m as usize + 5, masks[index % 2], 3, &options)
    };
    let tiles = TILES.into_iter().chain(LATENT).enumerate().map(of_tile);
    let of_kind = |(tile, kind): (CtaTile, Kind)| {
        let spec = dense(Dtype::Bf16, 1, (tile.tile_m as usize + 5, 100), (2, 1), tile.head_dim as usize);
        let spec = spec.head_dim_v(tile.head_dim_v as usize);
        trial(Case::normal("small", kind.of(spec, false, true), 4), 1, &with_tile(tile))
    };
    let kinds = [TILES[0], TILES[2]].into_iter().zip([Kind::SinkAndWindow, Kind::Holes]);
    let tiles = tiles.chain(kinds.map(of_kind));
    let caches = [
        cache::Case { lengths: vec![200, 20], ..CACHE },
        cache::Case { lengths: vec![130], keys: Keys::Pages(Pages::of(1)), heads: (2, 1), ..CACHE },
        cache::Case {
            lengths: vec![200, 20],
            queries: Queries::Dense(66),
            heads: (1, 1),
            intervals: Some((Kind::FarApart, true)),
            split_keys: None,
            ..CACHE
        },
        cache::Case { lengths: vec![200, 20], heads: (16, 1), columns: (64, 512), qv: true, ..CACHE },
        cache::Case { lengths: vec![200, 20], e4m3_keys: true, ..CACHE },
    ];
    tiles.chain(caches.map(cache::Case::trial)).collect()
}
