//! The forms of a plan.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, PlanOptions};

/// How dQ is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// By additions in any order.
    AnyOrder,
    /// By additions in the order of keys.
    OrderOfKeys,
    /// By a kernel of its own.
    DqKernel,
}

impl Form {
    /// All of them.
    pub const ALL: [Form; 3] = [Form::AnyOrder, Form::OrderOfKeys, Form::DqKernel];
    /// Forms with the same bits in every run.
    pub const DETERMINISTIC: [Form; 2] = [Form::OrderOfKeys, Form::DqKernel];

    /// The form of a plan.
    pub fn of(dq: &DqBy) -> Form {
        match dq {
            DqBy::Additions => Form::AnyOrder,
            DqBy::AdditionsInOrder => Form::OrderOfKeys,
            DqBy::Kernel(_) => Form::DqKernel,
        }
    }

    /// The options with which a plan of these head dimensions has this form. None for wide heads, which leave no
    /// registers for additions.
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
