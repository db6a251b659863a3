//! What a launch of a forward kernel passes.

use fa3_ir::Elem;
use fa3_sched::Scheduler;
use fa3_sched::forward::Plan;
use fa3_types::{Problem, TensorDesc};

use super::geometry::Geometry;
use super::{FwdSpec, kernel};
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
pub fn job(plan: &Plan) -> Option<Job> {
    let (spec, grid) = (FwdSpec::of(plan), plan.schedule().grid());
    (grid > 0).then(|| Job {
        kernel: kernel(&spec),
        grid: [grid, 1, 1],
        arrays: arrays(plan, spec.elem),
        args: args(plan),
    })
}

fn arrays(plan: &Plan, elem: Elem) -> Vec<Array> {
    let problem = plan.problem();
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
    if plan.schedule().scheduler() == Scheduler::DynamicPersistent {
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

/// The arguments of a plan's kernel, one a parameter; arrays are numbered as [`FwdArray`].
pub fn args(plan: &Plan) -> Vec<JobArg> {
    let problem = plan.problem();
    // Without keys nothing is loaded of K and V, but a tensor map must be of something.
    let of = |array: FwdArray, tensor: &TensorDesc| {
        if tensor.extent().0 == 0 { view(FwdArray::Q, problem.q()) } else { view(array, tensor) }
    };
    let mut args = vec![
        view(FwdArray::Q, problem.q()),
        of(FwdArray::K, problem.k()),
        of(FwdArray::V, problem.v()),
        JobArg::Pointer(FwdArray::O as usize),
        JobArg::Pointer(FwdArray::Lse as usize),
    ];
    let o = problem.o();
    args.extend(
        [o.strides.batch, o.strides.heads, o.strides.seqlen].map(|stride| JobArg::U64(bytes(o, stride))),
    );
    args.push(JobArg::U32(problem.heads().q() as u32));
    args.extend(scales(problem).into_iter().map(JobArg::F32));
    args.extend(Geometry::of(plan).numbers().into_iter().map(JobArg::U32));
    if plan.schedule().scheduler() == Scheduler::DynamicPersistent {
        args.push(JobArg::Pointer(FwdArray::Counter as usize));
    }
    args
}

/// A tensor with dimensions head_dim, heads, rows, sequences.
fn view(array: FwdArray, tensor: &TensorDesc) -> JobArg {
    let (shape, strides) = (tensor.shape, tensor.strides);
    JobArg::Tensor {
        array: array as usize,
        dims: [shape.head_dim, shape.heads, shape.seqlen, shape.batch].map(|extent| extent as u64).to_vec(),
        strides: [strides.heads, strides.seqlen, strides.batch].map(|stride| bytes(tensor, stride)).to_vec(),
    }
}

/// Strides of a problem's tensors are not negative.
fn bytes(tensor: &TensorDesc, stride: i64) -> u64 {
    stride.unsigned_abs() * tensor.dtype.bytes() as u64
}

/// What a unit of a score is worth in the exponent of 2; and the factor in front of it that makes a product such a unit, if
/// scores are capped: s = c · tanh(Q·K · scale / c).
fn scales(problem: &Problem) -> Vec<f32> {
    let scale = problem.softmax_scale();
    match problem.softcap() {
        None => vec![scale.log2() as f32],
        Some(cap) => {
            let into = scale.natural() / cap.bound();
            vec![(cap.bound() * std::f64::consts::LOG2_E) as f32, into as f32]
        }
    }
}
