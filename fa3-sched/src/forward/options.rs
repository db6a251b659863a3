//! A caller's decisions on a plan.

use std::num::NonZeroU32;

use super::CtaTile;
use crate::{Order, Scheduler};

/// Overrides for [`Plan::with`](super::Plan::with). What is `None`, as everything is by default, the plan
/// decides itself.
///
/// ```
/// use fa3_sched::Order;
/// use fa3_sched::forward::PlanOptions;
///
/// let options = PlanOptions::default().order(Order::Linear).sms(100.try_into()?);
/// assert_eq!((options.order, options.scheduler), (Some(Order::Linear), None));
/// # Ok::<(), std::num::TryFromIntError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The tile. It must be large enough for the problem's head dimensions. One for V that is transposed has a kernel
    /// transpose V in rows before ([`Numbered::v_tiles`](super::Numbered::v_tiles)), one for V in rows has not. The
    /// tile decides the order of sums: with a given tile, a row's result does not depend on the lengths of the batch's
    /// other rows.
    pub tile: Option<CtaTile>,
    /// The order of tiles.
    pub order: Option<Order>,
    /// The tile scheduler.
    pub scheduler: Option<Scheduler>,
    /// Streaming multiprocessors to use; the others are left to other work. A number above the device's counts as all.
    pub sms: Option<NonZeroU32>,
    /// Whether CTAs that need the same keys at a time are clusters, see [`Plan::cluster`](super::Plan::cluster).
    pub clusters: Option<bool>,
    /// How CTAs share the keys of a sequence ([`Way::Shared`](super::Way::Shared)), if they do.
    pub split_keys: Option<SplitKeys>,
    /// Whether the caller gives the table of packed sequences, which [`Plan::table`](super::Plan::table) describes, in
    /// place of a kernel that writes it before: the calls of a model's layers share one. The kernel reads nothing of it
    /// that could lead out of the tensors.
    pub given_table: bool,
}

/// How CTAs share the keys of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKeys {
    /// All CTAs have as many, where rows of Q are few, as in decoding. A row's result then depends on the other
    /// sequences in its last bits, and on the number of SMs.
    Equally,
    /// In pieces of so many keys, a multiple of those of a block, whatever the rows of Q. A row's result has the same
    /// bits in any batch and on any number of SMs.
    Pieces {
        /// Keys of a piece.
        keys: u64,
    },
}

impl PlanOptions {
    /// With this tile.
    #[must_use]
    pub fn tile(self, tile: CtaTile) -> PlanOptions {
        PlanOptions { tile: Some(tile), ..self }
    }

    /// With tiles in this order.
    #[must_use]
    pub fn order(self, order: Order) -> PlanOptions {
        PlanOptions { order: Some(order), ..self }
    }

    /// With this scheduler.
    #[must_use]
    pub fn scheduler(self, scheduler: Scheduler) -> PlanOptions {
        PlanOptions { scheduler: Some(scheduler), ..self }
    }

    /// With at most this many streaming multiprocessors.
    #[must_use]
    pub fn sms(self, sms: NonZeroU32) -> PlanOptions {
        PlanOptions { sms: Some(sms), ..self }
    }

    /// With clusters of CTAs wherever there can be some, or without.
    #[must_use]
    pub fn clusters(self, clusters: bool) -> PlanOptions {
        PlanOptions { clusters: Some(clusters), ..self }
    }

    /// With a table that the caller gives.
    #[must_use]
    pub fn given_table(self) -> PlanOptions {
        PlanOptions { given_table: true, ..self }
    }

    /// With keys that CTAs share in this way.
    #[must_use]
    pub fn split_keys(self, split_keys: SplitKeys) -> PlanOptions {
        PlanOptions { split_keys: Some(split_keys), ..self }
    }
}
