//! How sequences are cut into row blocks, and what a sequence costs.

use fa3_types::Mask;

use super::CHUNK;
use crate::{FastDiv, Int, Longest, SeqLens, Tiling};

/// A larger cost counts as this: a cost and the place of a sequence in its chunk form one key of 31 bits.
const MOST: u32 = (1 << 31) / CHUNK - 1;

/// How sequences are cut into row blocks, and their keys into blocks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut<T> {
    tiling: Tiling<T>,
    rows: FastDiv<T>,
    longest: Longest,
}

impl Cut<u32> {
    /// Tiles of `tile_m` rows, blocks of `tile_n` keys.
    ///
    /// # Panics
    /// If either is 0.
    pub fn new(tile_m: u32, tile_n: u32, mask: Mask) -> Cut<u32> {
        // All heads of a sequence have the same cost.
        let tiling = Tiling::new(tile_m, tile_n, 1, mask);
        Cut { tiling, rows: FastDiv::new(tile_m), longest: Longest::from(mask) }
    }
}

impl<T> Cut<T> {
    /// Applies `f` to each number of this value, by name, in a fixed order.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> Cut<U> {
        Cut {
            tiling: self.tiling.map_named(f),
            rows: self.rows.map_named("block_rows", f),
            longest: self.longest,
        }
    }
}

impl<T: Int> Cut<T> {
    /// Number of row blocks of `rows` rows.
    pub fn blocks(&self, rows: T) -> T {
        self.rows.div_ceil(rows)
    }

    /// Number of rows of `blocks` whole row blocks.
    pub fn rows(&self, blocks: T) -> T {
        blocks * self.rows.divisor()
    }

    /// Number of KV blocks of a sequence's longest tile, which is the first or the last tile of the sequence. Under a
    /// window that is bounded on both sides, tiles between the ends are longer by a block or two. With chunks it is
    /// about the cost of a whole chunk.
    pub fn cost(&self, len: SeqLens<T>) -> T {
        if let Some(blocks) = self.tiling.blocks_of_chunks(len) {
            return blocks.at_most(len.q.lit(MOST));
        }
        let m_block = match self.longest {
            Longest::First => len.q.lit(0),
            Longest::Last => self.rows.quotient(len.q.sub_sat(len.q.lit(1))),
        };
        self.tiling.kv_range(m_block, len).blocks().at_most(len.q.lit(MOST))
    }

    /// An upper bound of the KV blocks of any tile of a sequence. A tile with all rows of the sequence reaches it.
    pub fn most(&self, len: SeqLens<T>) -> T {
        if self.tiling.has_two_sides() { self.tiling.all_blocks(len) } else { self.cost(len) }
    }

    /// An upper bound of the KV blocks of a sequence's tiles, where a tile's blocks are counted from the beginning of
    /// the piece of `size` blocks in which the tile's first one lies. Pieces are counted from the sequence's first key.
    pub fn most_from_pieces(&self, len: SeqLens<T>, size: FastDiv<T>) -> T {
        let most = self.most(len);
        if !self.tiling.has_left_side() {
            return most;
        }
        let (all, size) = (self.tiling.blocks_of_keys(len), size.divisor());
        let from_piece = (most + size).sub_sat(all.lit(1)).at_most(all);
        T::select(all.le(size), most, from_piece)
    }
}

/// The sort key, below 2³¹, of the sequence at `place` in its chunk. No two keys are equal. The sequence with the
/// larger key comes first: it has the larger cost, or among equal costs the smaller place.
pub fn sort_key<T: Int>(cost: T, place: T) -> T {
    cost * place.lit(CHUNK) + place.lit(CHUNK - 1).sub_sat(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use proptest::prelude::*;

    /// Masks under which the longest tile is the first or the last one.
    fn mask() -> impl Strategy<Value = Mask> {
        let left = (0_u32..150).prop_map(|left| Mask::window(Some(left), None));
        let right = (0_u32..150).prop_map(|right| Mask::window(None, Some(right)));
        prop_oneof![Just(Mask::None), Just(Mask::Causal), left, right]
    }

    /// Windows with two sides, some in chunks.
    fn two_sides() -> impl Strategy<Value = Mask> {
        (0_u32..150, 0_u32..150, 0_i64..100).prop_map(|(left, right, chunk)| {
            Mask::window(Some(left), Some(right)).and(Mask::from_chunk(chunk).unwrap()).unwrap()
        })
    }

    proptest! {
        #[test]
        fn no_tile_visits_more_than_the_cost(
            (q, k) in (0_u32..200, 0_u32..200), (tile_m, tile_n) in (1_u32..40, 1_u32..40), mask in mask(),
        ) {
            let (cut, tiling) = (Cut::new(tile_m, tile_n, mask), Tiling::new(tile_m, tile_n, 1, mask));
            let len = SeqLens { q, k };
            let blocks = cut.blocks(q);
            prop_assert_eq!(blocks, q.div_ceil(tile_m));
            let longest = (0..blocks).map(|m_block| tiling.kv_range(m_block, len).blocks()).max();
            prop_assert_eq!(cut.cost(len), longest.unwrap_or(0));
        }

        #[test]
        fn no_tile_visits_more_than_the_most(
            (q, k) in (0_u32..200, 0_u32..200), (tile_m, tile_n) in (1_u32..40, 1_u32..40),
            mask in prop_oneof![mask(), two_sides()], size in 1_u32..9,
        ) {
            let (cut, tiling) = (Cut::new(tile_m, tile_n, mask), Tiling::new(tile_m, tile_n, 1, mask));
            let len = SeqLens { q, k };
            let longest = (0..cut.blocks(q)).map(|m_block| tiling.kv_range(m_block, len).blocks()).max();
            prop_assert!(cut.most(len) >= longest.unwrap_or(0));
            prop_assert!(q > tile_m || cut.most(len) == longest.unwrap_or(0));
            prop_assert!(mask.chunks().is_none() || cut.cost(len) >= longest.unwrap_or(0));
            let reaches = |m_block| {
                let kv = tiling.kv_range(m_block, len);
                kv.end.saturating_sub(kv.first / size * size)
            };
            let farthest = (0..cut.blocks(q)).map(reaches).max().unwrap_or(0);
            let (most, pieces) = (cut.most_from_pieces(len, FastDiv::new(size)), k.div_ceil(tile_n).div_ceil(size));
            prop_assert!(farthest.div_ceil(size) <= most.div_ceil(size) && most.div_ceil(size) <= pieces);
        }

        #[test]
        fn keys_are_ordered_by_cost_then_by_place(one in (0..MOST + 1, 0..CHUNK), other in (0..5_u32, 0..CHUNK)) {
            let key = |(cost, place): (u32, u32)| sort_key(Checked::from(cost), place.into()).0;
            let near = (one.0.saturating_sub(other.0), other.1);
            let is_before = one.0 > near.0 || one.0 == near.0 && one.1 < near.1;
            prop_assert_eq!(key(one) > key(near), is_before);
            prop_assert_eq!(key(one) == key(near), one == near);
        }
    }

    /// Lengths and windows at the end of their range.
    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let top = i32::MAX as u32;
        for mask in
            [Mask::None, Mask::Causal, Mask::window(Some(top), None), Mask::window(Some(7), Some(top))]
        {
            let cut = Cut::new(64, 16, mask).map_named(&mut |_, number| Checked::from(number));
            for (q, k) in [(top, top), (1, top), (top, 1), (top, 0), (0, top)] {
                let cost = cut.cost(SeqLens { q: q.into(), k: k.into() });
                assert!(cost.0 <= u64::from(MOST));
                assert_eq!(cut.blocks(q.into()).0, u64::from(q.div_ceil(64)));
            }
        }
    }
}
