//! The mean and the scale of each channel, a column of a head, before codes are written: one kernel sums parts of the
//! rows, another one sums parts. The order is that of [`CHANNEL_ROWS`](fa3_types::CHANNEL_ROWS), so that means are
//! those of `fa3_quant::Channels`, bit for bit.

mod params;
mod parts;
mod span;
mod whole;

use fa3_ir::{BufferId, Elem, Kernel, Program};
use fa3_sched::quantize::{ChannelPlan, Plan};

use self::params::{PartsParams, WholeParams};
use crate::kernels;
use crate::kernels::params::Fill;
use crate::kernels::tensors::elem;

/// Everything that the code of a kernel of channels depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ChannelSpec {
    /// Sums the rows of parts.
    Parts {
        /// The elements that it reads: f16 or bf16.
        elem: Elem,
        /// Columns.
        head_dim: u32,
    },
    /// Sums the parts of heads.
    Whole {
        /// Columns.
        head_dim: u32,
    },
}

/// What the kernels of channels write.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChannelBuffers {
    /// Of each part the sums of its columns, their smallest and their largest numbers.
    pub(super) spans: BufferId,
    pub(super) scales: BufferId,
    pub(super) mean: BufferId,
    /// 1 / scale.
    pub(super) inverse: BufferId,
}

/// The kernel of this spec.
pub fn kernel(spec: &ChannelSpec) -> Kernel {
    match *spec {
        ChannelSpec::Parts { elem, head_dim } => parts::kernel(elem, head_dim),
        ChannelSpec::Whole { head_dim } => whole::kernel(head_dim),
    }
}

/// Adds their steps to a plan's program.
pub(super) fn steps(
    program: &mut Program<kernels::Spec>,
    plan: &Plan,
    channels: &ChannelPlan,
    x: BufferId,
    buffers: ChannelBuffers,
) {
    let x_desc = plan.problem().x();
    let (elem, head_dim) = (elem(x_desc.dtype), plan.tile().head_dim);
    if let Some(decoder) = channels.decoder() {
        let mut args = Fill::default();
        _ = PartsParams::of(plan, x, buffers.spans, decoder).pass(&mut args);
        let spec = kernels::Spec::Channels(ChannelSpec::Parts { elem, head_dim });
        program.step(spec, [channels.parts_grid(), 1, 1], args.0);
    }
    if channels.heads_grid() > 0 {
        let mut args = Fill::default();
        _ = WholeParams::of(plan, channels, buffers).pass(&mut args);
        let spec = kernels::Spec::Channels(ChannelSpec::Whole { head_dim });
        program.step(spec, [channels.heads_grid(), 1, 1], args.0);
    }
}
