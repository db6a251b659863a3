//! What the forward kernels take tile i to be, as data: for whoever compares the kernels' integers with the host's.

use fa3_ir::{Elem, Kernel, Launch};
use fa3_sched::Plan;

use super::geometry::{Geometry, Work};
use super::{FwdError, FwdSpec};
use crate::kernels::params::{Declare, Fill, Host};
use crate::kernels::{Array, Job, JobArg};

/// Numbers of a tile.
const NUMBERS: u32 = 8;

/// A kernel that decodes every tile of a plan as the forward kernels do, and writes of each, in its one array, the sequence, the head
/// of Q, the head of K and V, the first row, and the four bounds of its [`fa3_sched::KvRange`]. `None` if there are no tiles.
///
/// # Errors
/// [`FwdError`] if the plan is not for the forward kernels.
pub fn decoded_tiles(plan: &Plan) -> Result<Option<Job>, FwdError> {
    let spec = FwdSpec::of(plan)?;
    if plan.num_tiles == 0 {
        return Ok(None);
    }
    let kernel = Kernel::build("fwd_decoded_tiles", Launch::threads(32), |b| {
        let tiles = b.param_pointer("tiles", Elem::U32);
        let geometry = Geometry::form(spec.order, spec.mask).pass(&mut Declare(b));
        let index = b.cta_x();
        let Work { batch, head, kv_head, row, kv } = geometry.work(index);
        let at = index.mad_wide(4 * NUMBERS, tiles);
        b.once_per_warp(|| {
            b.store_vector(at.at(0), [batch, head, kv_head, row]);
            b.store_vector(at.at(16), [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]);
        });
    });
    let mut args = Fill(vec![JobArg::Pointer(0)]);
    Geometry::of(plan).pass::<Host, _>(&mut args);
    Ok(Some(Job {
        kernel,
        grid: [plan.num_tiles, 1, 1],
        arrays: vec![Array::output("tiles", Elem::U32, &[plan.num_tiles, NUMBERS])],
        args: args.0,
    }))
}
