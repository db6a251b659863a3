//! KV caches.

mod append;
mod attention;
mod checked;
mod error;
mod new_rows;
mod view;

use std::ops::Range;

use fa3_types::{ProblemError, SequenceRows};
use ndarray::{Array2, Array4, Axis};

use crate::cpu::keys::Pages;

pub use attention::CachedAttention;
pub use error::CacheError;
pub use new_rows::NewRows;
pub use view::{CacheView, CacheViewMut};

/// Keys and values of sequences, kept from step to step, and the location of each sequence's rows. Its fields have the
/// names of FlashAttention-3's `flash_attn_with_kvcache`. [`CachedAttention`] computes over the cache, and appends to
/// it.
///
/// ```text
/// dense                 (batch, rows, heads_kv, head_dim)         sequence i is entry i
/// with cache_batch_idx  (batch, rows, heads_kv, head_dim)         sequence i is entry cache_batch_idx[i]
/// with page_table       (pages, page_size, heads_kv, head_dim)    row r of sequence i is row r mod page_size of page
///                                                                 page_table[i][r / page_size]
/// with both             (pages, page_size, heads_kv, head_dim)    sequence i has pages page_table[cache_batch_idx[i]]
/// ```
///
/// The fields may be changed between calls: a server assigns pages to sequences and takes them back. Each call checks
/// the fields that it uses. Entries of `page_table` before and after a sequence's rows may have any values, and so may
/// padding rows, even NaN. [`CacheView`] and [`CacheViewMut`] are caches with borrowed arrays.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KvCache<T> {
    /// Keys (batch, rows, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim).
    pub k: Array4<T>,
    /// Values, of the shape of the keys, but with head_dim_v.
    pub v: Array4<T>,
    /// Number of rows of each sequence that are in use, including `cache_leftpad`. An append adds the number of its
    /// rows.
    pub cache_seqlens: Vec<i32>,
    /// The pages of each sequence (batch, pages), in order.
    pub page_table: Option<Array2<i32>>,
    /// Each sequence's entry of K and V, or its row of `page_table` in a paged cache.
    pub cache_batch_idx: Option<Vec<i32>>,
    /// Number of padding rows before each sequence's first row.
    pub cache_leftpad: Option<Vec<i32>>,
}

impl<T> KvCache<T> {
    /// A cache with a sequence for each entry of K and V. No rows are in use.
    pub fn dense(k: Array4<T>, v: Array4<T>) -> KvCache<T> {
        let cache_seqlens = vec![0; k.len_of(Axis(0))];
        KvCache { k, v, cache_seqlens, page_table: None, cache_batch_idx: None, cache_leftpad: None }
    }

    /// A cache with a sequence for each row of the table. No rows are in use.
    pub fn paged(k: Array4<T>, v: Array4<T>, page_table: Array2<i32>) -> KvCache<T> {
        let cache_seqlens = vec![0; page_table.nrows()];
        KvCache { page_table: Some(page_table), cache_seqlens, ..KvCache::dense(k, v) }
    }
}

/// The rows of a cache's sequences, checked.
#[derive(Clone)]
pub(crate) struct Held {
    /// The pages of the sequences.
    pub(crate) pages: Pages,
    /// Number of rows in use of each sequence, without left padding.
    pub(crate) lens: Vec<usize>,
    /// Number of rows in use of each sequence, with left padding.
    pub(crate) used: Vec<usize>,
    /// Rows of a page.
    page_rows: usize,
}

impl Held {
    /// The cache entry, and the row in it, of row `row` of a sequence.
    fn place(&self, sequence: usize, row: usize) -> (usize, usize) {
        let (entries, first) = self.pages.of(sequence);
        let at = first + row;
        (entries[at / self.page_rows], at % self.page_rows)
    }

    /// The sequences as contiguous rows, packed or padded to the longest sequence.
    ///
    /// # Errors
    /// A sequence has 2^31 rows or more.
    fn rows(&self, is_packed: bool) -> Result<SequenceRows, ProblemError> {
        if is_packed {
            return Ok(SequenceRows::packed_lengths(&self.lens));
        }
        let longest = self.lens.iter().copied().max().unwrap_or(0);
        let used: Vec<i32> = self.lens.iter().map(|&len| len as i32).collect();
        SequenceRows::dense(self.lens.len(), longest).with_used(&used)
    }
}

impl<T> CacheView<'_, T> {
    /// Checks the lists, and that each sequence has pages for the rows in use and `new` more.
    ///
    /// # Errors
    /// The first invalid list.
    pub(crate) fn held(&self, new: impl Fn(usize) -> usize) -> Result<Held, CacheError> {
        let capacity = self.pages().saturating_mul(self.page_rows());
        let used = self.used(capacity)?;
        let mut first = self.first(&used)?;
        let lens = used.iter().zip(&first).map(|(used, first)| used - first).collect();
        let (mut entries, mut starts, page_rows) = (vec![], vec![0], self.page_rows().max(1));
        for (sequence, (&used, first)) in used.iter().zip(&mut first).enumerate() {
            let new = new(sequence);
            if new > capacity - used {
                return Err(CacheError::Full { sequence, used, new, capacity });
            }
            // Pages that have only left padding need no entry, and neither do the pages of a sequence without rows.
            let (start, end) = (*first, used + new);
            if start < end {
                self.add_entries(sequence, start / page_rows..end.div_ceil(page_rows), &mut entries)?;
            }
            starts.push(entries.len());
            *first %= page_rows;
        }
        Ok(Held { pages: Pages { entries, starts, first }, lens, used, page_rows: self.page_rows() })
    }

    /// Number of rows in use of each sequence.
    fn used(&self, capacity: usize) -> Result<Vec<usize>, CacheError> {
        check_count("cache_seqlens", self.cache_seqlens.len(), self.count())?;
        let checked = |(sequence, &given): (usize, &i32)| {
            let used = usize::try_from(given).ok().filter(|&used| used <= capacity);
            used.ok_or(CacheError::Seqlen { sequence, given, capacity })
        };
        self.cache_seqlens.iter().enumerate().map(checked).collect()
    }

    /// Left padding of each sequence.
    fn first(&self, used: &[usize]) -> Result<Vec<usize>, CacheError> {
        let Some(leftpad) = self.cache_leftpad else { return Ok(vec![0; used.len()]) };
        check_count("cache_leftpad", leftpad.len(), used.len())?;
        let checked = |(sequence, (&given, &seqlen)): (usize, (&i32, &usize))| {
            let first = usize::try_from(given).ok().filter(|&first| first <= seqlen);
            first.ok_or(CacheError::Leftpad { sequence, given, seqlen })
        };
        leftpad.iter().zip(used).enumerate().map(checked).collect()
    }

    /// Adds the entries of K and V for these pages of a sequence.
    fn add_entries(
        &self,
        sequence: usize,
        pages: Range<usize>,
        to: &mut Vec<usize>,
    ) -> Result<(), CacheError> {
        let entries = self.entries();
        let indexed = self.cache_batch_idx.map(|index| index[sequence]);
        let checked = |list, entry: usize, given: i32| {
            let page = usize::try_from(given).ok().filter(|&page| page < entries);
            page.ok_or(CacheError::Entry { list, sequence, entry, given, entries })
        };
        match (&self.page_table, indexed) {
            (None, None) => to.push(sequence),
            (None, Some(given)) => to.push(checked("cache_batch_idx", 0, given)?),
            (Some(table), indexed) => {
                let rows = table.nrows();
                let row = indexed.map_or(Some(sequence), |given| usize::try_from(given).ok());
                let row = row.filter(|&row| row < rows).ok_or(CacheError::TableRow {
                    sequence,
                    given: indexed.unwrap_or_default(),
                    rows,
                })?;
                for (entry, &given) in table.row(row).iter().enumerate().take(pages.end).skip(pages.start) {
                    to.push(checked("page_table", entry, given)?);
                }
            }
        }
        Ok(())
    }
}

fn check_count(list: &'static str, given: usize, sequences: usize) -> Result<(), CacheError> {
    if given == sequences { Ok(()) } else { Err(CacheError::Count { list, given, sequences }) }
}
