//! Decodes the number of a tile into row block, head and sequence.

use crate::{FastDiv, Int, Longest, Order};

/// Tile numbers have 31 bits.
const TILE_LIMIT: u32 = i32::MAX as u32;

/// The error for more tiles than can be numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{tiles} tiles are too many to number, the limit is {limit}")]
#[allow(missing_docs, reason = "the message above names its fields")]
pub struct TooManyTiles {
    pub tiles: u128,
    pub limit: u32,
}

/// The part of the output that a tile computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TileCoord<T> {
    /// The block of tile_m rows within the sequence.
    pub m_block: T,
    /// The query head.
    pub head: T,
    /// The sequence.
    pub batch: T,
}

/// Number of tiles in each dimension, for `batch` sequences of equal length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileCounts {
    /// Row blocks of one head of one sequence.
    pub m_blocks: u32,
    /// Query heads.
    pub heads: u32,
    /// Sequences.
    pub batch: u32,
}

/// Decodes tile numbers in an [`Order`]. The host knows all of its divisors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decoder<T> {
    heads: FastDiv<T>,
    path: Path<T>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path<T> {
    Linear {
        m_blocks: FastDiv<T>,
    },
    Sections {
        /// The last row block, if row blocks run from the last to the first.
        last_m_block: Option<T>,
        /// Heads per section.
        section: T,
        /// Tiles per section.
        section_tiles: FastDiv<T>,
        /// The number of the last section.
        last: T,
        /// Tiles of one row block in each section before the last.
        section_row: FastDiv<T>,
        /// Tiles of one row block in the last section.
        last_row: FastDiv<T>,
    },
}

impl TileCounts {
    /// The counts of one tile, for a [`Decoder`] whose numbers do not matter.
    pub const ONE: TileCounts = TileCounts { m_blocks: 1, heads: 1, batch: 1 };

    /// Number of tiles. Three factors below 2³² need 96 bits.
    pub fn tiles(self) -> u128 {
        [self.m_blocks, self.heads, self.batch].into_iter().map(u128::from).product()
    }

    /// Number of tiles, if they can be numbered.
    ///
    /// # Errors
    /// [`TooManyTiles`].
    pub fn num_tiles(self) -> Result<u32, TooManyTiles> {
        let tiles = self.tiles();
        let numbered = u32::try_from(tiles).ok().filter(|&tiles| tiles <= TILE_LIMIT);
        numbered.ok_or(TooManyTiles { tiles, limit: TILE_LIMIT })
    }
}

impl Decoder<u32> {
    /// # Panics
    /// If there are no tiles, or 2³¹ tiles or more: neither can be numbered.
    pub fn new(counts: TileCounts, order: Order) -> Decoder<u32> {
        assert!((1..=u128::from(TILE_LIMIT)).contains(&counts.tiles()), "{} tiles", counts.tiles());
        let TileCounts { m_blocks, heads, batch } = counts;
        let path = match order {
            Order::Linear => Path::Linear { m_blocks: FastDiv::new(m_blocks) },
            Order::LongestFirst { section, longest } => {
                let section = section.clamp(1, heads * batch);
                let last = (heads * batch / section).saturating_sub(2);
                let last_heads = heads * batch - last * section;
                Path::Sections {
                    last_m_block: (longest == Longest::Last).then_some(m_blocks - 1),
                    section,
                    section_tiles: FastDiv::new(section * m_blocks),
                    last,
                    section_row: FastDiv::new(section),
                    last_row: FastDiv::new(last_heads),
                }
            }
        };
        Decoder { heads: FastDiv::new(heads), path }
    }
}

impl<T> Decoder<T> {
    /// The same decoder with `f` applied to each of its numbers in a fixed order: see [`FastDiv::map`].
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Decoder<U> {
        self.map_named(&mut |_, number| f(number))
    }

    /// Like [`Decoder::map`], with the numbers' names.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> Decoder<U> {
        let heads = self.heads.map_named("tile_heads", f);
        let path = match self.path {
            Path::Linear { m_blocks } => Path::Linear { m_blocks: m_blocks.map_named("m_blocks", f) },
            Path::Sections { last_m_block, section, section_tiles, last, section_row, last_row } => {
                Path::Sections {
                    last_m_block: last_m_block.map(|m_block| f("last_m_block", m_block)),
                    section: f("section", section),
                    section_tiles: section_tiles.map_named("section_tiles", f),
                    last: f("last_section", last),
                    section_row: section_row.map_named("section_row", f),
                    last_row: last_row.map_named("last_section_row", f),
                }
            }
        };
        Decoder { heads, path }
    }
}

impl<T: Int> Decoder<T> {
    /// The tile with this number.
    pub fn decode(&self, index: T) -> TileCoord<T> {
        let (m_block, head, first_head) = match self.path {
            Path::Linear { m_blocks } => {
                let (head, m_block) = m_blocks.div_rem(index);
                (m_block, head, index.lit(0))
            }
            Path::Sections { last_m_block, section, section_tiles, last, section_row, last_row } => {
                let number = section_tiles.quotient(index).at_most(last);
                let within = index.sub_sat(number * section_tiles.divisor());
                let row = FastDiv::select(number.lt(last), section_row, last_row);
                let (step, head) = row.div_rem(within);
                let m_block = last_m_block.map_or(step, |last| last.sub_sat(step));
                (m_block, head, number * section)
            }
        };
        let (batch, head) = self.heads.div_rem(first_head + head);
        TileCoord { m_block, head, batch }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use proptest::prelude::*;

    const LAST: Longest = Longest::Last;

    fn decode_all(counts: TileCounts, order: Order) -> Vec<TileCoord<u32>> {
        let decoder = Decoder::new(counts, order);
        (0..counts.tiles() as u32).map(|index| decoder.decode(index)).collect()
    }

    /// Asserts that decoding visits every tile once and nothing else, and that checked integers agree.
    fn is_a_permutation(counts: TileCounts, order: Order) {
        let tiles = decode_all(counts, order);
        let TileCounts { m_blocks, heads, batch } = counts;
        let mut seen = vec![false; tiles.len()];
        let checked = Decoder::new(counts, order).map(Checked::from);
        for (index, tile) in tiles.into_iter().enumerate() {
            let TileCoord { m_block, head, batch: b } = tile;
            assert!(m_block < m_blocks && head < heads && b < batch, "{counts:?} {order:?}");
            let flat = (b * heads + head) * m_blocks + m_block;
            assert!(
                !std::mem::replace(&mut seen[flat as usize], true),
                "{tile:?} twice: {counts:?} {order:?}"
            );
            let other = checked.decode(Checked(index as u64));
            let other = [other.m_block, other.head, other.batch].map(|number| number.0);
            assert_eq!(other, [m_block, head, b].map(u64::from));
        }
    }

    fn orders(heads: u32) -> impl Iterator<Item = Order> {
        let sections = (0..=heads + 1).flat_map(|section| {
            [Longest::First, LAST].map(|longest| Order::LongestFirst { section, longest })
        });
        sections.chain([Order::Linear])
    }

    #[test]
    fn every_small_order_visits_every_tile_once() {
        let sides = || 1u32..=4;
        for m_blocks in 1..=5 {
            for (heads, batch) in sides().flat_map(|heads| sides().map(move |batch| (heads, batch))) {
                let counts = TileCounts { m_blocks, heads, batch };
                orders(heads * batch).for_each(|order| is_a_permutation(counts, order));
            }
        }
    }

    #[test]
    fn linear_keeps_to_one_head() {
        let counts = TileCounts { m_blocks: 3, heads: 2, batch: 2 };
        let order: Vec<_> =
            decode_all(counts, Order::Linear).iter().map(|t| (t.batch, t.head, t.m_block)).collect();
        assert_eq!(order[..7], [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 1, 2), (1, 0, 0)]);
    }

    #[test]
    fn sections_run_through_their_heads_from_the_longest_tile() {
        let counts = TileCounts { m_blocks: 2, heads: 4, batch: 1 };
        let order = Order::LongestFirst { section: 1, longest: LAST };
        let order: Vec<_> = decode_all(counts, order).iter().map(|t| (t.m_block, t.head)).collect();
        assert_eq!(order, [(1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (1, 3), (0, 2), (0, 3)]);
    }

    #[test]
    fn the_largest_grid_does_not_overflow() {
        let counts = TileCounts { m_blocks: (1 << 20) - 1, heads: 64, batch: 32 };
        for order in [Order::Linear, Order::LongestFirst { section: 24, longest: LAST }] {
            let (decoder, last) = (Decoder::new(counts, order), counts.tiles() as u32 - 1);
            let tile = decoder.map(Checked::from).decode(last.into());
            assert_eq!(tile.batch, Checked(31));
            assert_eq!(tile.head, Checked(63));
        }
    }

    proptest! {
        #[test]
        fn any_order_visits_every_tile_once(
            m_blocks in 1u32..40, heads in 1u32..20, batch in 1u32..6, section in 0u32..200,
        ) {
            let counts = TileCounts { m_blocks, heads, batch };
            is_a_permutation(counts, Order::Linear);
            for longest in [Longest::First, LAST] {
                is_a_permutation(counts, Order::LongestFirst { section, longest });
            }
        }
    }
}
