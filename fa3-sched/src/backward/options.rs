//! Options: the choices of a plan that a caller makes.

use std::num::NonZeroU32;

use super::{DkvTile, DqTile};

/// Overrides for [`Plan::with`](super::Plan::with). The plan decides every field that is `None`, the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct PlanOptions {
    /// Whether gradients must be bitwise reproducible. If so, tiles add to dQ in the order of keys
    /// ([`AddOrder::LastKeysFirst`](super::AddOrder::LastKeysFirst)). Otherwise they add in that order only where it is
    /// no slower ([`MOST_KEYS_IN_ORDER`](super::MOST_KEYS_IN_ORDER)).
    pub deterministic: bool,
    /// The tile of the dK/dV kernel.
    pub dkv: Option<DkvTile>,
    /// The tile of a dQ kernel. The tile of the dK/dV kernel must then not add to dQ.
    pub dq: Option<DqTile>,
    /// Number of streaming multiprocessors to use; the others are left to other work. If it is above the device's
    /// number, all are used.
    pub sms: Option<NonZeroU32>,
}

impl PlanOptions {
    fa3_types::setters! {
        /// Requires bitwise reproducible gradients.
        deterministic() { deterministic: true }

        /// Sets the tile of the dK/dV kernel.
        dkv(tile: DkvTile) { dkv: Some(tile) }

        /// Sets the tile of the dQ kernel.
        dq(tile: DqTile) { dq: Some(tile) }

        /// Limits the number of streaming multiprocessors.
        sms(sms: NonZeroU32) { sms: Some(sms) }
    }
}
