//! The forward pass: a producer warpgroup loads, one to three consumer warpgroups compute, 64 rows of O each; or they load too.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! [`FwdSpec`] is what a kernel's code depends on, [`kernel`] the kernel, [`job`] the kernel of a plan with its arguments.
//! The roles are in `producer.rs` and `consumer.rs`, which cite the lines of the paper's Algorithms 1, 2 and 4 (arXiv
//! 2407.08608) that they are.

// What a launch is.
mod decoded;
mod geometry;
mod launch;
mod spec;

// The roles, and what they are made of.
mod blocks;
mod consumer;
mod output;
mod probabilities;
mod producer;
mod refill;
mod scores;
mod softmax;
mod turn;
mod walk;

pub use decoded::decoded_tiles;
pub use launch::{FwdArray, args, job};
pub use spec::FwdSpec;

use fa3_ir::{Builder, F32, Kernel, Launch, Ring, Role, TileMap, TileShape, V};

use consumer::consumer;
use output::Output;
use probabilities::Storage;
use producer::producer;
use scores::{Modify, Scores, capped, hidden};
use turn::Turns;
use walk::Walk;

/// What the roles of a kernel share.
struct Fwd {
    spec: FwdSpec,
    q: (TileMap, Ring<1>),
    k: (TileMap, Ring<1>),
    v: (TileMap, Ring<1>),
    p: Storage,
    turns: Option<Turns>,
    walk: Walk,
    output: Output,
    /// What a unit of a score is worth in the exponent of 2.
    unit: V<F32>,
}

/// The kernel of this spec, one that [`FwdSpec::of`] gives or that differs from such in tiles that have a producer as well and pass
/// [`CtaTile::check`](fa3_sched::forward::CtaTile::check).
pub fn kernel(spec: &FwdSpec) -> Kernel {
    let tile = &spec.tile;
    let mut b = Builder::new("fwd", Launch::threads(tile.threads()));
    let warps = 4 * tile.consumers;
    let shape = |rows, cols| TileShape::new(spec.elem, rows, cols);
    let tiles = [
        ("q", shape(tile.tile_m, tile.head_dim)),
        ("k", shape(tile.tile_n, tile.head_dim)),
        ("v", shape(tile.tile_n, tile.head_dim_v)),
    ];
    let maps = tiles.map(|(name, shape)| b.tile_map_of(name, shape, 4, 2));
    let output = Output::declare(&mut b, spec);
    let unit = b.param_f32("unit");
    let into_cap = spec.softcap.then(|| b.param_f32("into_cap"));
    let rings = [(tiles[0], 1), (tiles[1], tile.stages), (tiles[2], tile.stages)]
        .map(|((name, shape), stages)| b.ring(name, stages, warps, [(name, shape)]));
    let [q, k, v] = std::array::from_fn(|index| (maps[index], rings[index].clone()));
    let fwd = Fwd {
        spec: *spec,
        q,
        k,
        v,
        p: Storage::declare(&mut b, spec),
        turns: tile.ping_pong.then(|| Turns::declare(&mut b, tile.consumers)),
        walk: Walk::declare(&mut b, spec, warps),
        output,
        unit,
    };
    b.init_mbarriers();
    // CTAs of the next kernel may take their places as ours leave them, and begin when all of ours are done.
    b.launch_dependents();
    b.grid_dependency_wait();

    let registers = tile.registers();
    if let Some(registers) = registers.producer {
        b.role(Role::new("producer", 0..4).registers(registers), |b| producer(b, &fwd));
    }
    let cap = into_cap.map(|into| move |b: &mut Builder, product: V<F32>| capped(b, product, into));
    let scores = Scores { modify: cap.as_ref().map(|cap| cap as &Modify<'_>), mask: &hidden };
    let all = tile.threads() / 32;
    let role = Role::new("consumer", all - warps..all).registers(registers.consumer);
    b.role(role, |b| consumer(b, &fwd, &scores));
    b.finish()
}
