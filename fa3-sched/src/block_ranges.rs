//! The blocks of keys that a tile of queries visits under a mask of intervals, as contiguous ranges, and which of them
//! need no mask.
//!
//! The bounds of intervals are data. The bounds of a tile's rows are combined ([`Bounds::and`]) and turned into
//! [`BlockRanges`]: contiguous ranges of blocks, from the last block to the first, without the gap between two
//! intervals.

use crate::packed::not_negative;
use crate::{FastDiv, Int, KvRange, VisibleKeys};

/// The keys of a row's interval, from its bounds, which may be any signed numbers. The sequence has `keys` keys, fewer
/// than 2³¹.
pub fn keys_of_interval<T: Int>([start, end]: [T; 2], keys: T) -> VisibleKeys<T> {
    let inside = |bound: T| not_negative(bound).at_most(keys);
    VisibleKeys { start: inside(start), end: inside(end) }
}

/// Bounds over several rows of one of their intervals: either the first interval of each row, or the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds<T> {
    /// The keys from the first one that any row sees to the last one.
    pub some: VisibleKeys<T>,
    /// The keys that every row sees.
    pub every: VisibleKeys<T>,
}

impl<T: Int> Bounds<T> {
    /// The bounds of one row of a sequence of `keys` keys.
    pub fn of(row: VisibleKeys<T>, keys: T) -> Bounds<T> {
        let is_empty = row.end.le(row.start);
        let some = VisibleKeys {
            start: T::select(is_empty, keys, row.start),
            end: T::select(is_empty, keys.lit(0), row.end),
        };
        Bounds { some, every: row }
    }

    /// The bounds of the union of both sets of rows.
    #[must_use]
    pub fn and(self, other: Bounds<T>) -> Bounds<T> {
        Bounds {
            some: VisibleKeys {
                start: self.some.start.at_most(other.some.start),
                end: self.some.end.at_least(other.some.end),
            },
            every: VisibleKeys {
                start: self.every.start.at_least(other.every.start),
                end: self.every.end.at_most(other.every.end),
            },
        }
    }

    /// The blocks with a key that some row sees, and the blocks between these blocks.
    fn blocks(self, tile_n: FastDiv<T>) -> KvRange<T> {
        let Bounds { some, every } = self;
        let end = tile_n.div_ceil(some.end);
        let first = tile_n.quotient(some.start).at_most(end);
        let unmasked_first = tile_n.div_ceil(every.start).at_least(first).at_most(end);
        let unmasked_end = tile_n.quotient(every.end).at_least(unmasked_first).at_most(end);
        KvRange { first, unmasked_first, unmasked_end, end }
    }
}

/// A contiguous range of a tile's blocks. Blocks are visited in steps, from the last block to the first. A range
/// begins at the step where the one before it ends, and step `s` is block `top - s`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRange<T> {
    /// One past the last of the range's leading steps, which need the mask.
    pub masked_end: T,
    /// One past the last of the other steps, whose blocks all rows see in full.
    pub plain_end: T,
    /// Step `s` is block `top - s`.
    pub top: T,
}

/// All blocks that a tile visits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockRanges<T> {
    /// Number of blocks.
    pub count: T,
    /// The ranges in order; [`num_ranges`] gives their number. Some may be empty, but the first one has the `top`
    /// of the first step.
    pub ranges: Vec<BlockRange<T>>,
}

/// Number of ranges of rows with `intervals` intervals each.
pub const fn num_ranges(intervals: usize) -> usize {
    2 * intervals
}

impl<T: Int> BlockRanges<T> {
    /// The blocks of rows with one interval each.
    pub fn of_one(bounds: Bounds<T>, tile_n: FastDiv<T>) -> BlockRanges<T> {
        let KvRange { first, unmasked_first, unmasked_end, end } = bounds.blocks(tile_n);
        let (count, top) = (end.sub_sat(first), end.sub_sat(end.lit(1)));
        let plain =
            BlockRange { masked_end: end.sub_sat(unmasked_end), plain_end: end.sub_sat(unmasked_first), top };
        BlockRanges { count, ranges: vec![plain, BlockRange { masked_end: count, plain_end: count, top }] }
    }

    /// The blocks of rows with two intervals each. No block is visited twice.
    pub fn of_two([one, other]: [Bounds<T>; 2], tile_n: FastDiv<T>) -> BlockRanges<T> {
        let (one, other) = (one.blocks(tile_n), other.blocks(tile_n));
        // An empty range is replaced by the other range.
        let [is_none, other_is_none] = [one, other].map(|blocks| blocks.end.le(blocks.first));
        let (one, other) = (select(is_none, other, one), select(other_is_none, one, other));
        let swapped = other.first.lt(one.first);
        let (low, high) = (select(swapped, other, one), select(swapped, one, other));
        let end = low.end.at_least(high.end);
        let gap = high.first.sub_sat(low.end);

        // Ranges of blocks without a mask, the higher range first. Ranges that meet become one.
        let [a, b] = [low, high].map(|blocks| [blocks.unmasked_first, blocks.unmasked_end]);
        let swapped = b[0].lt(a[0]);
        let pick = |at: usize| (T::select(swapped, b[at], a[at]), T::select(swapped, a[at], b[at]));
        let ((low_start, high_start), (low_end, high_end)) = (pick(0), pick(1));
        let (low_end, high_end) = (low_end.at_most(high_start), high_end.at_least(low_end));

        // Blocks below a gap are visited earlier, by the number of blocks in the gap.
        let (top, lower) = (end.sub_sat(end.lit(1)), end.sub_sat(gap));
        let low_top = top.sub_sat(gap);
        let plain_end = end.sub_sat(high_start);
        let of_high = T::select(gap.eq(gap.lit(0)), plain_end, end.sub_sat(high.first));
        let count = lower.sub_sat(low.first);
        let masked = |end: T, top: T| BlockRange { masked_end: end, plain_end: end, top };
        let ranges = vec![
            BlockRange { masked_end: end.sub_sat(high_end), plain_end, top },
            masked(of_high, top),
            BlockRange {
                masked_end: lower.sub_sat(low_end),
                plain_end: lower.sub_sat(low_start),
                top: low_top,
            },
            masked(count, low_top),
        ];
        BlockRanges { count, ranges }
    }
}

fn select<T: Int>(condition: T::Bool, yes: KvRange<T>, no: KvRange<T>) -> KvRange<T> {
    KvRange {
        first: T::select(condition, yes.first, no.first),
        unmasked_first: T::select(condition, yes.unmasked_first, no.unmasked_first),
        unmasked_end: T::select(condition, yes.unmasked_end, no.unmasked_end),
        end: T::select(condition, yes.end, no.end),
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::*;
    use crate::checked::Checked;
    use proptest::prelude::*;

    /// The KV block ranges of a tile of rows with these bounds, and whether each block needs the mask.
    fn visits<T: Int>(rows: &[Vec<[T; 2]>], keys: T, tile_n: FastDiv<T>) -> BlockRanges<T> {
        let bounds = |at: usize| {
            let each = rows.iter().map(|row| Bounds::of(keys_of_interval(row[at], keys), keys));
            each.reduce(Bounds::and).unwrap()
        };
        match rows[0].len() {
            1 => BlockRanges::of_one(bounds(0), tile_n),
            _ => BlockRanges::of_two([bounds(0), bounds(1)], tile_n),
        }
    }

    /// Visits the blocks in order.
    fn walk(BlockRanges { count, ranges }: &BlockRanges<u32>) -> Vec<(u32, bool)> {
        let mut blocks = vec![];
        for &BlockRange { masked_end, plain_end, top } in ranges {
            let step = blocks.len() as u32;
            blocks.extend((step..masked_end).map(|step| (top - step, true)));
            let step = step.max(masked_end);
            blocks.extend((step..plain_end).map(|step| (top - step, false)));
        }
        assert_eq!(blocks.len() as u32, *count);
        blocks
    }

    fn map<T>(rows: &[Vec<[i32; 2]>], f: impl Fn(i32) -> T) -> Vec<Vec<[T; 2]>> {
        rows.iter().map(|row| row.iter().map(|bounds| bounds.map(&f)).collect()).collect()
    }

    fn check(rows: &[Vec<[i32; 2]>], keys: u32, tile_n: u32) {
        let ranges = visits(&map(rows, |x| x as u32), keys, FastDiv::new(tile_n));
        let of_checked = map(rows, |x| Checked::from(x as u32));
        let checked = visits(&of_checked, keys.into(), FastDiv::new(tile_n).map(Checked::from));
        assert_eq!(checked.count.0, u64::from(ranges.count));

        let blocks = walk(&ranges);
        let what = format!("{rows:?} of {keys} keys in blocks of {tile_n}: {ranges:?}");
        assert!(blocks.is_sorted_by(|one, next| one.0 > next.0), "{what}");
        if let Some((top, _)) = blocks.first() {
            assert_eq!(*top, ranges.ranges[0].top, "{what}");
        }
        let sees = |bounds: &[i32; 2], key: u32| {
            (i64::from(bounds[0])..i64::from(bounds[1])).contains(&i64::from(key))
        };
        let range = |block: u32| block * tile_n..(block + 1) * tile_n;
        let some = |at: usize, mut of: Range<u32>| of.any(|key| rows.iter().any(|row| sees(&row[at], key)));
        let every = |at: usize, mut of: Range<u32>| {
            of.all(|key| key < keys && rows.iter().all(|row| sees(&row[at], key)))
        };
        for block in 0..keys.div_ceil(tile_n) + 2 {
            // The blocks of an interval, and the gaps between intervals.
            let visited = (0..rows[0].len()).any(|at| {
                let (before, after) = (0..((block + 1) * tile_n).min(keys), (block * tile_n).min(keys)..keys);
                some(at, before) && some(at, after)
            });
            let plain = (0..rows[0].len()).any(|at| every(at, range(block)));
            let found = blocks.iter().find(|(found, _)| *found == block).map(|(_, masked)| !masked);
            assert_eq!(found, visited.then_some(plain), "block {block}, {what}");
            assert!(visited || !plain);
        }
    }

    #[test]
    fn intervals_that_lie_in_every_way() {
        let ends = [0, 3, 4, 5, 8, 11, 16];
        let all = || ends.into_iter().flat_map(|start| ends.map(|end| [start, end]));
        for (one, other) in all().flat_map(|one| all().map(move |other| (one, other))) {
            check(&[vec![one, other]], 14, 4);
        }
        for one in all() {
            check(&[vec![one]], 14, 4);
            check(&[vec![one], vec![[4, 9]]], 14, 4);
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let top = i32::MAX;
        let bounds = [i32::MIN, -1, 0, 1, top - 1, top];
        let all = || bounds.into_iter().flat_map(|start| bounds.map(|end| [start, end].map(|x| x as u32)));
        for (one, other) in all().flat_map(|one| all().map(move |other| (one, other))) {
            let row = vec![vec![one.map(Checked::from), other.map(Checked::from)]];
            visits(&row, (top as u32).into(), FastDiv::new(176).map(Checked::from));
        }
    }

    fn interval() -> impl Strategy<Value = [i32; 2]> {
        let bound = || prop_oneof![8 => 0..70_i32, 1 => -9..0_i32, 1 => Just(i32::MAX), 1 => Just(i32::MIN)];
        // Most intervals are long enough to contain whole blocks.
        prop_oneof![
            (bound(), bound()).prop_map(|(start, end)| [start, end]),
            (0..9_i32, 30..70_i32).prop_map(|(start, end)| [start, end])
        ]
    }

    proptest! {
        #[test]
        fn blocks_are_those_of_the_rows(
            rows in proptest::collection::vec([interval(), interval()], 1..6),
            keys in 0u32..70, tile_n in 1u32..20,
        ) {
            check(&rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>(), keys, tile_n);
            check(&rows.iter().map(|row| row[..1].to_vec()).collect::<Vec<_>>(), keys, tile_n);
        }
    }
}
