//! Keys and values that are kept from step to step.

mod append;
mod attention;
mod error;
mod new_rows;

use fa3_types::Sequences;
use ndarray::{Array2, Array4, ArrayView2, Axis};

use crate::cpu::pages::Pages;

pub use attention::CachedAttention;
pub use error::CacheError;
pub use new_rows::NewRows;

/// Keys and values of sequences, kept from step to step, and where each sequence's rows are. The names are those of
/// FlashAttention-3's `flash_attn_with_kvcache`. [`CachedAttention`] computes over it, and appends to it.
///
/// ```text
/// dense                 (batch, rows, heads_kv, head_dim)         sequence i is entry i
/// with cache_batch_idx  the same                                  sequence i is entry cache_batch_idx[i]
/// with page_table       (pages, page_size, heads_kv, head_dim)    row r of sequence i is row r mod page_size of page
///                                                                 page_table[i][r / page_size]
/// ```
///
/// The fields may be changed between calls, as a server does that gives pages to sequences and takes them back. A call
/// checks what it needs of them. Entries of `page_table` behind a sequence's rows may be anything, and so may rows that
/// are nobody's, even NaN.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct KvCache<T> {
    /// Keys (batch, rows, heads_kv, head_dim), or (pages, page_size, heads_kv, head_dim).
    pub k: Array4<T>,
    /// Values, of the shape of the keys, but with head_dim_v.
    pub v: Array4<T>,
    /// Rows of each sequence that are in use, those of `cache_leftpad` among them. An append adds to them.
    pub cache_seqlens: Vec<i32>,
    /// The pages of each sequence (batch, pages), in order.
    pub page_table: Option<Array2<i32>>,
    /// The entry of K and V that is each sequence's, without `page_table`.
    pub cache_batch_idx: Option<Vec<i32>>,
    /// So many rows of memory are before each sequence, and belong to none.
    pub cache_leftpad: Option<Vec<i32>>,
}

/// The rows of a cache's sequences, checked.
pub(crate) struct Held {
    /// Where they are.
    pub(crate) pages: Pages,
    /// Rows in use, without those of padding.
    pub(crate) lens: Vec<usize>,
    /// Rows in use, with those.
    pub(crate) used: Vec<usize>,
    /// Rows that a sequence may have.
    pub(crate) capacity: usize,
}

impl<T> KvCache<T> {
    /// A sequence for each entry of K and V, without rows in use.
    pub fn dense(k: Array4<T>, v: Array4<T>) -> KvCache<T> {
        let cache_seqlens = vec![0; k.len_of(Axis(0))];
        KvCache { k, v, cache_seqlens, page_table: None, cache_batch_idx: None, cache_leftpad: None }
    }

    /// A sequence for each row of the table, without rows in use.
    pub fn paged(k: Array4<T>, v: Array4<T>, page_table: Array2<i32>) -> KvCache<T> {
        let cache_seqlens = vec![0; page_table.nrows()];
        KvCache { page_table: Some(page_table), cache_seqlens, ..KvCache::dense(k, v) }
    }

    /// Number of sequences.
    pub(crate) fn count(&self) -> usize {
        match (&self.page_table, &self.cache_batch_idx) {
            (Some(table), _) => table.nrows(),
            (None, Some(entries)) => entries.len(),
            (None, None) => self.k.len_of(Axis(0)),
        }
    }

    /// The entries of each sequence (sequences, pages), if it is not the one with its number.
    pub(crate) fn table(&self) -> Option<ArrayView2<'_, i32>> {
        let of_entries = |entries| ArrayView2::from_shape((self.count(), 1), entries).ok();
        let table = self.page_table.as_ref().map(|table| table.view());
        table.or_else(|| self.cache_batch_idx.as_deref().and_then(of_entries))
    }

    /// Pages of each sequence; one where a sequence is an entry.
    fn pages(&self) -> usize {
        self.page_table.as_ref().map_or(1, Array2::ncols)
    }

    /// The sequences as planning knows them, of which the longest has about so many rows.
    pub(crate) fn sequences(&self, longest: usize) -> Sequences {
        let sequences = match self.table() {
            Some(table) => Sequences::paged(self.count(), table.ncols()).longest(longest),
            None => Sequences::dense(self.count(), self.k.len_of(Axis(1))),
        };
        let sequences = sequences.used();
        if self.cache_leftpad.is_some() { sequences.left_padded() } else { sequences }
    }

    /// Checks the lists, and that each sequence has pages for the rows in use and as many more as `new` says.
    ///
    /// # Errors
    /// The first list that makes no sense.
    pub(crate) fn held(&self, new: impl Fn(usize) -> usize) -> Result<Held, CacheError> {
        if self.page_table.is_some() && self.cache_batch_idx.is_some() {
            return Err(CacheError::TwoPlaces);
        }
        let (count, each) = (self.count(), self.pages());
        let capacity = each.saturating_mul(self.k.len_of(Axis(1)));
        let used = self.used(capacity)?;
        let first = self.first(&used)?;
        let mut entries = Vec::with_capacity(count.saturating_mul(each));
        for (sequence, &used) in used.iter().enumerate() {
            let new = new(sequence);
            if new > capacity - used {
                return Err(CacheError::Full { sequence, used, new, capacity });
            }
            entries.extend(self.entries_of(sequence, used + new)?);
        }
        let lens = used.iter().zip(&first).map(|(used, first)| used - first).collect();
        Ok(Held { pages: Pages { entries, each, first }, lens, used, capacity })
    }

    /// Rows in use of each sequence.
    fn used(&self, capacity: usize) -> Result<Vec<usize>, CacheError> {
        check_count("cache_seqlens", self.cache_seqlens.len(), self.count())?;
        let checked = |(sequence, &given): (usize, &i32)| {
            let used = usize::try_from(given).ok().filter(|&used| used <= capacity);
            used.ok_or(CacheError::Seqlen { sequence, given, capacity })
        };
        self.cache_seqlens.iter().enumerate().map(checked).collect()
    }

    /// Rows of memory before each sequence's first one.
    fn first(&self, used: &[usize]) -> Result<Vec<usize>, CacheError> {
        let Some(leftpad) = &self.cache_leftpad else { return Ok(vec![0; used.len()]) };
        check_count("cache_leftpad", leftpad.len(), used.len())?;
        let checked = |(sequence, (&given, &seqlen)): (usize, (&i32, &usize))| {
            let first = usize::try_from(given).ok().filter(|&first| first <= seqlen);
            first.ok_or(CacheError::Leftpad { sequence, given, seqlen })
        };
        leftpad.iter().zip(used).enumerate().map(checked).collect()
    }

    /// The entries of K and V that are a sequence's. Those that so many rows do not need are not looked at, and beyond
    /// all others.
    fn entries_of(&self, sequence: usize, rows: usize) -> Result<Vec<usize>, CacheError> {
        let (entries, page_rows, ..) = self.k.dim();
        let Some(table) = self.table() else { return Ok(vec![sequence]) };
        let list = if self.page_table.is_some() { "page_table" } else { "cache_batch_idx" };
        let needed = rows.div_ceil(page_rows.max(1));
        let checked = |(entry, &given): (usize, &i32)| match usize::try_from(given) {
            _ if entry >= needed => Ok(usize::MAX),
            Ok(page) if page < entries => Ok(page),
            _ => Err(CacheError::Entry { list, sequence, entry, given, entries }),
        };
        table.row(sequence).iter().enumerate().map(checked).collect()
    }
}

fn check_count(list: &'static str, given: usize, sequences: usize) -> Result<(), CacheError> {
    if given == sequences { Ok(()) } else { Err(CacheError::Count { list, given, sequences }) }
}
