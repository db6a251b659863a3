//! Splits tiles of keys that many blocks of rows see, so that no CTA finishes long after the others. Under a mask of
//! intervals the blocks that see a tile are data, and so is the split.
//!
//! ```text
//! size  = ⌈Σ blocks of all tiles / (2 · CTAs)⌉     the most blocks of rows of a part
//! parts = ⌈blocks / size⌉                           of a tile of more than 2 · size blocks
//! ```
//!
//! A tile is split if it has more blocks than the average CTA. A part has half of that average, because blocks that
//! need a mask take longer, and split tiles often have such blocks. Parts are computed like tiles, before the other
//! tiles, and their results are added up afterwards.
//!
//! However blocks are distributed, there are at most 3 · CTAs parts: ⌈blocks / size⌉ ≤ 3/2 · blocks / size where blocks
//! > 2 · size, and Σ blocks / size ≤ 2 · CTAs.

use std::num::NonZeroU32;

use crate::{FastDiv, Int, KvRange};

/// The numbers that determine a split. Blocks are counted in units of `unit` blocks, such that all tiles together have
/// fewer than 2³¹ units, and one tile has fewer than 2²⁴ units. A unit is one block unless sequences have millions of
/// rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileSplit<T> {
    /// Twice the number of CTAs.
    shares: FastDiv<T>,
    unit: FastDiv<T>,
    /// Largest number of units of a tile.
    longest: T,
}

impl TileSplit<u32> {
    /// The split of `tiles` tiles of at most `blocks` blocks each among `ctas` CTAs.
    pub fn new(ctas: NonZeroU32, tiles: u32, blocks: u32) -> TileSplit<u32> {
        let fits = |unit: &u32| {
            let units = u64::from(blocks.div_ceil(*unit));
            units < 1 << 24 && units * u64::from(tiles) < 1 << 31
        };
        let unit = (0..31).map(|log2| 1 << log2).find(fits).unwrap_or(1 << 31);
        TileSplit {
            shares: FastDiv::new(ctas.get().saturating_mul(2)),
            unit: FastDiv::new(unit),
            longest: blocks.div_ceil(unit),
        }
    }

    /// Largest number of tiles that are split.
    pub fn most_tiles(&self) -> u32 {
        self.shares.divisor() / 2
    }

    /// Largest number of parts of all split tiles together.
    pub fn most_parts(&self) -> u32 {
        self.most_tiles().saturating_mul(3)
    }
}

impl<T> TileSplit<T> {
    /// Applies `f` to each number of this value, by name, in a fixed order.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> TileSplit<U> {
        TileSplit {
            shares: self.shares.map_named("shares", f),
            unit: self.unit.map_named("unit", f),
            longest: f("longest", self.longest),
        }
    }
}

impl<T: Int> TileSplit<T> {
    /// Number of units of a tile's blocks.
    pub fn units(self, blocks: KvRange<T>) -> T {
        self.unit.div_ceil(blocks.end.sub_sat(blocks.first))
    }

    /// Largest number of units of a part, if all tiles together have `units` units.
    pub fn size(self, units: T) -> T {
        self.shares.div_ceil(units).at_most(self.longest).at_least(units.lit(1))
    }

    /// Number of parts of a tile of `units` units: 1 if it is not split.
    pub fn parts(self, units: T, size: T) -> T {
        let one = units.lit(1);
        T::select(is_split(units, size), units.sub_sat(one).div(size) + one, one)
    }

    /// Number of blocks in `units` units.
    pub fn blocks(self, units: T) -> T {
        units * self.unit.divisor()
    }
}

/// Whether a tile of `blocks` blocks or units is split.
pub fn is_split<T: Int>(blocks: T, size: T) -> T::Bool {
    (size + size).lt(blocks)
}

/// Part `number` of a tile's blocks. Each part but the last has `size` blocks.
pub fn part<T: Int>(blocks: KvRange<T>, number: T, size: T) -> KvRange<T> {
    let first = (blocks.first + number * size).at_most(blocks.end);
    let end = (first + size).at_most(blocks.end);
    let inside = |block: T| block.at_least(first).at_most(end);
    let [unmasked_first, unmasked_end] = [blocks.unmasked_first, blocks.unmasked_end].map(inside);
    KvRange { first, unmasked_first, unmasked_end, end }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::checked::Checked;

    fn range(first: u32, [masked, plain, behind]: [u32; 3]) -> KvRange<u32> {
        let (unmasked_first, unmasked_end) = (first + masked, first + masked + plain);
        KvRange { first, unmasked_first, unmasked_end, end: unmasked_end + behind }
    }

    proptest! {
        /// The splits of a tile contain all of its blocks, in order and with unchanged masking, and do not exceed the
        /// available room.
        #[test]
        fn parts_are_the_tile(
            ctas in 1_u32..9, scale in prop_oneof![Just(1_u32), Just(1 << 20)],
            tiles in proptest::collection::vec((0_u32..20, [0_u32..9, 0_u32..40, 0_u32..9]), 1..30),
        ) {
            let tiles: Vec<KvRange<u32>> =
                tiles.into_iter().map(|(first, parts)| range(first * scale, parts.map(|x| x * scale))).collect();
            let longest = tiles.iter().map(|tile| tile.end - tile.first).max().unwrap();
            let splits = TileSplit::new(NonZeroU32::new(ctas).unwrap(), tiles.len() as u32, longest);
            let of_kernel = splits.map_named(&mut |_, number| Checked::from(number));
            let sum: u32 = tiles.iter().map(|&tile| splits.units(tile)).sum();
            let size = splits.size(sum);
            prop_assert_eq!(of_kernel.size(sum.into()).0, u64::from(size));
            let blocks = splits.blocks(size);
            let (mut split, mut parts) = (0, 0);
            for &tile in &tiles {
                let count = splits.parts(splits.units(tile), size);
                let count_of_kernel = of_kernel.parts(of_kernel.units(tile.map(Checked::from)), size.into());
                prop_assert_eq!(count_of_kernel.0, u64::from(count));
                prop_assert_eq!(count > 1, is_split(tile.end - tile.first, blocks));
                if count == 1 {
                    continue;
                }
                (split, parts) = (split + 1, parts + count);
                let mut at = (tile.first, 0);
                for number in 0..count {
                    let part = part(tile, number, blocks);
                    let kept = super::part(tile.map(Checked::from), number.into(), blocks.into());
                    prop_assert_eq!(kept, part.map(Checked::from));
                    prop_assert!(part.first == at.0 && part.end - part.first <= blocks);
                    prop_assert!(part.first < part.end, "an empty part");
                    let unmasked = tile.unmasked_first.max(part.first)..tile.unmasked_end.min(part.end);
                    prop_assert_eq!((part.unmasked_first..part.unmasked_end).len(), unmasked.len());
                    prop_assert!(unmasked.is_empty() || part.unmasked_first == unmasked.start);
                    prop_assert!(part.first <= part.unmasked_first && part.unmasked_end <= part.end);
                    at = (part.end, at.1 + unmasked.len());
                }
                let plain = (tile.unmasked_end - tile.unmasked_first) as usize;
                prop_assert_eq!(at, (tile.end, plain));
            }
            prop_assert!(split <= splits.most_tiles() && parts <= splits.most_parts());
        }
    }

    /// A window beside an attention sink: all row blocks see 4 of the 512 tiles of keys.
    #[test]
    fn what_all_rows_see_is_split() {
        let splits = TileSplit::new(NonZeroU32::new(132).unwrap(), 512, 256);
        let size = splits.size(508 * 18 + 4 * 256);
        assert_eq!((size, splits.parts(256, size), splits.parts(18, size)), (39, 7, 1));
        // The sums of such lengths would overflow.
        let long = TileSplit::new(NonZeroU32::new(132).unwrap(), 1 << 22, 1 << 25);
        assert_eq!((long.units(range(0, [0, 1 << 25, 0])), long.most_parts()), (1 << 8, 396));
        // With very few CTAs, the blocks of a split still fit in an integer.
        let one = TileSplit::new(NonZeroU32::MIN, 1 << 30, 1 << 25)
            .map_named(&mut |_, number| Checked::from(number));
        assert_eq!(one.blocks(one.size(((1 << 31) - 1).into())).0, 1 << 25);
    }
}
