//! The choices that a caller makes for a plan.

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
#[must_use]
#[non_exhaustive]
pub struct PlanOptions {
    /// The tile. It must be large enough for the problem's head dimensions. With a tile for transposed V, a kernel
    /// first transposes V that lies in rows ([`DensePlan::v_tiles`](super::DensePlan::v_tiles)). With a tile for V in
    /// rows, no kernel transposes V first. The tile decides the order of sums: with a given tile, a row's result does
    /// not depend on the lengths of the batch's other rows.
    pub tile: Option<CtaTile>,
    /// The order of tiles.
    pub order: Option<Order>,
    /// The tile scheduler.
    pub scheduler: Option<Scheduler>,
    /// Number of streaming multiprocessors to use; the others are left to other work. If it is above the device's
    /// number, all are used.
    pub sms: Option<NonZeroU32>,
    /// Whether CTAs that need the same keys at the same time form clusters: see
    /// [`Plan::cluster`](super::Plan::cluster).
    pub clusters: Option<bool>,
    /// How CTAs split the keys of a sequence ([`PlanKind::SplitKv`](super::PlanKind::SplitKv)); `None` for no split.
    pub split_keys: Option<SplitKeys>,
    /// Limit of the bytes of partial results of splits of a fixed size. Above it each CTA computes whole work tiles,
    /// and merges their splits itself ([`Plan::pieces`](super::Plan::pieces)), where head_dim_v is at most 256. The
    /// bits of results do not change.
    pub split_bytes: Option<u64>,
    /// Whether the caller gives the varlen table, which [`Plan::table`](super::Plan::table) describes, instead of a
    /// kernel that writes it first. The calls of a model's layers can share one table. Whatever a given table holds,
    /// the kernel accesses no memory outside of the tensors.
    pub given_table: bool,
}

/// How CTAs split the keys of a sequence (split-KV).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitKeys {
    /// All CTAs get even shares of the KV blocks, where Q has few rows, as in decoding. The last bits of a row's result
    /// then depend on the other sequences and on the number of SMs.
    Even,
    /// Splits are pieces of the sequence, of a size that follows from the head dimensions alone. Piece i has the keys
    /// from i · size to (i + 1) · size, counted from the sequence's first key, whatever the mask and the rows of Q. A
    /// row's result has the same bits in any batch, beside any other rows of its sequence, in any call, and on any
    /// number of SMs.
    Fixed,
    /// Like `Fixed`, with pieces of this size. Bits are equal among calls with one size.
    FixedSize {
        /// Keys per split, a multiple of the keys of a block.
        keys: u64,
    },
    /// Keys are not split: one CTA computes all keys of a tile. Where Q has few rows, as in decoding, the query heads
    /// of a group are rows of one tile (PackGQA), as they are with splits.
    Whole,
}

impl PlanOptions {
    fa3_types::setters! {
        /// Sets the tile.
        tile(tile: CtaTile) { tile: Some(tile) }

        /// Sets the order of tiles.
        order(order: Order) { order: Some(order) }

        /// Sets the scheduler.
        scheduler(scheduler: Scheduler) { scheduler: Some(scheduler) }

        /// Limits the number of streaming multiprocessors.
        sms(sms: NonZeroU32) { sms: Some(sms) }

        /// Forms clusters of CTAs wherever they are possible, or nowhere.
        clusters(clusters: bool) { clusters: Some(clusters) }

        /// Takes the table of sequences from the caller.
        given_table() { given_table: true }

        /// Sets how CTAs split the keys (split-KV).
        split_keys(split_keys: SplitKeys) { split_keys: Some(split_keys) }

        /// Sets the limit of the bytes of partial results of splits of a fixed size.
        split_bytes(split_bytes: u64) { split_bytes: Some(split_bytes) }
    }
}
