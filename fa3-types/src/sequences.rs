//! The layout of a batch's sequences in their tensor, as planning may know it.

use crate::Feature;

/// The sequences of Q, or of K and V: dense (batch, seqlen, …), packed one after the other into (1, total, …), or, of K
/// and V, in pages (pages, page_rows, …) or listed row by row.
///
/// It knows no lengths, because lengths are data: `cu_seqlens` has the first rows of packed sequences, `seqused` each
/// sequence's number of rows in use, `page_table` each sequence's pages, `indices` its listed rows. A GPU reads these
/// arrays from its own memory, and the host has their values as [`SequenceRows`]. Problems and plans do not depend on
/// lengths.
///
/// [`SequenceRows`]: crate::SequenceRows
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequences {
    layout: Layout,
    used: bool,
    leftpad: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Layout {
    Dense { batch: usize, seqlen: usize },
    Packed { count: usize, longest: Option<usize> },
    Paged { count: usize, pages: usize, longest: Option<usize>, listed: Option<usize>, stride: usize },
    Listed { count: usize, keys: usize, stride: usize },
}

impl Sequences {
    /// `batch` sequences of `seqlen` rows each.
    pub fn dense(batch: usize, seqlen: usize) -> Sequences {
        Sequences::of(Layout::Dense { batch, seqlen })
    }

    /// `count` sequences packed into one tensor.
    pub fn packed(count: usize) -> Sequences {
        Sequences::of(Layout::Packed { count, longest: None })
    }

    /// `count` sequences of `pages` pages each, which are entries of the tensor's batch: `page_table` (count, pages)
    /// lists them in order. Sequences may share pages. A cache of whole sequences in another order (`cache_batch_idx`)
    /// has one page for each sequence.
    pub fn paged(count: usize, pages: usize) -> Sequences {
        Sequences::of(Layout::Paged { count, pages, longest: None, listed: None, stride: pages })
    }

    /// `count` sequences of `pages` pages each. `cache_batch_idx` (count) selects each sequence's row of `page_table`
    /// (rows, pages).
    pub fn indexed(count: usize, [rows, pages]: [usize; 2]) -> Sequences {
        Sequences::of(Layout::Paged { count, pages, longest: None, listed: Some(rows), stride: pages })
    }

    /// `count` sequences, each of which has a list of the rows that are its keys (sparse attention): `indices` (count,
    /// keys). Row r of the tensor is row r mod seqlen of entry r / seqlen of its batch. A row that is listed twice
    /// counts twice. An index that is no row of the tensor, such as -1, is no key, wherever in the list it is.
    /// [`Sequences::used`] says that only the first entries of each list count.
    pub fn listed(count: usize, keys: usize) -> Sequences {
        Sequences::of(Layout::Listed { count, keys, stride: keys })
    }

    fn of(layout: Layout) -> Sequences {
        Sequences { layout, used: false, leftpad: false }
    }

    /// Sets a hint for planning: the rows of the longest packed or paged sequence. A wrong hint costs speed, and
    /// changes results only by rounding. Dense sequences need no hint.
    #[must_use]
    pub fn longest(mut self, rows: usize) -> Sequences {
        if let Layout::Packed { longest, .. } | Layout::Paged { longest, .. } = &mut self.layout {
            *longest = Some(rows);
        }
        self
    }

    /// Sets the stride of the rows of `page_table` or of `indices` in entries, for a slice of a wider table. Entries
    /// outside of the slice are not read.
    #[must_use]
    pub fn table_stride(mut self, entries: usize) -> Sequences {
        if let Layout::Paged { stride, .. } | Layout::Listed { stride, .. } = &mut self.layout {
            *stride = entries;
        }
        self
    }

    /// Says that `seqused` gives the number of rows in use of each sequence. They are its first rows, or the first
    /// entries of its list.
    #[must_use]
    pub fn used(self) -> Sequences {
        Sequences { used: true, ..self }
    }

    /// Says that `leftpad` gives the padding rows of memory before each sequence. `seqused` counts them as well.
    #[must_use]
    pub fn left_padded(self) -> Sequences {
        Sequences { leftpad: true, ..self }
    }

    /// The features that these sequences give a problem.
    pub(crate) fn features(self) -> impl Iterator<Item = Feature> {
        let Sequences { layout, used, leftpad } = self;
        let of_layout = match layout {
            Layout::Dense { batch: _, seqlen: _ } => None,
            Layout::Packed { count: _, longest: _ } => Some(Feature::Packed),
            Layout::Paged { count: _, pages: _, longest: _, listed: _, stride: _ } => Some(Feature::Pages),
            Layout::Listed { count: _, keys: _, stride: _ } => Some(Feature::Lists),
        };
        let others = [(used, Feature::Used), (self.has_index(), Feature::Index), (leftpad, Feature::Leftpad)];
        let others = others.into_iter().filter_map(|(is_there, feature)| is_there.then_some(feature));
        of_layout.into_iter().chain(others)
    }

    /// Number of sequences.
    pub fn count(self) -> usize {
        match self.layout {
            Layout::Dense { batch: count, .. }
            | Layout::Packed { count, .. }
            | Layout::Paged { count, .. }
            | Layout::Listed { count, .. } => count,
        }
    }

    /// Whether the sequences are packed into a tensor of batch 1.
    pub fn is_packed(self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// Pages of each sequence, if paged.
    pub fn pages(self) -> Option<usize> {
        match self.layout {
            Layout::Paged { pages, .. } => Some(pages),
            Layout::Dense { .. } | Layout::Packed { .. } | Layout::Listed { .. } => None,
        }
    }

    /// Entries of each sequence's list, and the stride of `indices` in entries, if listed.
    pub fn list(self) -> Option<(usize, usize)> {
        match self.layout {
            Layout::Listed { keys, stride, .. } => Some((keys, stride)),
            Layout::Dense { .. } | Layout::Packed { .. } | Layout::Paged { .. } => None,
        }
    }

    /// Rows of `page_table`, if paged.
    pub fn table_rows(self) -> Option<usize> {
        match self.layout {
            Layout::Paged { count, listed, .. } => Some(listed.unwrap_or(count)),
            Layout::Dense { .. } | Layout::Packed { .. } | Layout::Listed { .. } => None,
        }
    }

    /// The stride of `page_table`'s rows in entries, and the number of entries from the table's first one to its last
    /// one, if paged.
    pub fn table_entries(self) -> Option<(usize, usize)> {
        let Layout::Paged { pages, stride, .. } = self.layout else { return None };
        let last_row = self.table_rows()?.checked_sub(1).filter(|_| pages > 0);
        Some((stride, last_row.map_or(0, |last| last.saturating_mul(stride).saturating_add(pages))))
    }

    /// Whether `cache_batch_idx` selects each sequence's row of `page_table`.
    pub fn has_index(self) -> bool {
        matches!(self.layout, Layout::Paged { listed: Some(_), .. })
    }

    /// Whether `leftpad` gives the padding rows before each sequence.
    pub fn has_leftpad(self) -> bool {
        self.leftpad
    }

    /// Whether the rows of sequences are looked up as in a cache: they lie in pages, behind left padding, or are
    /// listed.
    pub fn is_cache(self) -> bool {
        self.pages().is_some() || self.list().is_some() || self.leftpad
    }

    /// Whether the shape of the tensor determines the length of each sequence.
    pub fn are_equal(self) -> bool {
        matches!(self.layout, Layout::Dense { .. }) && !self.used && !self.leftpad
    }

    /// The most rows of a sequence, if an entry of the tensor's batch has `rows`.
    pub fn capacity(self, rows: usize) -> usize {
        if let Some((keys, _)) = self.list() {
            return keys;
        }
        // A page table without rows has no page for any sequence.
        let pages = if self.table_rows() == Some(0) { Some(0) } else { self.pages() };
        rows.saturating_mul(pages.unwrap_or(1))
    }

    /// Whether `seqused` gives the rows in use of each sequence.
    pub fn has_used(self) -> bool {
        self.used
    }

    /// Rows of a dense sequence.
    pub fn seqlen(self) -> Option<usize> {
        match self.layout {
            Layout::Dense { seqlen, .. } => Some(seqlen),
            Layout::Packed { .. } | Layout::Paged { .. } | Layout::Listed { .. } => None,
        }
    }

    /// Estimate of the longest sequence's rows, if an entry of the tensor's batch has `rows`: the hint, or else the
    /// mean of packed sequences and the capacity of paged ones.
    pub(crate) fn longest_of(self, rows: usize) -> usize {
        match self.layout {
            Layout::Dense { batch: 0, .. } => 0,
            Layout::Dense { seqlen, .. } => seqlen,
            Layout::Packed { count, longest } => longest.unwrap_or(rows.div_ceil(count.max(1))).min(rows),
            Layout::Paged { longest, .. } => longest.unwrap_or(usize::MAX).min(self.capacity(rows)),
            Layout::Listed { keys, .. } => keys,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_knows_no_lengths() {
        let dense = Sequences::dense(3, 5);
        assert_eq!((dense.count(), dense.seqlen(), dense.longest_of(5)), (3, Some(5), 5));
        assert_eq!((dense.longest(1), Sequences::dense(0, 5).longest_of(5)), (dense, 0));
        let packed = Sequences::packed(3);
        assert_eq!((packed.count(), packed.seqlen(), packed.longest_of(100)), (3, None, 34));
        assert_eq!([60, 200].map(|hint| packed.longest(hint).longest_of(100)), [60, 100]);
        assert_eq!(Sequences::packed(0).longest_of(7), 7);
        assert!(packed.used().has_used() && !packed.has_used());
        let paged = Sequences::paged(3, 4).left_padded();
        assert_eq!(
            (paged.count(), paged.seqlen(), paged.pages(), paged.capacity(16)),
            (3, None, Some(4), 64)
        );
        assert_eq!((paged.longest_of(16), paged.longest(50).longest_of(16)), (64, 50));
        assert!(paged.has_leftpad() && !paged.is_packed());
        let indexed = Sequences::indexed(3, [7, 4]);
        assert_eq!((indexed.count(), indexed.pages(), indexed.table_rows()), (3, Some(4), Some(7)));
        let entries = [paged, indexed, indexed.table_stride(9), paged.table_stride(9)];
        assert_eq!(
            entries.map(Sequences::table_entries),
            [Some((4, 12)), Some((4, 28)), Some((9, 58)), Some((9, 22))]
        );
        assert_eq!(Sequences::paged(0, 4).table_entries(), Some((4, 0)));
        assert_eq!(dense.table_stride(9), dense);
        assert_eq!((paged.table_rows(), dense.table_rows(), indexed.capacity(16)), (Some(3), None, 64));
        assert_eq!(Sequences::indexed(3, [0, 4]).capacity(16), 0);
        assert!(indexed.has_index() && !paged.has_index() && !dense.has_index());
        let listed = Sequences::listed(3, 9);
        assert_eq!((listed.count(), listed.list(), listed.capacity(2)), (3, Some((9, 9)), 9));
        assert_eq!((listed.table_stride(20).list(), listed.longest_of(2)), (Some((9, 20)), 9));
        assert!(listed.is_cache() && !listed.are_equal() && listed.pages().is_none());
        assert!(dense.are_equal() && !dense.used().are_equal() && !paged.are_equal() && !packed.are_equal());
    }
}
