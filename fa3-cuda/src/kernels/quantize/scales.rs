//! Scales that take a pass over the tensor before codes are written.
//!
//! - Of channels, columns of a head, with their means: one kernel sums parts of the rows, another one sums parts. The
//!   order is that of [`CHANNEL_ROWS`](fa3_types::CHANNEL_ROWS), so that means are those of `fa3_quant::Channels`, bit
//!   for bit.
//! - Of heads or of the tensor: the quantization kernel finds the largest magnitude of each tile
//!   ([`ScaleSource::Measured`]), and another one that of the tiles that share a scale.

mod heads;
mod params;
mod parts;
mod span;
mod whole;

use fa3_ir::{BufferId, BufferRole, Elem, Kernel, Program};
use fa3_sched::quantize::{ChannelPlan, MaximaPlan, Plan};
use fa3_types::{Shape, ValueLayout};

use self::params::{HeadsParams, PartsParams, WholeParams};
use super::params::{Params, Scale};
use super::{ScaleSource, Spec};
use crate::kernels::params::{Fill, Host};
use crate::kernels::tensors::elem;
use crate::kernels::{self, KernelSpec};

/// Everything that the code of a kernel of scales depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScaleSpec {
    /// Sums the columns of parts of a head's rows.
    ChannelParts {
        /// The elements that it reads: f16 or bf16.
        elem: Elem,
        /// Columns.
        head_dim: u32,
    },
    /// Sums the parts of heads.
    Channels {
        /// Columns.
        head_dim: u32,
    },
    /// The largest of maxima that share a scale.
    Heads,
}

impl KernelSpec for ScaleSpec {
    fn kernel(&self) -> Kernel {
        match *self {
            ScaleSpec::ChannelParts { elem, head_dim } => parts::kernel(elem, head_dim),
            ScaleSpec::Channels { head_dim } => whole::kernel(head_dim),
            ScaleSpec::Heads => heads::kernel(),
        }
    }
}

/// Adds to a plan's program the steps that compute means and scales of channels. The kernel that writes codes takes
/// what is returned.
pub(super) fn channels(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    channels: &ChannelPlan,
    [x, scales, mean]: [BufferId; 3],
) -> Scale<Host> {
    let x_desc = plan.problem().x();
    let Shape { batch, heads, head_dim, .. } = x_desc.shape;
    let inverse = scratch(program, "inverse", [batch, heads, head_dim]);
    let spans = scratch(program, "spans", [batch * heads, 3 * channels.parts() as usize, head_dim]);
    let head_dim = plan.tile().head_dim;
    if let Some(decoder) = channels.decoder() {
        let mut args = Fill::default();
        _ = PartsParams::of(plan, channels, [x, spans], decoder).pass(&mut args);
        let spec = ScaleSpec::ChannelParts { elem: elem(x_desc.dtype), head_dim };
        program.step(spec.into(), [channels.parts_grid(), 1, 1], args.0);
    }
    if channels.heads_grid() > 0 {
        let rows = x_desc.shape.seqlen as f32;
        let params: WholeParams<Host> =
            WholeParams { spans, scales, mean, inverse, parts: channels.parts(), rows };
        let mut args = Fill::default();
        _ = params.pass(&mut args);
        let spec = ScaleSpec::Channels { head_dim };
        program.step(spec.into(), [channels.heads_grid(), 1, 1], args.0);
    }
    Scale::Channels { mean, inverse }
}

/// The same of scales of heads or of the tensor.
pub(super) fn heads(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    &MaximaPlan { scales: count, heads, maxima }: &MaximaPlan,
    scales: BufferId,
) -> Scale<Host> {
    let inverse = scratch(program, "inverse", [1, count as usize, heads as usize]);
    let of_tiles = scratch(program, "maxima", [1, 1, plan.num_tiles() as usize]);
    if plan.grid() > 0 {
        let mut args = Fill::default();
        _ = Params::of(plan, program, Scale::Measured(of_tiles)).pass(&mut args);
        let spec = Spec { scale: ScaleSource::Measured, layout: ValueLayout::Rows, ..Spec::of(plan) };
        program.step(spec.into(), [plan.grid(), 1, 1], args.0);
    }
    if count > 0 {
        let params: HeadsParams<Host> =
            HeadsParams { maxima: of_tiles, scales, inverse, count: maxima, heads };
        let mut args = Fill::default();
        _ = params.pass(&mut args);
        program.step(ScaleSpec::Heads.into(), [count, 1, 1], args.0);
    }
    Scale::Heads { inverse }
}

fn scratch(program: &mut Program<kernels::Spec>, name: &'static str, shape: [usize; 3]) -> BufferId {
    program.buffer(name, Elem::F32, &shape.map(|extent| extent as u32), BufferRole::Scratch)
}
