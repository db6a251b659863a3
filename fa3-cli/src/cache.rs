//! The layout of caches that commands create: sequence lengths and pages.

use fa3_types::Sequences;
use ndarray::Array2;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_xoshiro::Xoshiro256PlusPlus;

/// The sequences of a cache.
#[derive(Clone, Debug)]
pub(crate) struct CacheLayout {
    /// Rows in use, for each sequence.
    pub(crate) seqlens: Vec<usize>,
    /// Free rows after each sequence's rows in use.
    pub(crate) room: usize,
    /// Rows per page, at least one, if the cache is paged.
    pub(crate) page_size: Option<usize>,
}

impl CacheLayout {
    pub(crate) fn count(&self) -> usize {
        self.seqlens.len()
    }

    /// Rows of the longest sequence, including its free rows.
    pub(crate) fn longest(&self) -> usize {
        self.seqlens.iter().max().map_or(0, |rows| rows.saturating_add(self.room))
    }

    /// Entries of the tensors of K and V, and rows per entry. An entry is a sequence, or a page. One page belongs to no
    /// sequence.
    pub(crate) fn extent(&self) -> [usize; 2] {
        let Some(page_size) = self.page_size else { return [self.count(), self.longest()] };
        let pages = self.seqlens.iter().map(|&rows| self.pages_of(rows, page_size));
        [pages.fold(1, usize::saturating_add), page_size]
    }

    /// The sequences as a problem describes them.
    pub(crate) fn sequences(&self) -> Sequences {
        let sequences = match self.page_size {
            Some(page_size) => Sequences::paged(self.count(), self.longest().div_ceil(page_size)),
            None => Sequences::dense(self.count(), self.longest()),
        };
        sequences.used()
    }

    /// Each sequence's pages, in a random order drawn from `seed`, followed by -1.
    pub(crate) fn page_table(&self, seed: u64) -> Option<Array2<i32>> {
        let page_size = self.page_size?;
        let [pages, _] = self.extent();
        let mut order: Vec<i32> = (0..pages as i32).collect();
        order.shuffle(&mut Xoshiro256PlusPlus::seed_from_u64(seed));
        let mut next = order.into_iter();
        let each = self.longest().div_ceil(page_size);
        let mut table = Array2::from_elem((self.count(), each), -1);
        for (mut row, &rows) in table.rows_mut().into_iter().zip(&self.seqlens) {
            row.iter_mut()
                .zip(next.by_ref().take(self.pages_of(rows, page_size)))
                .for_each(|(to, page)| *to = page);
        }
        Some(table)
    }

    fn pages_of(&self, rows: usize, page_size: usize) -> usize {
        rows.saturating_add(self.room).div_ceil(page_size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_is_one_sequences() {
        let layout = CacheLayout { seqlens: vec![40, 0, 17], room: 3, page_size: Some(16) };
        assert_eq!((layout.extent(), layout.sequences()), ([7, 16], Sequences::paged(3, 3).used()));
        let table = layout.page_table(1).unwrap();
        let mut pages: Vec<i32> = table.iter().copied().filter(|&page| page >= 0).collect();
        assert_eq!(
            table.map(|page| *page >= 0),
            ndarray::arr2(&[[true; 3], [true, false, false], [true, true, false]])
        );
        assert_ne!(layout.page_table(2), Some(table));
        pages.sort_unstable();
        pages.dedup();
        assert!(pages.len() == 6 && pages.iter().all(|&page| page < 7));
        let dense = CacheLayout { page_size: None, ..layout };
        assert_eq!((dense.extent(), dense.sequences()), ([3, 43], Sequences::dense(3, 43).used()));
        assert_eq!(dense.page_table(1), None);
    }
}
