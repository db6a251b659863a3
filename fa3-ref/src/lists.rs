//! Listed keys and values, gathered into contiguous sequences, which the other modules of this crate take.

use fa3_types::{ProblemError, SequenceRows};
use ndarray::{Array4, ArrayView2, ArrayView4, Axis};

/// The lists of sequences: the values of `indices` and of their lengths.
#[derive(Clone, Copy, Debug)]
pub struct KeyLists<'a> {
    /// The lists (sequences, entries). An entry that is no row of the cache is no key.
    pub indices: ArrayView2<'a, i32>,
    /// Number of entries of each list that count, clamped to the list; all if it is empty.
    pub lengths: &'a [i32],
}

impl KeyLists<'_> {
    /// The keys of a sequence in a cache of `rows` rows, in order.
    pub fn keys(&self, sequence: usize, rows: usize) -> impl Iterator<Item = usize> {
        let entries = self.indices.index_axis(Axis(0), sequence);
        let length = self.lengths.get(sequence).map_or(entries.len(), |&length| length.max(0) as usize);
        let is_key = move |&entry: &i32| usize::try_from(entry).ok().filter(|&row| row < rows);
        entries.into_iter().take(length).filter_map(is_key)
    }

    /// The listed rows of caches (pages, page_rows, heads, columns), gathered: (sequences, rows, heads, columns). The
    /// keys of a sequence come first, in the order of the caches and of their lists. Other rows have elements `unused`.
    ///
    /// # Errors
    /// A sequence has 2³¹ keys or more.
    pub fn gather<T: Copy>(
        caches: &[(ArrayView4<'_, T>, KeyLists<'_>)],
        unused: T,
    ) -> Result<(Array4<T>, SequenceRows), ProblemError> {
        let Some((first, lists)) = caches.first() else { return Err(ProblemError::CuSeqlensEmpty) };
        let (_, _, heads, columns) = first.dim();
        let (count, capacity) =
            (lists.indices.nrows(), caches.iter().map(|(_, lists)| lists.indices.ncols()).sum());
        let mut gathered = Array4::from_elem((count, capacity, heads, columns), unused);
        let mut used = vec![0; count];
        for (sequence, (mut to, used)) in gathered.outer_iter_mut().zip(&mut used).enumerate() {
            for (cache, lists) in caches {
                let (pages, page_rows, ..) = cache.dim();
                for row in lists.keys(sequence, pages * page_rows) {
                    let page = cache.index_axis(Axis(0), row / page_rows);
                    to.index_axis_mut(Axis(0), *used as usize)
                        .assign(&page.index_axis(Axis(0), row % page_rows));
                    *used += 1;
                }
            }
        }
        Ok((gathered, SequenceRows::dense(count, capacity).with_used(&used)?))
    }
}

#[cfg(test)]
mod tests {
    use ndarray::arr2;

    use super::*;

    #[test]
    fn keys_come_in_the_order_of_the_lists() {
        // Pages of 2 rows. Each element is its index in memory.
        let cache =
            |pages, first| Array4::from_shape_fn((pages, 2, 1, 1), |(page, row, ..)| first + 2 * page + row);
        let (first, second) = (cache(3, 0), cache(1, 100));
        let indices = arr2(&[[5, -1, 0, 5], [6, i32::MIN, 1, i32::MAX], [2, 3, 4, 1]]);
        let extra = arr2(&[[1, 0], [2, -1], [0, 0]]);
        let lists = KeyLists { indices: indices.view(), lengths: &[9, 4, -3] };
        let extra = KeyLists { indices: extra.view(), lengths: &[1, 2, 1] };
        let all = [(first.view(), lists), (second.view(), extra)];
        let (gathered, rows) = KeyLists::gather(&all, 77).unwrap();
        assert_eq!(rows.seqused(), [4, 1, 1]);
        let of = |i: usize| gathered.index_axis(Axis(0), i).iter().copied().collect::<Vec<_>>();
        assert_eq!(
            [of(0), of(1), of(2)],
            [[5, 0, 5, 101, 77, 77], [1, 77, 77, 77, 77, 77], [100, 77, 77, 77, 77, 77]]
        );
        let (_, whole) = KeyLists::gather(&[(first.view(), KeyLists { lengths: &[], ..lists })], 0).unwrap();
        assert_eq!(whole.seqused(), [3, 1, 4]);
    }
}
