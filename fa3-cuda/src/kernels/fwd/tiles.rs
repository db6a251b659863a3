//! What the forward kernels take tile i to be, as data: for whoever compares the kernels' integers with the host's.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Passed, Program};
use fa3_sched::forward::Plan;

use super::FwdSpec;
use crate::kernels::Spec;
use crate::kernels::params::{Declare, Fill, Filled, Host};
use crate::kernels::parts::geometry::{Geometry, Work};

/// Numbers of a tile.
const NUMBERS: u32 = 8;

/// A program that decodes every tile of a plan as the forward kernels do, and writes of each, in its one buffer, the
/// sequence, the head of Q, the head of K and V, the first row, and the four bounds of its [`fa3_sched::KvRange`].
pub fn tiles(plan: &Plan) -> Program<Spec> {
    let (spec, count) = (FwdSpec::of(plan), plan.schedule().num_tiles());
    let mut program = Program::new();
    let decoded = program.buffer("decoded", Elem::U32, &[count, NUMBERS], BufferRole::Output);
    if count > 0 {
        let mut args = Fill(vec![("decoded".to_owned(), Passed::Pointer(decoded))]);
        _ = Geometry::of(plan.schedule(), plan.tiling(), plan.lens()).pass::<Host, Filled>(&mut args);
        program.step(Spec::ForwardTiles(spec), [count, 1, 1], args.0);
    }
    program
}

/// Its kernel.
pub(crate) fn tiles_kernel(spec: &FwdSpec) -> Kernel {
    Kernel::build("fwd_tiles", Launch::threads(32), |b| {
        let decoded = b.param_pointer("decoded", Elem::U32);
        let geometry = Geometry::form(spec.order, spec.mask).pass(&mut Declare(b));
        let index = b.cta_x();
        let Work { batch, head, kv_head, row, kv } = geometry.work(index);
        let at = index.mad_wide(4 * NUMBERS, decoded);
        b.once_per_warp(|| {
            b.store_vector(at.at(0), [batch, head, kv_head, row]);
            b.store_vector(at.at(16), [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]);
        });
    })
}
