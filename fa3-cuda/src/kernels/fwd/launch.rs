//! What a launch of a forward kernel passes.

use fa3_ir::Elem;
use fa3_sched::{Plan, Scheduler};
use fa3_types::TensorDesc;

use super::params::Params;
use super::{FwdError, FwdSpec, kernel};
use crate::kernels::params::Fill;
use crate::kernels::{Array, ArrayUse, Job, JobArg};

/// The arrays of a forward job, in this order. LSE at address 0 is not written. The last is there under [`Scheduler::DynamicPersistent`] only: 32 bits from
/// which CTAs draw their tiles, 0 before a launch and 0 again after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it")]
pub enum FwdArray {
    Q,
    K,
    V,
    O,
    Lse,
    Counter,
}

/// The kernel of a plan with its arguments; `None` if there are no rows to compute. Arrays are as large as their tensors
/// reach, gaps included.
///
/// # Errors
/// [`FwdError`] if the plan is not for the forward kernels.
pub fn job(plan: &Plan) -> Result<Option<Job>, FwdError> {
    let spec = FwdSpec::of(plan)?;
    if plan.grid == 0 {
        return Ok(None);
    }
    Ok(Some(Job {
        kernel: kernel(&spec),
        grid: [plan.grid, 1, 1],
        arrays: arrays(plan, spec.elem),
        args: args(plan),
    }))
}

fn arrays(plan: &Plan, elem: Elem) -> Vec<Array> {
    let problem = &plan.problem;
    let o = problem.o();
    let [batch, heads, rows] = problem.lse_shape().map(|extent| extent as u32);
    let mut arrays = vec![
        array("q", problem.q(), elem),
        array("k", problem.k(), elem),
        array("v", problem.v(), elem),
        // With gaps, not every element is written.
        Array {
            used: if is_contiguous(o) { ArrayUse::Output } else { ArrayUse::Sum },
            ..array("o", o, elem)
        },
        Array::output("lse", Elem::F32, &[batch, heads, rows]),
    ];
    if plan.scheduler == Scheduler::DynamicPersistent {
        arrays.push(Array::sum("counter", Elem::U32, &[1]));
    }
    arrays
}

fn is_contiguous(tensor: &TensorDesc) -> bool {
    tensor.extent().0 == tensor.shape.dims().iter().map(|&extent| extent as u64).product::<u64>()
}

/// Rows and strides are multiples of 8 elements, so that extents are.
fn array(name: &'static str, tensor: &TensorDesc, elem: Elem) -> Array {
    if is_contiguous(tensor) {
        Array::input(name, elem, &tensor.shape.dims().map(|extent| extent as u32))
    } else {
        Array::input(name, elem, &[(tensor.extent().0 / 8) as u32, 8])
    }
}

/// The arguments of the kernel of a plan that [`FwdSpec::of`] takes, one a parameter; arrays are numbered as [`FwdArray`].
pub fn args(plan: &Plan) -> Vec<JobArg> {
    let mut args = Fill::default();
    Params::of(plan).pass(&mut args);
    args.0
}
