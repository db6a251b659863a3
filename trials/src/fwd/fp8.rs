//! Problems for the FP8 forward kernels: a covering array of the features of their code.

use fa3_sched::DeviceLimits;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Pipeline};
use fa3_types::{Dtype, Mask, ValueLayout};

use super::shapes::{INPUTS, TINY_FP8, laid_out};
use super::trials::{
    CONSUMERS, HEADS, LENGTHS, MASKS, ORDERS, SCHEDULERS, SINKS, SOFTCAPS, of_two_heads, trial,
};
use super::{Layout, dense, with_tile};
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Keys per block: one transposition step, and several.
const KEYS: [u32; 4] = [32, 64, 96, 128];

/// The covering array of features.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    covering_cases(|levels| of_features(levels, seed))
}

/// A trial with these levels, or with the nearest levels that a tile supports. The factors that select the kernel's
/// code are picked first.
fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (consumers, ping_pong) = levels.pick(&CONSUMERS);
    let pipeline = levels.pick(&[Pipeline::Paired, Pipeline::Serial]);
    let (inputs, tile_n) = (levels.pick(&INPUTS), levels.pick(&KEYS));
    // head_dim and head_dim_v: at most one transposition step per warp; several steps; PV in two halves.
    let (head_dim, head_dim_v) = levels.pick(&[(64, 64), (128, 128), (64, 128), (256, 256), (64, 32)]);
    let (stages, mask) = (levels.pick(&[1, 2, 3]), levels.pick(&MASKS));
    let (scheduler, softcap) = (levels.pick(&SCHEDULERS), levels.pick(&SOFTCAPS));
    let output = levels.pick(&[Dtype::Bf16, Dtype::F16]);
    let ((batch, heads_q, heads_kv), layout) = (levels.pick(&HEADS), levels.pick(&Layout::ALL));
    let (order, lengths) = (levels.pick(&ORDERS), levels.pick(&LENGTHS));
    let dist = levels.pick(&[
        Dist::Normal,
        Dist::Outliers,
        Dist::LargeLogits,
        Dist::ConstantRows,
        Dist::OneHot,
        Dist::Increasing,
        Dist::Decreasing,
        Dist::Denormals,
        Dist::SignedZeros,
    ]);
    // Number of columns by which the problem's head dimension is smaller than the tile's.
    let padding: u32 = levels.pick(&[0, 16, 48]);
    // Whether a separate kernel transposes V, for tiles that need transposed V. Otherwise the caller passes transposed
    // V.
    let (before, sink) = (levels.pick(&[false, true]), levels.pick(&SINKS));
    let tile_m = 64 * consumers;
    let shape =
        CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, consumers, pipeline, ping_pong, ..TINY_FP8 };
    let shape = nearest(of_inputs(shape, inputs));
    let (seqlen_q, seqlen_k) = lengths(shape.tile_m as usize, shape.tile_n as usize);
    // Problems of more than two heads need only one tile of rows per head.
    let seqlen_q = if heads_q > 2 { seqlen_q.min(shape.tile_m as usize - 1) } else { seqlen_q };
    let columns = |columns: u32| columns.saturating_sub(padding).max(16) as usize;
    let spec = dense(Dtype::E4m3, batch, (seqlen_q, seqlen_k), (heads_q, heads_kv), columns(head_dim));
    let mut spec = spec.head_dim_v(columns(head_dim_v)).mask(mask);
    spec.o.dtype = output;
    (spec.softcap, spec.sink) = (softcap, sink);
    let mut spec = laid_out(&shape, spec);
    if before {
        spec.v_layout = ValueLayout::Rows;
    }
    let problem = layout.of(spec).known().expect("all levels are valid");
    let options = with_tile(shape).order(order).scheduler(scheduler);
    let name = format!("{layout:?}, {dist:?}");
    trial(Case { name, problem, dist, poison: Poison::None, seed }, 3, &options)
}

/// The tile for these inputs, with the smallest key block that the inputs allow.
fn of_inputs(shape: CtaTile, inputs: Fp8Inputs) -> CtaTile {
    let keys = KEYS.into_iter().map(|tile_n| CtaTile { tile_n, ..shape }.of_inputs(inputs));
    let mut wide = keys.filter(|wider| wider.tile_n >= shape.tile_n);
    wide.next().expect("128 keys have a scale")
}

/// The tile, or if it exceeds the resources, a similar tile: with fewer keys, with two warpgroups, or without
/// intra-warpgroup pipelining.
fn nearest(shape: CtaTile) -> CtaTile {
    let two = CtaTile { tile_m: 128, consumers: 2, ..shape };
    let forms = [shape, two, CtaTile { pipeline: Pipeline::Serial, ..two }].into_iter();
    let narrower = forms.flat_map(|form| {
        let keys = KEYS.into_iter().rev().filter(move |&keys| keys <= form.tile_n);
        keys.map(move |tile_n| CtaTile { tile_n, ..form })
    });
    let mut fitting = narrower.filter(|shape| shape.check(&DeviceLimits::h100_sxm()).is_ok());
    fitting.next().expect("32 keys fit two warpgroups without pipeline")
}

/// Tiles with and without ping-pong and pipelining, and a tile with a single stage.
pub(super) fn small() -> Vec<Trial> {
    let two = CtaTile { tile_m: 128, consumers: 2, ..TINY_FP8 };
    let shapes = [
        (CtaTile { ping_pong: true, ..two }, Mask::Causal),
        (CtaTile { pipeline: Pipeline::Serial, ..two }, Mask::Window { left: Some(40), right: Some(3) }),
        (CtaTile { stages: 1, tile_n: 64, head_dim_v: 128, ..TINY_FP8 }, Mask::None),
        (CtaTile { ping_pong: true, ..two }.of_inputs(INPUTS[1]), Mask::Causal),
        (CtaTile { stages: 1, tile_n: 64, ..TINY_FP8 }.of_inputs(INPUTS[2]), Mask::Causal),
        (CtaTile { tile_n: 128, pipeline: Pipeline::Serial, ..TINY_FP8 }.of_inputs(INPUTS[3]), Mask::None),
        (CtaTile { pipeline: Pipeline::Serial, ping_pong: true, ..two }, Mask::Causal),
        (CtaTile { stages: 1, ..TINY_FP8 }.of_inputs(INPUTS[4]), Mask::Causal),
    ];
    let small = shapes.into_iter().zip(SCHEDULERS.into_iter().rev().cycle());
    let trial = |((shape, mask), scheduler): ((CtaTile, Mask), _)| {
        let rows = shape.tile_m as usize + 5;
        of_two_heads(&shape, rows, mask, 3, &with_tile(shape).scheduler(scheduler))
    };
    small.map(trial).collect()
}
