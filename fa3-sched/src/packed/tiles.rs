//! The tiles of a varlen table, and the CTAs that fetch them.

use std::num::NonZeroU32;

use super::{Plan, Sections};
use crate::{Longest, Order, TooManyTiles};

/// Limit of the number of tiles: they are found by a division that is exact below this limit.
const TILE_LIMIT: u32 = 1 << 24;

/// The tiles of a kernel that finds them through a table.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    table: Plan,
    heads: u32,
    section: u32,
    longest: Longest,
    grid: u32,
}

impl Tiles {
    /// The tiles of the table's row blocks for `heads` heads, in sections of `section` heads. CTAs go through a
    /// sequence starting from the end `longest`.
    ///
    /// # Errors
    /// [`TooManyTiles`].
    ///
    /// # Panics
    /// If `section` does not divide `heads`.
    pub fn new(
        table: Plan,
        [heads, section]: [u32; 2],
        longest: Longest,
        sms: NonZeroU32,
    ) -> Result<Tiles, TooManyTiles> {
        assert!(section > 0 && heads.is_multiple_of(section), "sections of {section} of {heads} heads");
        let tiles = u128::from(table.capacity()) * u128::from(heads);
        if tiles > u128::from(TILE_LIMIT) {
            return Err(TooManyTiles { tiles, limit: TILE_LIMIT });
        }
        let grid = if table.has_rows() { sms.get().min(tiles as u32) } else { 0 };
        Ok(Tiles { table, heads, section, longest, grid })
    }

    /// The table.
    pub fn table(&self) -> &Plan {
        &self.table
    }

    /// Largest number of tiles that there may be.
    pub fn most(&self) -> u32 {
        self.table.capacity() * self.heads
    }

    /// How the heads of a sequence are numbered.
    pub fn sections(&self) -> Sections<u32> {
        Sections::new(self.heads, self.section)
    }

    /// The end of a sequence that has its longest tiles. These tiles come first.
    pub fn longest(&self) -> Longest {
        self.longest
    }

    /// The order of a sequence's tiles. Sequences are ordered by their longest tile.
    pub fn order(&self) -> Order {
        Order::LongestFirst { section: self.section, longest: self.longest }
    }

    /// Number of CTAs; 0 if the tensor that is cut has no rows, so that there is nothing to launch.
    pub fn grid(&self) -> u32 {
        self.grid
    }
}

/// The smallest section that has whole groups, divides all heads, and has tiles for half of the SMs, if a head has
/// `head_tiles` tiles; or all heads. Sections of sequences of one length ([`Order`]) have about this size.
pub fn section(head_tiles: u32, [heads, group]: [u32; 2], sms: NonZeroU32) -> u32 {
    let wanted = sms.get().div_ceil(2).div_ceil(head_tiles.max(1));
    (1..=heads / group)
        .map(|groups| groups * group)
        .find(|&section| section >= wanted && heads.is_multiple_of(section))
        .unwrap_or(heads)
}

/// The section nearest to `wanted` heads that divides all heads.
pub fn nearest_section(wanted: u32, heads: u32) -> u32 {
    let percent = |section: u32| {
        let (section, wanted) = (u64::from(section), u64::from(wanted.max(1)));
        100 * section.max(wanted) / section.min(wanted)
    };
    (1..=heads).filter(|&section| heads.is_multiple_of(section)).min_by_key(|&x| percent(x)).unwrap_or(heads)
}
