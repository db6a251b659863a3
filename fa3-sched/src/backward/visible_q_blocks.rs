//! The blocks of query rows that see keys of a tile under a mask of intervals, and the blocks that see all of its keys.
//! The bounds of rows are data; they are summarised for blocks of rows beforehand ([`Bounds`]).

use crate::{Bounds, FastDiv, Int, KvRange};

/// A number above every block's number.
const NONE: u32 = 1 << 30;

/// The query blocks that see keys of a tile, among some query blocks of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisibleQBlocks<T> {
    /// The first block that sees any key of the tile, and one past the last such block.
    pub some: [T; 2],
    /// The first block whose rows all see all keys of the tile, and one past the last such block.
    pub every: [T; 2],
    /// Number of blocks whose rows all see all keys.
    pub count: T,
}

impl<T: Int> VisibleQBlocks<T> {
    /// No blocks.
    pub fn none(like: T) -> VisibleQBlocks<T> {
        let none = [like.lit(NONE), like.lit(0)];
        VisibleQBlocks { some: none, every: none, count: like.lit(0) }
    }

    /// Block `number` alone, whose rows have these bounds, for the tile of keys `start .. end` in a sequence of `keys`
    /// keys.
    pub fn of(number: T, bounds: &[Bounds<T>], [start, end]: [T; 2], keys: T) -> VisibleQBlocks<T> {
        let (zero, one) = (number.lit(0), number.lit(1));
        let any = |sees: &dyn Fn(&Bounds<T>) -> T::Bool| {
            bounds.iter().map(sees).reduce(|one, other| one | other).unwrap_or(one.lt(zero))
        };
        let some = any(&|of| of.some.start.lt(end.at_most(keys)) & start.lt(of.some.end));
        let every = any(&|of| of.every.start.le(start) & end.le(of.every.end));
        let range = |there: T::Bool| {
            [T::select(there, number, number.lit(NONE)), T::select(there, number + one, zero)]
        };
        VisibleQBlocks { some: range(some), every: range(every), count: T::select(every, one, zero) }
    }

    /// The union of two sets of blocks of the same head.
    #[must_use]
    pub fn and(self, other: VisibleQBlocks<T>) -> VisibleQBlocks<T> {
        let both = |one: [T; 2], other: [T; 2]| [one[0].at_most(other[0]), one[1].at_least(other[1])];
        VisibleQBlocks {
            some: both(self.some, other.some),
            every: both(self.every, other.every),
            count: self.count + other.count,
        }
    }

    /// The union over two heads, if each set has all blocks of its head: the blocks that see some key in either head,
    /// and the blocks that see all keys in both heads. The latter are known only if they are contiguous in each head.
    #[must_use]
    pub fn beside(self, other: VisibleQBlocks<T>) -> VisibleQBlocks<T> {
        let [[first, end], [other_first, other_end]] = [self.run(), other.run()];
        let every = [first.at_least(other_first), end.at_most(other_end)];
        // A contiguous run of blocks, or none.
        let count = every[1].sub_sat(every[0]);
        VisibleQBlocks { every, count, ..self.and(other) }
    }

    /// The blocks that see all keys, if they are contiguous; otherwise no blocks.
    fn run(self) -> [T; 2] {
        let [first, end] = self.every;
        let is_run = (first + self.count).eq(end);
        let zero = first.lit(0);
        [T::select(is_run, first, zero), T::select(is_run, end, zero)]
    }

    /// Converts these blocks of `block_rows` rows into the blocks of `tile_m` rows over which a kernel loops, from the
    /// first block that sees a key to the last one. The sequence has `rows` rows.
    pub fn range(self, block_rows: u32, rows: T, tile_m: FastDiv<T>) -> KvRange<T> {
        let size = rows.lit(block_rows);
        let [first, end] = self.some;
        let zero = rows.lit(0);
        let first = tile_m.quotient(T::select(first.lt(end), first, zero) * size);
        let end = tile_m.div_ceil((end * size).at_most(rows));
        let [plain_first, plain_end] = self.run();
        let unmasked_first = tile_m.div_ceil(plain_first * size).at_least(first).at_most(end);
        let unmasked_end = tile_m.quotient((plain_end * size).at_most(rows));
        let unmasked_end = unmasked_end.at_least(unmasked_first).at_most(end);
        KvRange { first, unmasked_first, unmasked_end, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checked::Checked;
    use crate::keys_of_interval;
    use proptest::prelude::*;

    /// Number of rows of a block whose bounds are already reduced.
    const BLOCK: u32 = 4;

    fn range<T: Int>(heads: &[Vec<[[T; 2]; 2]>], keys: T, tile: [T; 2], tile_m: FastDiv<T>) -> KvRange<T> {
        let of_head = |rows: &Vec<[[T; 2]; 2]>| {
            let blocks = rows.chunks(BLOCK as usize).enumerate().map(|(number, rows)| {
                let of = |at: usize| {
                    let each = rows.iter().map(|row| Bounds::of(keys_of_interval(row[at], keys), keys));
                    each.reduce(Bounds::and).unwrap()
                };
                VisibleQBlocks::of(keys.lit(number as u32), &[of(0), of(1)], tile, keys)
            });
            blocks.fold(VisibleQBlocks::none(keys), VisibleQBlocks::and)
        };
        let all = heads.iter().map(of_head).reduce(VisibleQBlocks::beside).unwrap();
        all.range(BLOCK, keys.lit(heads[0].len() as u32), tile_m)
    }

    fn map<T>(heads: &[Vec<[[i32; 2]; 2]>], f: impl Fn(i32) -> T) -> Vec<Vec<[[T; 2]; 2]>> {
        let row = |row: &[[i32; 2]; 2]| row.map(|two| two.map(&f));
        heads.iter().map(|rows| rows.iter().map(row).collect()).collect()
    }

    proptest! {
        #[test]
        fn blocks_see_what_their_rows_see(
            rows in proptest::collection::vec([[[-3..40_i32, -3..40_i32], [0..5_i32, 20..40_i32]], [[0..9_i32, 0..40_i32], [5..9_i32, 20..40_i32]]], 1..40),
            keys in 1u32..40, tile in 0u32..5, (tile_m, tile_n) in (1u32..9, 1u32..15), two_heads in any::<bool>(),
        ) {
            let heads: Vec<Vec<[[i32; 2]; 2]>> = (0..1 + usize::from(two_heads))
                .map(|head| rows.iter().map(|row| row[head]).collect()).collect();
            let start = tile * tile_n;
            prop_assume!(start < keys);
            let (ends, div) = ([start, start + tile_n], FastDiv::new(tile_m));
            let found = range(&map(&heads, |x| x as u32), keys, ends, div);
            let of_checked = map(&heads, |x| Checked::from(x as u32));
            let checked = range(&of_checked, keys.into(), ends.map(Checked::from), div.map(Checked::from));
            let KvRange { first, unmasked_first, unmasked_end, end } = found;
            prop_assert_eq!(checked, found.map(Checked::from));
            prop_assert!(first <= unmasked_first && unmasked_first <= unmasked_end && unmasked_end <= end);
            let sees = |row: &[[i32; 2]; 2], key: u32| row.iter().any(|of| (of[0]..of[1]).contains(&(key as i32)));
            for block in 0..(rows.len() as u32).div_ceil(tile_m) {
                let of_block = (block * tile_m) as usize..rows.len().min(((block + 1) * tile_m) as usize);
                let mut seen = heads.iter().flat_map(|rows| &rows[of_block.clone()]);
                let some = seen.clone().any(|row| (start..keys.min(start + tile_n)).any(|key| sees(row, key)));
                let every = seen.all(|row| (start..start + tile_n).all(|key| key < keys && sees(row, key)));
                prop_assert!(!some || (first..end).contains(&block), "{block} {found:?}");
                prop_assert!(every || !(unmasked_first..unmasked_end).contains(&block), "{block} {found:?}");
            }
        }
    }

    /// Two documents of 16 rows, the first causal: a tile of keys in one document has no blocks of the other.
    #[test]
    fn nothing_is_visited_in_vain() {
        let heads = [(0..32)
            .map(|row| if row < 16 { [[0, row + 1], [0, 0]] } else { [[16, 32], [0, 0]] })
            .collect::<Vec<_>>()];
        let found = |start: u32| range(&heads, 32, [start, start + 4], FastDiv::new(4));
        assert_eq!(found(0), KvRange { first: 0, unmasked_first: 1, unmasked_end: 4, end: 4 });
        assert_eq!(found(8), KvRange { first: 2, unmasked_first: 3, unmasked_end: 4, end: 4 });
        assert_eq!(found(20), KvRange { first: 4, unmasked_first: 4, unmasked_end: 8, end: 8 });
    }
}
