//! The order in which tiles are computed.

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::Mask;

use crate::TileCounts;

/// The order in which tiles are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The m_block varies fastest, then the head, then the batch. Tiles that run at the same time then read the same K
    /// and V, which come from memory once and from L2 afterwards. (With the head fastest, 256 heads of 1024 rows ran at
    /// three quarters of the speed on an H100.)
    Linear,
    /// Longest processing time first (Graham 1969). Heads, numbered through all sequences, are cut into sections that
    /// are small enough for their K and V to stay in L2. The last section has the remaining heads, at least twice as
    /// many as the others: its tiles alone decide how evenly CTAs end. Within a section m_blocks run from the end with
    /// the longer tiles to the other end, the head fastest. Under a causal mask each tile of a section is at most as
    /// long as the tile before it, so a single section is exactly in the order of the LPT rule.
    LongestFirst {
        /// Heads per section, at least 1. The last section has fewer than three times this number.
        section: u32,
        /// The end to start from.
        longest: Longest,
    },
}

/// Which end of a sequence has the longest tiles, the tiles that visit the most keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Longest {
    /// The start of the sequence: under a window that is bounded on the left only.
    First,
    /// The end of the sequence: under a causal mask and every other window. Without a mask all tiles are equally long.
    Last,
}

impl Order {
    /// The head varies fastest, then m_block from the start: neighbouring tiles read rows that are near in memory.
    pub const HEADS_FASTEST: Order = Order::LongestFirst { section: u32::MAX, longest: Longest::First };

    /// Chooses the linear order if all tiles are equal, otherwise sections of whole KV heads with `group` query heads
    /// each:
    ///
    /// ```text
    /// heads = ⌈sms / 2 / tiles_a_head⌉      tiles_a_head = m_blocks · group
    /// ```
    ///
    /// A section has tiles for half of the SMs, so that the SMs work on two or three sections at a time; the last
    /// section is larger. With smaller sections, SMs wait for the K and V of one section after another. With larger
    /// sections, K and V no longer stay in L2. docs/performance.md has the measurements.
    pub(crate) fn choose(mask: Mask, counts: TileCounts, group: u32, sms: NonZeroU32) -> Order {
        if mask == Mask::None { Order::Linear } else { Order::in_sections(mask, counts, group, sms) }
    }

    /// The order in sections, whatever the mask.
    pub(crate) fn in_sections(mask: Mask, counts: TileCounts, group: u32, sms: NonZeroU32) -> Order {
        let group = u64::from(group);
        let kv_heads = u64::from(counts.heads) / group * u64::from(counts.batch);
        let head_tiles = (u64::from(counts.m_blocks) * group).max(1);
        let heads = u64::from(sms.get()).div_ceil(2 * head_tiles).min(kv_heads) * group;
        let section = u32::try_from(heads).unwrap_or(u32::MAX);
        Order::LongestFirst { section, longest: Longest::from(mask) }
    }
}

impl From<Mask> for Longest {
    fn from(mask: Mask) -> Longest {
        match mask.reach() {
            (Some(_), None) => Longest::First,
            _ => Longest::Last,
        }
    }
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Linear => f.pad("linear"),
            Order::LongestFirst { section, .. } => {
                f.pad(&format!("longest first, heads in sections of {section}"))
            }
        }
    }
}
