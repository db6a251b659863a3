//! The keys that a tile of queries must visit, and which of them need no mask.

use fa3_types::{Chunk, Mask};

use crate::{FastDiv, Int};

/// Windows are clamped to this: a window that reaches 2³¹ − 1 keys reaches all keys.
const WIDEST: u32 = i32::MAX as u32;

/// Numbers of query and key rows of a sequence, each below 2³¹.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqLens<T> {
    /// Query rows.
    pub q: T,
    /// Key rows.
    pub k: T,
}

impl<T> SeqLens<T> {
    /// The lengths of the transposed attention matrix, whose rows are keys.
    #[must_use]
    pub fn transposed(self) -> SeqLens<T> {
        SeqLens { q: self.k, k: self.q }
    }
}

/// The keys `start .. end` that a query row sees; none if `end` is not above `start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisibleKeys<T> {
    /// The first key.
    pub start: T,
    /// One past the last key.
    pub end: T,
}

/// The KV blocks of a tile, `first .. end`, in three parts. A kernel visits them from right to left:
///
/// ```text
/// first ≤ unmasked_first ≤ unmasked_end ≤ end
///   └─ masked ──┘└─ no mask ───┘└─ masked ─┘
/// ```
///
/// Every row of the tile sees the blocks of the middle part in full. The other blocks cross an edge of the mask or the
/// end of the keys. Each block of the range is visible to some row, and no row sees a block outside the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRange<T> {
    /// The first block.
    pub first: T,
    /// The first block of the middle part.
    pub unmasked_first: T,
    /// One past the last block of the middle part.
    pub unmasked_end: T,
    /// One past the last block.
    pub end: T,
}

/// How the attention matrix of one head is cut into tiles of query positions and blocks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiling<T> {
    tile_m: T,
    tile_n: FastDiv<T>,
    group: FastDiv<T>,
    left: Option<T>,
    right: Option<T>,
    chunks: Option<Chunks<T>>,
}

/// Chunks of keys (attention_chunk): a query only sees keys of its own chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunks<T> {
    keys: FastDiv<T>,
    /// Whether keys are the rows of the matrix: see [`Mask::transposed`].
    transposed: bool,
}

impl Tiling<u32> {
    /// Tiles of `tile_m` rows, blocks of `tile_n` keys, `group` query heads for each KV head.
    ///
    /// # Panics
    /// If `tile_n` or `group` is 0.
    pub fn new(tile_m: u32, tile_n: u32, group: u32, mask: Mask) -> Tiling<u32> {
        let (left, right) = mask.reach();
        Tiling {
            tile_m,
            tile_n: FastDiv::new(tile_n),
            group: FastDiv::new(group),
            left: left.map(|keys| keys.min(WIDEST)),
            right: right.map(|keys| keys.min(WIDEST)),
            chunks: mask.chunks().map(|Chunk { keys, transposed }| Chunks {
                keys: FastDiv::new(keys.get().min(WIDEST)),
                transposed,
            }),
        }
    }
}

impl<T> Tiling<T> {
    /// The same tiling with `f` applied to each of its numbers in a fixed order: see [`FastDiv::map`].
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Tiling<U> {
        self.map_named(&mut |_, number| f(number))
    }

    /// As [`Tiling::map`], with the numbers' names.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> Tiling<U> {
        Tiling {
            tile_m: f("tile_m", self.tile_m),
            tile_n: self.tile_n.map_named("tile_n", f),
            group: self.group.map_named("group", f),
            left: self.left.map(|left| f("window_left", left)),
            right: self.right.map(|right| f("window_right", right)),
            chunks: self
                .chunks
                .map(|Chunks { keys, transposed }| Chunks { keys: keys.map_named("chunk", f), transposed }),
        }
    }
}

impl<T: Int> Tiling<T> {
    /// Rows per tile.
    pub fn tile_m(&self) -> T {
        self.tile_m
    }

    /// Whether the mask may hide keys.
    pub fn has_mask(&self) -> bool {
        self.left.is_some() || self.right.is_some() || self.chunks.is_some()
    }

    /// The KV head of a tile's head.
    pub fn kv_head(&self, head: T) -> T {
        self.group.quotient(head)
    }

    /// The first query position of tile `m_block`, and one past its last position, cut off at the sequence's end.
    fn positions(&self, m_block: T, seqlen_q: T) -> (T, T) {
        let start = m_block * self.tile_m;
        let end = start + self.tile_m;
        (start.at_most(seqlen_q), end.at_most(seqlen_q))
    }

    /// The keys that query `position`, below `len.q`, may see: [`Mask::allows`] as an interval. Distances are measured
    /// from the ends, where bottom-right alignment has its origin, so that no intermediate number is negative. For a
    /// position of `len.q` or above the interval is meaningless: rows that pad a tile must be recognised by their
    /// position.
    pub fn keys(&self, position: T, len: SeqLens<T>) -> VisibleKeys<T> {
        let to_end = len.q.sub_sat(position);
        let start = match self.left {
            None => position.lit(0),
            Some(left) => len.k.sub_sat(to_end + left),
        };
        let end = match self.right {
            None => len.k,
            Some(right) => (len.k + right + position.lit(1)).sub_sat(to_end).at_most(len.k),
        };
        match &self.chunks {
            None => VisibleKeys { start, end },
            Some(chunks) => {
                let chunk = chunks.of(position, len);
                VisibleKeys { start: start.at_least(chunk.start), end: end.at_most(chunk.end) }
            }
        }
    }

    /// Number of rows that see no key. They are the first rows.
    pub fn rows_without_keys(&self, len: SeqLens<T>) -> T {
        let unseen = match self.right {
            None => len.q.lit(0),
            // Row i sees keys up to i + len.k - len.q + right.
            Some(right) => len.q.sub_sat(len.k + right),
        };
        let unseen = match &self.chunks {
            None => unseen,
            Some(chunks) => unseen.at_least(chunks.rows_without_keys(len)),
        };
        T::select(len.k.lt(len.k.lit(1)), len.q, unseen)
    }

    /// The KV blocks of tile `m_block`; empty if the tile lies past the sequence's end.
    pub fn kv_range(&self, m_block: T, len: SeqLens<T>) -> KvRange<T> {
        let (zero, one) = (m_block.lit(0), m_block.lit(1));
        let (tile_start, tile_end) = self.positions(m_block, len.q);
        // Both ends of a row's keys grow with its position, so that the first and the last row suffice.
        let top = self.keys(tile_start, len);
        let bottom = self.keys(tile_end.sub_sat(one), len);
        let end = T::select(tile_start.lt(tile_end), self.tile_n.div_ceil(bottom.end), zero);
        let first = self.tile_n.quotient(top.start).at_most(end);
        let unmasked_first = self.tile_n.div_ceil(bottom.start).at_least(first).at_most(end);
        let unmasked_end = self.tile_n.quotient(top.end).at_least(unmasked_first).at_most(end);
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// Number of different KV blocks that a sequence's tiles visit. No single tile visits more.
    pub(crate) fn all_blocks(&self, len: SeqLens<T>) -> T {
        let (zero, one) = (len.q.lit(0), len.q.lit(1));
        let start = self.keys(zero, len).start;
        let end = self.tile_n.div_ceil(self.keys(len.q.sub_sat(one), len).end);
        T::select(zero.lt(len.q), end.sub_sat(self.tile_n.quotient(start)), zero)
    }

    /// An upper bound of the KV blocks of a tile, if there are chunks: about the blocks of a chunk.
    pub(crate) fn blocks_of_chunks(&self, len: SeqLens<T>) -> Option<T> {
        let (Some(left), Some(right), Some(_)) = (self.left, self.right, &self.chunks) else { return None };
        // The keys of a tile's rows, which may begin anywhere in a block.
        let keys = (left + right).at_most(left.lit(WIDEST / 2)) + self.tile_m;
        Some(self.all_blocks(len).at_most(self.tile_n.div_ceil(keys) + left.lit(1)))
    }

    /// Number of blocks of all of a sequence's keys.
    pub(crate) fn blocks_of_keys(&self, len: SeqLens<T>) -> T {
        self.tile_n.div_ceil(len.k)
    }

    /// Whether the first key that a row sees may be another than the sequence's first one.
    pub(crate) fn has_left_side(&self) -> bool {
        self.left.is_some() || self.chunks.is_some()
    }

    /// Whether the mask is bounded on both sides.
    pub(crate) fn has_two_sides(&self) -> bool {
        self.left.is_some() && self.right.is_some()
    }
}

impl<T: Int> Chunks<T> {
    /// The columns of a row's chunk: [`Tiling::keys`] without a window.
    fn of(&self, row: T, len: SeqLens<T>) -> VisibleKeys<T> {
        let keys = self.keys;
        if self.transposed {
            // The chunk of a key, and the queries whose positions lie in it.
            let start = keys.quotient(row.at_most(len.q)) * keys.divisor();
            let end = (start + keys.divisor()).at_most(len.q);
            let query = |key: T| (key + len.k).sub_sat(len.q);
            return VisibleKeys { start: query(start), end: query(end) };
        }
        let to_end = len.q.sub_sat(row);
        let start = keys.quotient(len.k.sub_sat(to_end)) * keys.divisor();
        let is_before = len.k.lt(to_end);
        VisibleKeys { start, end: T::select(is_before, row.lit(0), start + keys.divisor()) }
    }

    /// Number of rows whose chunks have no columns: queries before the first key, or keys of chunks before the first
    /// query.
    fn rows_without_keys(&self, len: SeqLens<T>) -> T {
        let before = len.q.sub_sat(len.k);
        if self.transposed { self.keys.quotient(before) * self.keys.divisor() } else { before }
    }
}

impl<T> KvRange<T> {
    /// Applies `f` to each of its numbers, in order.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> KvRange<U> {
        let KvRange { first, unmasked_first, unmasked_end, end } = self;
        let [first, unmasked_first] = [first, unmasked_first].map(&mut f);
        KvRange { first, unmasked_first, unmasked_end: f(unmasked_end), end: f(end) }
    }
}

impl<T: Int> VisibleKeys<T> {
    /// The keys of both.
    #[must_use]
    pub fn and(self, other: VisibleKeys<T>) -> VisibleKeys<T> {
        VisibleKeys { start: self.start.at_least(other.start), end: self.end.at_most(other.end) }
    }
}

impl<T: Int> KvRange<T> {
    /// The blocks of both ranges. The middle part has the blocks of both middle parts.
    #[must_use]
    pub fn and(self, other: KvRange<T>) -> KvRange<T> {
        let end = self.end.at_most(other.end);
        let first = self.first.at_least(other.first).at_most(end);
        let unmasked_first = self.unmasked_first.at_least(other.unmasked_first).at_least(first).at_most(end);
        let unmasked_end =
            self.unmasked_end.at_most(other.unmasked_end).at_least(unmasked_first).at_most(end);
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// Number of blocks.
    pub fn blocks(&self) -> T {
        self.end.sub_sat(self.first)
    }

    /// Blocks `from` to `to` of this range, `to` excluded, cut off at its end.
    #[must_use]
    pub fn part(&self, from: T, to: T) -> KvRange<T> {
        let first = (self.first + from).at_most(self.end);
        let end = (self.first + to).at_most(self.end);
        let inside = |block: T| block.at_least(first).at_most(end);
        let (unmasked_first, unmasked_end) = (inside(self.unmasked_first), inside(self.unmasked_end));
        KvRange { first, unmasked_first, unmasked_end, end }
    }

    /// Number of blocks whose elements need masking.
    pub fn masked_blocks(&self) -> T {
        self.blocks().sub_sat(self.unmasked_end.sub_sat(self.unmasked_first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use fa3_types::Lengths;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    struct Case {
        q: u32,
        k: u32,
        tile_m: u32,
        tile_n: u32,
        mask: Mask,
    }

    impl Case {
        fn allows(self, position: u32, key: u32) -> bool {
            let len = Lengths { q: self.q as usize, k: self.k as usize };
            self.mask.allows(position as usize, key as usize, len)
        }

        /// Checks a range against the definition: the keys that some row, or every row, of the tile may see.
        fn check(self, m_block: u32) {
            let tiling = Tiling::new(self.tile_m, self.tile_n, 1, self.mask);
            let lens = SeqLens { q: self.q, k: self.k };
            let range = tiling.kv_range(m_block, lens);
            let KvRange { first, unmasked_first, unmasked_end, end } = range;
            let checked_lens = SeqLens { q: self.q.into(), k: self.k.into() };
            let checked = tiling.map(Checked::from).kv_range(m_block.into(), checked_lens);
            assert_eq!(checked, range.map(Checked::from));

            let tile = m_block * self.tile_m..(m_block + 1) * self.tile_m;
            let positions: Vec<u32> = tile.filter(|&position| position < self.q).collect();
            let cut = tiling.positions(m_block, self.q);
            let expected = positions.first().map(|&start| (start, positions[positions.len() - 1] + 1));
            assert_eq!(Some(cut).filter(|(start, end)| start < end), expected, "{self:?}");

            assert!(first <= unmasked_first && unmasked_first <= unmasked_end && unmasked_end <= end);
            for block in 0..self.k.div_ceil(self.tile_n) + 2 {
                let keys = block * self.tile_n..(block + 1) * self.tile_n;
                let seen = positions.iter().any(|&p| keys.clone().any(|key| self.allows(p, key)));
                let full = seen && positions.iter().all(|&p| keys.clone().all(|key| self.allows(p, key)));
                let found = [first..end, unmasked_first..unmasked_end].map(|blocks| blocks.contains(&block));
                assert_eq!(found, [seen, full], "block {block} of {range:?}, {self:?} {m_block}");
            }
        }

        fn check_all(self) {
            (0..self.q.div_ceil(self.tile_m) + 2).for_each(|m_block| self.check(m_block));
        }
    }

    #[test]
    fn ranges_intersect() {
        let ranges = || {
            let ends = (0..4_u32).flat_map(|first| (first..5).map(move |end| (first, end)));
            ends.flat_map(|(first, end)| {
                let inner = move |from: u32| (from..=end).map(move |to| [from, to]);
                (first..=end).flat_map(inner).map(move |[unmasked_first, unmasked_end]| KvRange {
                    first,
                    unmasked_first,
                    unmasked_end,
                    end,
                })
            })
        };
        for (one, other) in ranges().flat_map(|one| ranges().map(move |other| (one, other))) {
            let KvRange { first, unmasked_first, unmasked_end, end } = one.and(other);
            assert!(first <= unmasked_first && unmasked_first <= unmasked_end && unmasked_end <= end);
            for block in 0..6 {
                let all = |of: KvRange<u32>| (of.first..of.end).contains(&block);
                let plain = |of: KvRange<u32>| (of.unmasked_first..of.unmasked_end).contains(&block);
                assert_eq!((first..end).contains(&block), all(one) && all(other), "{one:?} {other:?}");
                let found = (unmasked_first..unmasked_end).contains(&block);
                assert_eq!(found, plain(one) && plain(other), "{one:?} {other:?}");
            }
        }
    }

    fn masks() -> Vec<Mask> {
        let sizes = || (0..=5).map(Some).chain([None]);
        let windows = sizes().flat_map(|left| sizes().map(move |right| Mask::Window { left, right }));
        let in_chunks = [None, Some(0), Some(2)].into_iter().flat_map(|left| {
            [None, Some(0), Some(1)].into_iter().flat_map(move |right| {
                [1, 2, 3, 5, 8].into_iter().flat_map(move |keys| {
                    let mask = chunked(Mask::Window { left, right }, keys);
                    [mask, mask.transposed()]
                })
            })
        });
        windows.chain([Mask::None, Mask::Causal]).chain(in_chunks).collect()
    }

    fn chunked(mask: Mask, keys: u32) -> Mask {
        mask.and(Mask::from_chunk(keys.into()).unwrap()).unwrap()
    }

    #[test]
    fn every_small_range_is_what_the_mask_allows() {
        for mask in masks() {
            for (q, k) in (0..=9).flat_map(|q| (0..=9).map(move |k| (q, k))) {
                for (tile_m, tile_n) in (1..=4).flat_map(|m| (1..=4).map(move |n| (m, n))) {
                    Case { q, k, tile_m, tile_n, mask }.check_all();
                }
            }
        }
    }

    #[test]
    fn rows_keys_are_what_the_mask_allows() {
        for mask in masks() {
            for (q, k) in (0..=12).flat_map(|q| (0..=12).map(move |k| (q, k))) {
                let case = Case { q, k, tile_m: 1, tile_n: 1, mask };
                let tiling = Tiling::new(1, 1, 1, mask);
                for position in 0..q {
                    let keys = tiling.keys(position, SeqLens { q, k });
                    for key in 0..=k + 1 {
                        let inside = (keys.start..keys.end).contains(&key);
                        assert_eq!(inside, case.allows(position, key), "{case:?} {position} {key}");
                    }
                }
                let is_seen = |position: &u32| (0..k).any(|key| case.allows(*position, key));
                let seen = (0..q).find(is_seen).unwrap_or(q);
                let unseen = tiling.rows_without_keys(SeqLens { q, k });
                assert!(unseen == seen || mask.reach().0.is_some() && unseen <= seen, "{case:?} {unseen}");
            }
        }
    }

    /// Lengths and windows at the end of their range: exact 128-bit arithmetic compared with 32 bits.
    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let top = i32::MAX as u32;
        let sizes = [None, Some(0), Some(1), Some(1 << 20), Some(top - 1), Some(top), Some(u32::MAX)];
        let windows = sizes.iter().flat_map(|&left| sizes.map(|right| Mask::Window { left, right }));
        let in_chunks = |mask: Mask| [1, 1000, top - 1, top, u32::MAX].map(|keys| chunked(mask, keys));
        for mask in windows.flat_map(|mask| in_chunks(mask).into_iter().chain([mask])) {
            let tiling = Tiling::new(192, 176, 8, mask);
            for (q, k) in [1, 1000, top - 1, top].iter().flat_map(|&q| [0, 1, top].map(|k| (q, k))) {
                let lens = SeqLens { q: Checked::from(q), k: Checked::from(k) };
                let last = q.div_ceil(192) - 1;
                for m_block in [0, last / 2, last] {
                    tiling.map(Checked::from).kv_range(m_block.into(), lens);
                    let position = m_block * 192;
                    let keys = tiling.map(Checked::from).keys(position.into(), lens);
                    let stands = i128::from(position) + i128::from(k) - i128::from(q);
                    let bounded = |key: i128| key.clamp(0, k.into()) as u64;
                    let (left, right) = mask.reach();
                    let start = left.map_or(0, |left| bounded(stands - i128::from(left)));
                    let end = right.map_or(k.into(), |right| bounded(stands + i128::from(right) + 1));
                    let (start, end) = mask.chunks().map_or((start, end), |chunk| {
                        let size = i128::from(chunk.keys.get());
                        let first = stands.div_euclid(size) * size;
                        (start.max(bounded(first)), end.min(bounded(first + size)))
                    });
                    assert_eq!((keys.start.0, keys.end.0), (start, end), "{mask} {q} {k} {position}");
                    // The transposed problem (rows of a KV tile) does not overflow, either.
                    let transposed = Tiling::new(192, 176, 8, mask.transposed()).map(Checked::from);
                    let of_keys = SeqLens { q: lens.k, k: lens.q };
                    let last = k.div_ceil(192).max(1) - 1;
                    for m_block in [0, last / 2, last] {
                        transposed.kv_range(m_block.into(), of_keys);
                    }
                    transposed.rows_without_keys(of_keys);
                    transposed.keys(Checked::from(k.saturating_add(191)), of_keys);
                }
            }
        }
    }

    #[test]
    fn query_heads_of_a_group_share_their_kv_head() {
        let tiling = Tiling::new(128, 64, 3, Mask::None);
        assert_eq!([0, 2, 3, 5, 6].map(|head| tiling.kv_head(head)), [0, 0, 1, 1, 2]);
    }

    proptest! {
        #[test]
        fn any_range_is_what_the_mask_allows(
            q in 0u32..90, k in 0u32..90, tile_m in 1u32..40, tile_n in 1u32..40,
            left in proptest::option::of(0u32..100), right in proptest::option::of(0u32..100),
            chunk in prop_oneof![Just(0), 1u32..60], transposed in any::<bool>(),
        ) {
            let mask = chunked(Mask::Window { left, right }, chunk);
            let mask = if transposed { mask.transposed() } else { mask };
            Case { q, k, tile_m, tile_n, mask }.check_all();
            let (tiling, lens) = (Tiling::new(tile_m, tile_n, 1, mask), SeqLens { q, k });
            let most = (0..q.div_ceil(tile_m)).map(|tile| tiling.kv_range(tile, lens).blocks()).max().unwrap_or(0);
            prop_assert!(most <= tiling.all_blocks(lens));
            prop_assert!(tiling.blocks_of_chunks(lens).is_none_or(|blocks| most <= blocks));
        }
    }
}
