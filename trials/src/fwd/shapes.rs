//! Tile shapes for forward kernels.

use fa3_sched::forward::{CtaTile, Fp8Inputs, Loads, Pipeline, Precision, TileRow};
use fa3_sched::{DeviceLimits, Scheduler};
use fa3_types::{Dtype, ProblemSpec, ValueLayout};

use super::with_qv;

/// Every pipeline of 16-bit kernels.
pub const PIPELINES: [Pipeline; 4] =
    [Pipeline::Serial, Pipeline::Paired, Pipeline::TwoStage, Pipeline::ThreeStage];

/// A tile of 64 x 16 for one warpgroup, so that a small problem has several KV blocks.
pub const TINY: CtaTile = CtaTile {
    head_dim: 64,
    head_dim_v: 64,
    qv: false,
    precision: Precision::Half,
    tile_m: 64,
    tile_n: 16,
    stages: 2,
    consumers: 1,
    loads: Loads::Producer,
    pipeline: Pipeline::Paired,
    ping_pong: false,
};

/// [`TINY`] for e4m3. A block has the 32 keys of one transposition step.
pub const TINY_FP8: CtaTile = CtaTile { precision: Precision::Fp8(INPUTS[0]), tile_n: 32, ..TINY };

/// Every kind of e4m3 inputs.
pub const INPUTS: [Fp8Inputs; 6] = [
    HEADS,
    Fp8Inputs { v_layout: ValueLayout::Transposed, ..HEADS },
    Fp8Inputs { block_scales: true, ..HEADS },
    Fp8Inputs { v_layout: ValueLayout::Transposed, block_scales: true, ..HEADS },
    Fp8Inputs { v_channels: true, ..HEADS },
    Fp8Inputs { v_layout: ValueLayout::Transposed, block_scales: true, v_channels: true },
];

const HEADS: Fp8Inputs = Fp8Inputs::HEADS;

/// Every tile of the planner's table without `qv`, in every form, with and without ping-pong. Forms that need more
/// registers or shared memory get fewer keys. The list also has the tile for head dimension 128 without a producer, as
/// in the ablation study, and tiles outside of the table.
///
/// # Panics
/// If the table has no tile for head dimension 128.
pub fn all() -> Vec<CtaTile> {
    let mut shapes: Vec<CtaTile> = Vec::new();
    for shape in TileRow::table().iter().map(|row| row.tile).filter(|shape| !shape.qv) {
        for (pipeline, ping_pong) in
            PIPELINES.into_iter().flat_map(|pipeline| [(pipeline, false), (pipeline, true)])
        {
            let shape = widest(CtaTile { pipeline, ping_pong, ..shape });
            shapes.extend(shape.filter(|shape| !shapes.contains(shape)));
        }
    }
    let is_measured = |row: &&TileRow| row.tile.head_dim == 128;
    let measured = TileRow::table().iter().find(is_measured).expect("the table has head dimension 128");
    let measured = CtaTile { loads: Loads::Consumers, ..measured.tile };
    let measured = PIPELINES.map(|pipeline| widest(CtaTile { pipeline, ..measured }));
    shapes.extend(measured.into_iter().flatten());
    shapes.extend(others());
    shapes
}

/// The tile with the largest number of keys that fits.
fn widest(shape: CtaTile) -> Option<CtaTile> {
    let narrower = (1..=shape.tile_n / 16).rev().map(|steps| CtaTile { tile_n: 16 * steps, ..shape });
    narrower.into_iter().find(|shape| shape.check(&DeviceLimits::h100_sxm()).is_ok())
}

/// Tiles outside of the planner's table: one stage and four stages, narrow blocks, further head dimensions, no
/// producer.
///
/// # Panics
/// If a tile does not fit an H100.
pub fn others() -> Vec<CtaTile> {
    let two = CtaTile { tile_m: 128, consumers: 2, ..TINY };
    let three = CtaTile { tile_m: 192, consumers: 3, ..TINY };
    let shapes = PIPELINES.into_iter().flat_map(|pipeline| {
        [
            CtaTile { pipeline, stages: 1, ..TINY },
            CtaTile { pipeline, stages: 3, tile_n: 48, ..TINY },
            CtaTile {
                pipeline,
                stages: 4,
                tile_n: 32,
                head_dim: 128,
                head_dim_v: 128,
                ping_pong: true,
                ..two
            },
            CtaTile { pipeline, stages: 1, tile_n: 64, ping_pong: true, ..two },
            CtaTile { pipeline, tile_n: 64, ping_pong: true, ..three },
            CtaTile { pipeline, stages: 3, head_dim: 128, head_dim_v: 64, tile_n: 16, ..three },
            CtaTile { pipeline, loads: Loads::Consumers, stages: 1, ..TINY },
            CtaTile { pipeline, loads: Loads::Consumers, tile_n: 48, ping_pong: true, ..two },
            CtaTile { pipeline, loads: Loads::Consumers, stages: 3, ping_pong: true, ..three },
        ]
    });
    let shapes: Vec<CtaTile> = shapes.collect();
    for shape in &shapes {
        shape.check(&DeviceLimits::h100_sxm()).unwrap_or_else(|error| panic!("{shape}: {error}"));
    }
    shapes
}

/// The type of Q, K and V that a tile is for.
pub fn dtype(shape: &CtaTile) -> Dtype {
    match shape.precision {
        Precision::Half | Precision::Converted { q: false } => Dtype::Bf16,
        Precision::Fp8(_) | Precision::Converted { q: true } => Dtype::E4m3,
    }
}

/// Gives the problem the inputs that a tile takes: the layout of V, scales, and `qv`.
pub fn laid_out(shape: &CtaTile, mut spec: ProblemSpec) -> ProblemSpec {
    let Fp8Inputs { v_layout, block_scales, v_channels } = match shape.precision {
        Precision::Half if shape.qv => return with_qv(spec),
        Precision::Half => return spec,
        Precision::Converted { q: false } if shape.qv => return with_qv(spec.e4m3_keys()),
        Precision::Converted { q: false } => return spec.e4m3_keys(),
        Precision::Converted { q: true } => return spec,
        Precision::Fp8(inputs) => inputs,
    };
    spec.v_layout = v_layout;
    if block_scales {
        // A scale of Q belongs to 64 or 128 rows, which depends on the number of consumers.
        spec = spec.block_scales(if shape.consumers == 2 { 64 } else { 128 });
    }
    if v_channels { spec.v_channels() } else { spec }
}

/// The scheduler for a tile. A tile without a producer cannot run the dynamic scheduler, and gets the static scheduler.
pub fn dealt(shape: &CtaTile, scheduler: Scheduler) -> Scheduler {
    match (shape.loads, scheduler) {
        (Loads::Consumers, Scheduler::DynamicPersistent) => Scheduler::StaticPersistent,
        (Loads::Producer | Loads::Consumers, scheduler) => scheduler,
    }
}
