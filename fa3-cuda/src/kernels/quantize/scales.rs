//! Scales that take a pass over the tensor before the pass that writes codes.
//!
//! `channels.rs` reduces columns to scales and means of channels: first over parts of the rows, and then over all
//! parts. `maxima.rs` reduces the largest magnitudes of tiles to scales of heads or of the tensor. The quantization
//! kernel finds these magnitudes ([`ScaleSource::Measured`]).

mod channels;
mod maxima;

use fa3_ir::{BufferId, BufferRole, Elem, Kernel, Program};
use fa3_sched::quantize::{ChannelPlan, MaximaPlan, Plan};
use fa3_types::{Shape, ValueLayout};

use self::channels::{HeadsParams, KINDS, PartsParams};
use self::maxima::MaximaParams;
use super::params::{Params, Scale};
use super::{ScaleSource, Spec};
use crate::kernels::params::{Fill, Host};
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::elem;
use crate::kernels::{self, KernelSpec};

/// Everything that the code of a kernel that computes scales depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleSpec {
    /// Reduces each part of a head's rows to the statistics of its columns.
    ChannelParts {
        /// The type of the elements that the kernel reads: f16 or bf16.
        elem: Elem,
        /// Number of columns.
        head_dim: u32,
    },
    /// Reduces the statistics of all parts of a head to its means and scales.
    Channels {
        /// Number of columns.
        head_dim: u32,
    },
    /// Reduces the maxima that share a scale to the largest of them, and computes the scale.
    Heads,
}

impl KernelSpec for ScaleSpec {
    fn kernel(&self) -> Kernel {
        match *self {
            ScaleSpec::ChannelParts { elem, head_dim } => channels::parts(elem, head_dim),
            ScaleSpec::Channels { head_dim } => channels::heads(head_dim),
            ScaleSpec::Heads => maxima::kernel(),
        }
    }
}

/// Adds the steps that compute means and scales of channels to a plan's program. Gives the scales for the kernel that
/// writes codes.
pub(super) fn channels(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    channels: &ChannelPlan,
    [x, scales, mean]: [BufferId; 3],
) -> Scale<Host> {
    let x_desc = plan.problem().x();
    let Shape { batch, heads, head_dim, .. } = x_desc.shape;
    let inverse = scratch(program, "inverse", [batch, heads, head_dim]);
    let spans = scratch(program, "spans", [batch * heads, (KINDS * channels.parts()) as usize, head_dim]);
    let head_dim = plan.tile().head_dim;
    if let Some(decoder) = channels.decoder() {
        let params = PartsParams::<Host> {
            x: Strided::of(x, x_desc),
            spans,
            seqlen: x_desc.shape.seqlen as u32,
            heads: x_desc.shape.heads as u32,
            parts: channels.parts(),
            decoder,
        };
        let spec = ScaleSpec::ChannelParts { elem: elem(x_desc.dtype), head_dim };
        program.step(spec.into(), [channels.parts_grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    if channels.heads_grid() > 0 {
        let rows = x_desc.shape.seqlen as f32;
        let params = HeadsParams::<Host> { spans, scales, mean, inverse, parts: channels.parts(), rows };
        let spec = ScaleSpec::Channels { head_dim };
        program.step(spec.into(), [channels.heads_grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    Scale::Channels { mean, inverse }
}

/// Adds the steps that compute scales of heads or of the tensor. Gives the scales for the kernel that writes codes.
pub(super) fn heads(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    &MaximaPlan { scales: count, heads, maxima }: &MaximaPlan,
    scales: BufferId,
) -> Scale<Host> {
    let inverse = scratch(program, "inverse", [1, count as usize, heads as usize]);
    let of_tiles = scratch(program, "maxima", [1, 1, plan.num_tiles() as usize]);
    if plan.grid() > 0 {
        let params = Params::of(plan, program, Scale::Measured(of_tiles));
        let spec = Spec { scale: ScaleSource::Measured, layout: ValueLayout::Rows, ..Spec::of(plan) };
        program.step(spec.into(), [plan.grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    if count > 0 {
        let params = MaximaParams::<Host> { maxima: of_tiles, scales, inverse, count: maxima, heads };
        program.step(ScaleSpec::Heads.into(), [count, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    Scale::Heads { inverse }
}

fn scratch(program: &mut Program<kernels::Spec>, name: &'static str, shape: [usize; 3]) -> BufferId {
    program.buffer(name, Elem::F32, &shape.map(|extent| extent as u32), BufferRole::Scratch)
}
