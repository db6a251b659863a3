//! Problems under interval masks: a covering array of mask kinds and kernel features.

use fa3_sched::Order;
use fa3_sched::forward::{CtaTile, PlanOptions, TileRow};
use fa3_types::{Dtype, Mask};

use super::shapes::{PIPELINES, TINY};
use super::trials::{CONSUMERS, HEADS, LENGTHS, SINKS, SOFTCAPS, trial};
use super::{Layout, dense, with_tile};
use crate::intervals::Kind;
use crate::{Case, Levels, Trial, covering_cases};

/// Whether each sequence, and each head, has its own intervals.
pub(crate) const OWN: [(bool, bool); 3] = [(false, false), (true, true), (false, true)];

/// The covering array, and tiles of the planner's table.
pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let features = covering_cases(0, |levels| of_features(levels, seed)).into_iter();
    let tiles = [64, 128, 256].into_iter().map(|head_dim| of_table(head_dim, seed));
    features.chain(tiles).collect()
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
    let (per_sequence, per_head) = levels.pick(&OWN);
    let (seqlen_q, seqlen_k) = lengths(tile_m as usize, tile_n as usize);
    // Problems of more than four heads need only one tile of rows per head.
    let seqlen_q = if heads_q > 4 { seqlen_q.min(tile_m as usize - 1) } else { seqlen_q };
    let spec = dense(dtype, batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), head_dim as usize);
    let layout = Layout::ALL[kind as usize % Layout::ALL.len()];
    let mut spec = layout.of(spec.head_dim_v(head_dim_v as usize));
    (spec.softcap, spec.sink) = (softcap, sink);
    let case = Case::normal(&format!("{kind:?}"), kind.of(spec, per_sequence, per_head), seed);
    trial(case, 2, &with_tile(tile).order(Order::Linear))
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
    let two = CtaTile { tile_m: 128, consumers: 2, ping_pong: true, ..TINY };
    let tiles = [TINY, two, CtaTile { stages: 1, ..TINY }];
    let kinds = [Kind::SinkAndWindow, Kind::FarApart, Kind::Holes];
    let trials = tiles.into_iter().zip(kinds).map(|(tile, kind)| {
        let spec = dense(Dtype::Bf16, 1, (tile.tile_m as usize + 5, 100), (2, 1), 64);
        let case = Case::normal("small", kind.of(spec, false, true), 4);
        trial(case, 1, &PlanOptions::default().tile(tile))
    });
    trials.collect()
}
