//! What the forward kernels take tile i to be, as data: for whoever compares the kernels' integers with the host's.

use fa3_ir::{Builder, Elem, Launch};
use fa3_sched::forward::Plan;

use super::FwdSpec;
use super::geometry::{Geometry, Work};
use crate::kernels::{Array, Job, JobArg};

/// Numbers of a tile.
const NUMBERS: u32 = 8;

/// A kernel that decodes every tile of a plan as the forward kernels do, and writes of each, in its one array, the sequence, the head
/// of Q, the head of K and V, the first row, and the four bounds of its [`fa3_sched::KvRange`]. `None` if there are no tiles.
pub fn decoded_tiles(plan: &Plan) -> Option<Job> {
    let (spec, num_tiles) = (FwdSpec::of(plan), plan.schedule().num_tiles());
    if num_tiles == 0 {
        return None;
    }
    let mut b = Builder::new("fwd_decoded_tiles", Launch::threads(32));
    let tiles = b.param_pointer("tiles", Elem::U32);
    let geometry = Geometry::form(spec.order, spec.mask).declare(&mut b);
    let index = b.cta_x();
    let Work { batch, head, kv_head, row, kv } = geometry.work(&mut b, index);
    let at = b.mad_wide_u32(index, 4 * NUMBERS, tiles);
    b.once_per_warp(|b| {
        b.store_vector(at.at(0), [batch, head, kv_head, row]);
        b.store_vector(at.at(16), [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end]);
    });
    let numbers = Geometry::of(plan).numbers();
    Some(Job {
        kernel: b.finish(),
        grid: [num_tiles, 1, 1],
        arrays: vec![Array::output("tiles", Elem::U32, &[num_tiles, NUMBERS])],
        args: [JobArg::Pointer(0)].into_iter().chain(numbers.into_iter().map(JobArg::U32)).collect(),
    })
}
