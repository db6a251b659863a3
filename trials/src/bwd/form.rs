//! Ways to compute dQ.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, PlanOptions};

/// How a plan computes dQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Atomic additions in any order.
    AnyOrder,
    /// Additions in the order of the KV tiles (deterministic).
    OrderOfKeys,
    /// A separate dQ kernel.
    DqKernel,
}

impl Form {
    /// Every form.
    pub const ALL: [Form; 3] = [Form::AnyOrder, Form::OrderOfKeys, Form::DqKernel];
    /// The deterministic forms, which give the same bits in every run.
    pub const DETERMINISTIC: [Form; 2] = [Form::OrderOfKeys, Form::DqKernel];

    /// The form of a plan.
    pub fn of(dq: &DqBy) -> Form {
        match dq {
            DqBy::Additions => Form::AnyOrder,
            DqBy::AdditionsInOrder => Form::OrderOfKeys,
            DqBy::Kernel(_) => Form::DqKernel,
        }
    }

    /// Plan options that select this form for these head dimensions. `None` for dQ additions in wide heads, which have
    /// no registers left for them.
    pub fn options(self, [head_dim, head_dim_v]: [u32; 2], limits: &DeviceLimits) -> Option<PlanOptions> {
        let options = PlanOptions::default();
        let adding = |order| {
            let tile = DkvTile::choose_adding([head_dim, head_dim_v], order, limits);
            tile.map(|tile| options.dkv(tile))
        };
        match self {
            Form::AnyOrder => adding(AddOrder::Any),
            Form::OrderOfKeys => adding(AddOrder::LastKeysFirst),
            Form::DqKernel => DqTile::choose(head_dim, head_dim_v, limits).map(|tile| options.dq(tile)),
        }
    }
}
