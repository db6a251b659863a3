//! Keys and values of a cache, gathered into contiguous sequences, which the other modules of this crate take.

use fa3_types::{ProblemError, SequenceRows};
use ndarray::{Array4, ArrayView2, ArrayView4, Axis};

/// The pages of a cache's sequences: the values of `page_table` and of `cache_batch_idx`.
#[derive(Clone, Copy, Debug)]
pub struct PageTable<'a> {
    /// The table (rows, pages of each sequence). Its elements are entries of the cache's batch.
    pub pages: ArrayView2<'a, i32>,
    /// The page-table row of each sequence; without it, row i for sequence i.
    pub index: Option<&'a [i32]>,
}

impl<'a> From<ArrayView2<'a, i32>> for PageTable<'a> {
    /// A table with a row for each sequence, in order.
    fn from(pages: ArrayView2<'a, i32>) -> PageTable<'a> {
        PageTable { pages, index: None }
    }
}

impl PageTable<'_> {
    /// The number of sequences, and the number of pages of each sequence.
    pub fn dim(&self) -> (usize, usize) {
        let (rows, pages) = self.pages.dim();
        (self.index.map_or(rows, <[i32]>::len), pages)
    }

    /// Page `number` of a sequence, if the table has such a row and page.
    pub fn page(&self, sequence: usize, number: usize) -> Option<i32> {
        let row = match self.index {
            Some(index) => usize::try_from(index[sequence]).ok()?,
            None => sequence,
        };
        self.pages.get([row, number]).copied()
    }
}

/// The rows of a cache's sequences: the values of `page_table`, `cache_batch_idx`, `leftpad` and `seqused`.
///
/// Row r of sequence i is row (leftpad\[i\] + r) of the sequence's pages, laid end to end. Invalid numbers are treated
/// as kernels treat them: lengths are clamped to the capacity of the pages, and a missing page has rows of zeros.
#[derive(Clone, Copy, Debug)]
pub struct CachedRows<'a> {
    /// The pages of sequences.
    pub page_table: PageTable<'a>,
    /// Number of rows before each sequence's first row. An empty list means 0.
    pub leftpad: &'a [i32],
    /// One past each sequence's last row, counted from the first row of its first page. An empty list means all rows.
    pub seqused: &'a [i32],
}

impl CachedRows<'_> {
    /// The rows of the gathered sequences, if pages have `page_rows` rows each.
    ///
    /// # Errors
    /// The errors of [`SequenceRows::with_used`], which do not occur if `seqused` and `leftpad` have one entry for each
    /// sequence.
    pub fn rows(&self, page_rows: usize) -> Result<SequenceRows, ProblemError> {
        let (count, pages) = self.page_table.dim();
        let used: Vec<i32> = (0..count)
            .map(|i| {
                let end = self.seqused.get(i).map_or(pages * page_rows, |&end| end.max(0) as usize);
                end.min(pages * page_rows).saturating_sub(self.first(i, pages * page_rows)) as i32
            })
            .collect();
        SequenceRows::dense(count, pages * page_rows).with_used(&used)
    }

    /// The rows of a cache (pages, page_rows, heads, columns), gathered: (sequences, rows, heads, columns). Unused rows
    /// have elements `unused`.
    pub fn gather<T: Copy + Default>(&self, cache: ArrayView4<'_, T>, unused: T) -> Array4<T> {
        let ((count, pages), (entries, page_rows, heads, columns)) = (self.page_table.dim(), cache.dim());
        let capacity = pages * page_rows;
        let mut gathered = Array4::from_elem((count, capacity, heads, columns), unused);
        for i in 0..count {
            let first = self.first(i, capacity);
            for at in first..capacity {
                let page = self.page_table.page(i, at / page_rows);
                let mut row = gathered.index_axis_mut(Axis(0), i).index_axis_move(Axis(0), at - first);
                match page.and_then(|page| usize::try_from(page).ok()).filter(|&page| page < entries) {
                    Some(page) => {
                        row.assign(&cache.index_axis(Axis(0), page).index_axis(Axis(0), at % page_rows));
                    }
                    None => row.fill(T::default()),
                }
            }
        }
        gathered
    }

    fn first(&self, sequence: usize, capacity: usize) -> usize {
        self.leftpad.get(sequence).map_or(0, |&rows| (rows.max(0) as usize).min(capacity))
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array4, arr2};

    use super::*;

    #[test]
    fn rows_come_in_the_order_of_the_table() {
        // Pages of 2 rows. Each element is its index in memory.
        let cache = Array4::from_shape_fn((3, 2, 1, 1), |(page, row, ..)| 2 * page + row);
        let table = arr2(&[[2, 0], [1, -1], [7, 2]]);
        let page_table = PageTable { pages: table.view(), index: None };
        let rows = CachedRows { page_table, leftpad: &[0, 1, 9], seqused: &[3, 2, 100] };
        assert_eq!(rows.rows(2).unwrap().seqused(), [3, 1, 0]);
        let gathered = rows.gather(cache.view(), 99);
        let of = |i: usize| gathered.index_axis(Axis(0), i).iter().copied().collect::<Vec<_>>();
        assert_eq!(of(0), [4, 5, 0, 1]);
        assert_eq!(of(1), [3, 0, 0, 99]);
        assert_eq!(of(2), [99; 4]);
        let all = CachedRows { leftpad: &[], seqused: &[], ..rows };
        assert_eq!(all.rows(2).unwrap().seqused(), [4, 4, 4]);
        let gathered = all.gather(cache.view(), 99);
        assert_eq!(gathered.index_axis(Axis(0), 2).iter().copied().collect::<Vec<_>>(), [0, 0, 4, 5]);

        let index = PageTable { index: Some(&[2, 0, -1, 3]), ..page_table };
        let indexed = CachedRows { page_table: index, leftpad: &[], seqused: &[4; 4] };
        assert_eq!(indexed.rows(2).unwrap().seqused(), [4; 4]);
        let gathered = indexed.gather(cache.view(), 99);
        assert_eq!(
            gathered.iter().copied().collect::<Vec<_>>(),
            [[0, 0, 4, 5], [4, 5, 0, 1], [0; 4], [0; 4]].concat()
        );
    }
}
