//! Problems for the forward kernels of e4m3: the features of which their code is made, each with each.

use fa3_sched::DeviceLimits;
use fa3_sched::forward::{CtaTile, Fp8Inputs, Pipeline};
use fa3_types::{Dtype, Mask, ValueLayout};

use super::shapes::{INPUTS, TINY_FP8, laid_out};
use super::trials::{
    CONSUMERS, HEADS, LENGTHS, MASKS, ORDERS, SCHEDULERS, SINKS, SOFTCAPS, of_two_heads, trial,
};
use super::{Layout, dense, with_tile};
use crate::{Case, Dist, Levels, Poison, Trial, covering_cases};

/// Keys of a block: those of one step of transposing and of several.
const KEYS: [u32; 4] = [32, 64, 96, 128];
/// Three levels of so many factors meet, of the others two.
const FEATURES: usize = 3;

/// The covering array of features.
pub(super) fn trials(seed: u64) -> Vec<Trial> {
    covering_cases(FEATURES, |levels| of_features(levels, seed))
}

/// A trial with these levels, or with those next to them of which a tile can be. The factors of the kernel's code come
/// first.
fn of_features(levels: &mut Levels, seed: u64) -> Trial {
    let (consumers, ping_pong) = levels.pick(&CONSUMERS);
    let pipeline = levels.pick(&[Pipeline::Paired, Pipeline::Serial]);
    let (inputs, tile_n) = (levels.pick(&INPUTS), levels.pick(&KEYS));
    // Columns of Q and K, and of V and O: those of one step of transposing for each warp or fewer, of several, of PV in
    // two parts.
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
    // Columns that the problem has fewer than the tile.
    let padding: u32 = levels.pick(&[0, 16, 48]);
    // Whether a kernel transposes V before, where V is transposed in memory; otherwise the caller has done so.
    let (before, sink) = (levels.pick(&[false, true]), levels.pick(&SINKS));
    let tile_m = 64 * consumers;
    let shape =
        CtaTile { head_dim, head_dim_v, tile_m, tile_n, stages, consumers, pipeline, ping_pong, ..TINY_FP8 };
    let shape = nearest(of_inputs(shape, inputs));
    let (seqlen_q, seqlen_k) = lengths(shape.tile_m as usize, shape.tile_n as usize);
    // More than two heads need not have several tiles of rows each.
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

/// The tile for these inputs, with as few keys more as it takes.
fn of_inputs(shape: CtaTile, inputs: Fp8Inputs) -> CtaTile {
    let keys = KEYS.into_iter().map(|tile_n| CtaTile { tile_n, ..shape }.of_inputs(inputs));
    let mut wide = keys.filter(|wider| wider.tile_n >= shape.tile_n);
    wide.next().expect("128 keys have a scale")
}

/// The tile, or where it needs more than there is, one that differs as little as possible: with fewer keys, of two
/// warpgroups, without pipeline.
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

/// Turns with pipeline and without; neither; slots for one block.
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
