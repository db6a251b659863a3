//! The forms of a plan.

use fa3_cuda::host::{Backward, Device};
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, PlanOptions};
use fa3_types::BackwardProblem;

use super::tensors::Bits;
use crate::{Fallible, ensure};

/// How dQ is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// By additions in any order.
    AnyOrder,
    /// By additions in the order of keys.
    OrderOfKeys,
    /// By a kernel of its own.
    DqKernel,
}

impl Form {
    pub(super) const ALL: [Form; 3] = [Form::AnyOrder, Form::OrderOfKeys, Form::DqKernel];
    pub(super) const DETERMINISTIC: [Form; 2] = [Form::OrderOfKeys, Form::DqKernel];

    /// What makes a plan have this form. None for wide heads, which leave no registers for additions.
    pub(super) fn options(self, device: &Device, problem: &BackwardProblem) -> Option<PlanOptions> {
        let (forward, limits) = (problem.forward(), device.limits());
        let [head_dim, head_dim_v] = [forward.head_dim() as u32, forward.head_dim_v() as u32];
        let adding = |order| {
            let tile = DkvTile::choose_adding([head_dim, head_dim_v], order, &limits);
            tile.map(|tile| PlanOptions::default().dkv(tile))
        };
        match self {
            Form::AnyOrder => adding(AddOrder::Any),
            Form::OrderOfKeys => adding(AddOrder::LastKeysFirst),
            Form::DqKernel => {
                let tile = DqTile::choose(head_dim, head_dim_v, &limits);
                tile.map(|tile| PlanOptions::default().dq(tile))
            }
        }
    }

    pub(super) fn backward(self, device: &Device, problem: &BackwardProblem) -> Fallible<Backward> {
        let options = self.options(device, problem).ok_or("there is no tile for this form")?;
        let backward = Backward::with(device, problem, &options)?;
        let has_it = match backward.plan().dq() {
            DqBy::Additions(_) => self == Form::AnyOrder,
            DqBy::AdditionsInOrder => self == Form::OrderOfKeys,
            DqBy::Kernel(_) => self == Form::DqKernel,
        };
        ensure(has_it, &format!("the plan does not have the form {self:?}:\n{}", backward.plan()))?;
        Ok(backward)
    }

    /// Whether gradients are equal. dQ need not be if it is added up in any order.
    pub(super) fn same(self, x: &Bits, y: &Bits) -> bool {
        let first = usize::from(self == Form::AnyOrder);
        x[first..] == y[first..]
    }
}
