//! Means and scales of channels, computed before the codes: sums over parts of a head's rows, then over all parts.

use fa3_types::{CHANNEL_GROUPS, CHANNEL_ROWS, Shape};

use super::CHUNK;
use crate::{Decoder, Order, TileCounts, TooManyTiles};

/// Rows per part.
pub const PART_ROWS: u32 = CHANNEL_ROWS as u32;

/// Groups of a part's rows that are summed separately, by threads that share a column.
pub const GROUPS: u32 = CHANNEL_GROUPS as u32;

/// How the rows of a tensor's heads are cut into parts. A CTA sums the channels of a part; then one CTA for each head
/// adds up the parts of the head.
#[derive(Clone, Copy, Debug)]
pub struct ChannelPlan {
    counts: TileCounts,
    head_dim: u32,
}

impl ChannelPlan {
    pub(super) fn new(shape: Shape) -> Result<ChannelPlan, TooManyTiles> {
        let counts = TileCounts {
            m_blocks: (shape.seqlen as u32).div_ceil(PART_ROWS),
            heads: shape.heads as u32,
            batch: shape.batch as u32,
        };
        // A head without rows has channels as well.
        TileCounts { m_blocks: counts.m_blocks.max(1), ..counts }.num_tiles()?;
        Ok(ChannelPlan { counts, head_dim: shape.head_dim as u32 })
    }

    /// Parts per head.
    pub fn parts(&self) -> u32 {
        self.counts.m_blocks
    }

    /// Number of CTAs that sum parts, one for each part; 0 if there are no rows.
    pub fn parts_grid(&self) -> u32 {
        self.parts() * self.heads_grid()
    }

    /// Number of CTAs that add up parts, one per head.
    pub fn heads_grid(&self) -> u32 {
        self.counts.heads * self.counts.batch
    }

    /// The numbering of parts; `None` if there are none.
    pub fn decoder(&self) -> Option<Decoder<u32>> {
        (self.parts_grid() > 0).then(|| Decoder::new(self.counts, Order::HEADS_FASTEST))
    }

    /// Threads of a CTA that sums rows of `head_dim` elements, where a thread loads `columns` elements at once.
    pub fn threads(head_dim: u32, columns: u32) -> u32 {
        GROUPS * head_dim / columns
    }
}

impl std::fmt::Display for ChannelPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let threads = ChannelPlan::threads(self.head_dim, CHUNK);
        write!(f, "channels   {} parts of {PART_ROWS} rows of {} heads, ", self.parts(), self.heads_grid())?;
        write!(f, "{} CTAs of {threads} threads", self.parts_grid())
    }
}
