//! Plans of a form (way to compute dQ), and their results.

use fa3_cuda::host::{Backward, Device};
use fa3_sched::backward::PlanOptions;
use fa3_tests::bwd::Form;
use fa3_types::BackwardProblem;

use crate::bench::Bits;
use crate::{Fallible, ensure};

/// Options that select this form, if a plan can have it.
pub(crate) fn options(form: Form, device: &Device, problem: &BackwardProblem) -> Option<PlanOptions> {
    let forward = problem.forward();
    form.options([forward.head_dim() as u32, forward.head_dim_v() as u32], &device.limits())
}

/// A plan of this form.
pub(crate) fn plan(form: Form, device: &Device, problem: &BackwardProblem) -> Fallible<Backward> {
    let options = options(form, device, problem).ok_or("there is no tile for this form")?;
    let backward = Backward::with(device, problem, &options)?;
    let has_it = Form::of(backward.plan().dq()) == form;
    ensure(has_it, &format!("the plan does not have the form {form:?}:\n{}", backward.plan()))?;
    Ok(backward)
}

/// Whether gradients are equal. dQ is exempt if its additions are in any order.
pub(crate) fn are_same(form: Form, x: &Bits, y: &Bits) -> bool {
    let first = usize::from(form == Form::AnyOrder);
    x[first..] == y[first..]
}
