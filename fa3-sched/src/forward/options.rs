//! A caller's decisions on a plan.

use std::num::NonZeroU32;

use super::CtaTile;
use crate::{Order, Scheduler};

/// Overrides for [`Plan::with`](super::Plan::with). The plan decides every field that is `None`, the default.
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
    /// The tile. It must be large enough for the problem's head dimensions. With a tile for transposed V, a kernel
    /// transposes V in rows beforehand ([`DensePlan::v_tiles`](super::DensePlan::v_tiles)); with a tile for V in rows,
    /// none does. The tile decides the order of sums: with a given tile, a row's result does not depend on the lengths
    /// of the batch's other rows.
    pub tile: Option<CtaTile>,
    /// The order of tiles.
    pub order: Option<Order>,
    /// The tile scheduler.
    pub scheduler: Option<Scheduler>,
    /// Streaming multiprocessors to use; the others are left to other work. A number above the device's counts as all.
    pub sms: Option<NonZeroU32>,
    /// Whether CTAs that need the same keys at a time form clusters, see [`Plan::cluster`](super::Plan::cluster).
    pub clusters: Option<bool>,
    /// How CTAs split the keys of a sequence ([`PlanKind::SplitKv`](super::PlanKind::SplitKv)), if they do.
    pub split_keys: Option<SplitKeys>,
    /// Whether the caller gives the varlen table, which [`Plan::table`](super::Plan::table) describes, instead of a
    /// kernel that writes it first. The calls of a model's layers can share one table. Whatever a given table holds,
    /// the kernel accesses no memory outside of the tensors.
    pub given_table: bool,
}

/// How CTAs split the keys of a sequence (split-KV).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKeys {
    /// All CTAs get equally many blocks of keys, where Q has few rows, as in decoding. The last bits of a row's result
    /// then depend on the other sequences and on the number of SMs.
    Even,
    /// In pieces of a fixed number of keys, whatever the rows of Q. A row's result has the same bits in any batch and
    /// on any number of SMs.
    FixedSize {
        /// Keys per piece, a multiple of the keys of a block.
        keys: u64,
    },
    /// Not at all: one CTA computes all keys of a tile. Where Q has few rows, as in decoding, the query heads of a
    /// group are rows of one tile (PackGQA), as with the other values.
    Whole,
}

impl PlanOptions {
    /// Sets the tile.
    #[must_use]
    pub fn tile(self, tile: CtaTile) -> PlanOptions {
        PlanOptions { tile: Some(tile), ..self }
    }

    /// Sets the order of tiles.
    #[must_use]
    pub fn order(self, order: Order) -> PlanOptions {
        PlanOptions { order: Some(order), ..self }
    }

    /// Sets the scheduler.
    #[must_use]
    pub fn scheduler(self, scheduler: Scheduler) -> PlanOptions {
        PlanOptions { scheduler: Some(scheduler), ..self }
    }

    /// Limits the number of streaming multiprocessors.
    #[must_use]
    pub fn sms(self, sms: NonZeroU32) -> PlanOptions {
        PlanOptions { sms: Some(sms), ..self }
    }

    /// Forms clusters of CTAs wherever they are possible, or nowhere.
    #[must_use]
    pub fn clusters(self, clusters: bool) -> PlanOptions {
        PlanOptions { clusters: Some(clusters), ..self }
    }

    /// Takes the table of sequences from the caller.
    #[must_use]
    pub fn given_table(self) -> PlanOptions {
        PlanOptions { given_table: true, ..self }
    }

    /// Sets how CTAs split the keys (split-KV).
    #[must_use]
    pub fn split_keys(self, split_keys: SplitKeys) -> PlanOptions {
        PlanOptions { split_keys: Some(split_keys), ..self }
    }
}
