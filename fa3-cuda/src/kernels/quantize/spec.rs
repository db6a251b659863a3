//! The spec of a quantization kernel.

use fa3_ir::Elem;
use fa3_sched::quantize::{Plan, Scales, Tile};
use fa3_types::{Positions, RopeStyle, Rotary, ValueLayout};

use crate::kernels::tensors::elem;

/// Everything that a quantization kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// The type of the elements that the kernel reads: f16 or bf16.
    pub elem: Elem,
    /// The rows and threads of a tile.
    pub tile: Tile,
    /// The memory layout of codes.
    pub layout: ValueLayout,
    /// The rotation, if rows are rotated.
    pub rotation: Option<Rotation>,
    /// Whether rows go through the Hadamard transform.
    pub hadamard: bool,
    /// The source of scales.
    pub scale: ScaleSource,
    /// Whether sequences are packed, so that each tile must find its sequence.
    pub packed: bool,
}

/// The source of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleSource {
    /// The kernel computes one scale for each tile, which is a block of rows.
    Blocks,
    /// One scale for the whole tensor is an argument.
    Given,
    /// Heads have scales, which earlier kernels have computed.
    Heads,
    /// Channels have scales and means, which earlier kernels have computed.
    Channels,
    /// There are no scales: the kernel finds the largest magnitudes of tiles, and writes no codes.
    Measured,
}

/// Everything that a rotation's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotation {
    /// Which entries of a row form a pair.
    pub style: RopeStyle,
    /// Number of entries of a row that are rotated.
    pub rotary_dim: u32,
    /// Whether an array has the positions.
    pub listed: bool,
}

impl Spec {
    /// The spec of a plan's kernel.
    pub fn of(plan: &Plan) -> Spec {
        let problem = plan.problem();
        let rotation = |Rotary { style, rotary_dim, positions, .. }: Rotary| Rotation {
            style,
            rotary_dim: rotary_dim as u32,
            listed: positions == Positions::Listed,
        };
        Spec {
            elem: elem(problem.x().dtype),
            tile: plan.tile(),
            layout: problem.layout(),
            rotation: problem.rotary().map(rotation),
            hadamard: problem.signs().is_some(),
            scale: match plan.scales() {
                Scales::Blocks => ScaleSource::Blocks,
                Scales::Given(_) => ScaleSource::Given,
                Scales::Maxima(_) => ScaleSource::Heads,
                Scales::Channels(_) => ScaleSource::Channels,
            },
            packed: plan.packed().is_some(),
        }
    }
}
