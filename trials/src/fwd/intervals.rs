//! Problems under interval masks: a covering array of mask kinds and kernel features.

use fa3_sched::Order;
use fa3_sched::forward::{CtaTile, Pipeline, PlanOptions, TileRow};
use fa3_types::{Dtype, Mask};

use super::listed::{self, GIVEN, Given, LAYOUTS};
use super::shapes::{PIPELINES, TINY};
use super::trials::{BOUNDS, CONSUMERS, HEADS, LENGTHS, SINKS, SOFTCAPS, trial};
use super::{Layout, dense, with_tile};
use crate::intervals::Kind;
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Whether each sequence, and each head, has its own intervals.
pub(crate) const OWN: [(bool, bool); 3] = [(false, false), (true, true), (false, true)];

/// The covering arrays of dense sequences and of sequences whose lengths are data, and tiles of the planner's table.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering_cases(|levels| of_features(levels, seed)).into_iter();
    let of_sequences = covering_cases(|levels| of_sequences(levels, seed));
    let tiles = [64, 128, 256].into_iter().map(|head_dim| of_table(head_dim, seed));
    features.chain(of_sequences).chain(tiles).collect()
}

fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (kind, (consumers, ping_pong)) = (levels.pick(&Kind::ALL), levels.pick(&CONSUMERS));
    let (lengths, pipeline) = (levels.pick(&LENGTHS), levels.pick(&PIPELINES));
    let (head_dim, head_dim_v) = levels.pick(&[(64, 64), (192, 64)]);
    let (stages, tile_n) = (levels.pick(&[1, 2]), levels.pick(&[16, 48]));
    let tile_m = 64 * consumers;
    let tile =
        CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, consumers, pipeline, ping_pong, ..TINY };
    let (softcap, dtype) = (levels.pick(&SOFTCAPS), levels.pick(&[Dtype::F16, Dtype::Bf16]));
    let ((batch, heads_q, heads_kv), sink) = (levels.pick(&HEADS), levels.pick(&SINKS));
    let ((per_sequence, per_head), mask) = (levels.pick(&OWN), levels.pick(&BOUNDS));
    let (seqlen_q, seqlen_k) = lengths(tile_m as usize, tile_n as usize);
    // Problems of more than four heads need only one tile of rows per head.
    let seqlen_q = if heads_q > 4 { seqlen_q.min(tile_m as usize - 1) } else { seqlen_q };
    let spec = dense(dtype, batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), head_dim as usize);
    let layout = Layout::ALL[kind as usize % Layout::ALL.len()];
    let mut spec = layout.of(spec.head_dim_v(head_dim_v as usize).mask(mask));
    (spec.softcap, spec.sink) = (softcap, sink);
    let case = Case::normal(&format!("{kind:?}, {mask}"), kind.of(spec, per_sequence, per_head), seed);
    trial(case, 2, &with_tile(tile).order(Order::Linear))
}

/// Tiles of one and of two consumers, and of one whose loads wait for each other.
const TILES: [CtaTile; 3] = [
    TINY,
    CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY },
    CtaTile { stages: 1, pipeline: Pipeline::Serial, ..TINY },
];

/// Sequences whose lengths are data. Code that they share with dense ones is covered there.
fn of_sequences(levels: &mut Levels, seed: u64) -> Trial {
    let (kind, tile, given) = (levels.pick(&Kind::ALL), levels.pick(&TILES), levels.pick(&GIVEN));
    let lengths = levels.pick(&listed::LENGTHS)(tile.tile_m as usize, tile.tile_n as usize);
    let heads = listed::few_of_many(levels.pick(&[(1, 1), (3, 1), (4, 2)]), &lengths);
    let ((per_sequence, per_head), layout) = (levels.pick(&OWN), levels.pick(&LAYOUTS));
    let (sink, mask) = (levels.pick(&SINKS), levels.pick(&BOUNDS));
    let (spec, rows) = listed::spec(given, Dtype::Bf16, heads, tile.head_dim as usize, &lengths);
    let spec = given.layout(layout).of(spec.head_dim_v(tile.head_dim_v as usize).mask(mask));
    let spec = if sink { spec.sink() } else { spec };
    let problem = kind.of_sequences(spec, rows, per_sequence, per_head);
    let name = format!("{kind:?}, {mask}, {given:?}, {layout:?}");
    let case = Case { name, problem, dist: Dist::Normal, poison: Poison::BeyondEnd, seed };
    trial(case, 3, &with_tile(tile))
}

/// A trial of a tile of the planner's table, on two tiles of rows and several KV blocks.
fn of_table(head_dim: usize, seed: u64) -> Trial {
    let long = dense(Dtype::Bf16, 1, (4096, 4096), (1, 1), head_dim).mask(Mask::window(Some(9), Some(9)));
    let tile = TileRow::find(&long.validate().expect("it is valid")).expect("there is a tile").tile;
    let lengths = (tile.tile_m as usize + 9, 5 * tile.tile_n as usize + 5);
    let problem = Kind::FarApart.of(dense(Dtype::Bf16, 1, lengths, (1, 1), head_dim), false, false);
    trial(Case::normal("a tile of the table", problem, seed), 1, &with_tile(tile))
}

/// A few kinds of tiles, with several tiles per CTA.
pub(crate) fn small() -> Vec<Trial> {
    let kinds = [Kind::SinkAndWindow, Kind::FarApart, Kind::Holes];
    let trials = TILES.into_iter().zip(kinds).map(|(tile, kind)| {
        let spec = dense(Dtype::Bf16, 1, (tile.tile_m as usize + 5, 100), (2, 1), 64);
        // Both masks hide keys of other kinds than random ones.
        let spec = if kind == Kind::FarApart { spec.causal() } else { spec };
        let case = Case::normal("small", kind.of(spec, false, true), 4);
        trial(case, 1, &PlanOptions::default().tile(tile))
    });
    let packed = TILES.into_iter().zip([Given::Packed, Given::Behind, Given::PackedInPart]);
    let packed = packed.zip(kinds).map(|((tile, given), kind)| {
        let lengths = [(tile.tile_m as usize + 5, 100), (0, 30), (9, 0), (70, 40)];
        let (spec, rows) = listed::spec(given, Dtype::Bf16, (2, 1), 64, &lengths);
        let case = Case::normal("small, packed", kind.of_sequences(spec, rows, false, true), 4);
        trial(case, 1, &PlanOptions::default().tile(tile))
    });
    trials.chain(packed).collect()
}
