//! Caches whose arrays are borrowed.

use fa3_types::{SequenceRows, Sequences, Shape};
use ndarray::{Array4, ArrayView2, ArrayView4, ArrayViewMut4, Axis};

use super::{CacheError, KvCache};
use crate::{Error, Scalar};

/// A [`KvCache`] with borrowed arrays, for example a part of an engine's pool and the lists of a scheduler. It has
/// [`KvCache`]'s fields.
///
/// ```
/// use fa3::ndarray::{Array4, s};
/// use fa3::{CacheView, CachedAttention, Device};
///
/// // Keys and values of all layers lie in one pool; the second layer has entry 1.
/// let pool = Array4::<f32>::ones((2, 512, 4, 64));
/// let cache = CacheView {
///     k: pool.slice(s![1..2, .., ..2, ..]),
///     v: pool.slice(s![1..2, .., 2.., ..]),
///     cache_seqlens: &[300],
///     page_table: None,
///     cache_batch_idx: None,
///     cache_leftpad: None,
/// };
/// let q = Array4::<f32>::ones((1, 1, 8, 64));
/// assert_eq!(CachedAttention::new(&q).forward(&Device::Cpu, cache)?.o, q);
/// # Ok::<(), fa3::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are documented where they are owned")]
pub struct CacheView<'a, T> {
    pub k: ArrayView4<'a, T>,
    pub v: ArrayView4<'a, T>,
    pub cache_seqlens: &'a [i32],
    pub page_table: Option<ArrayView2<'a, i32>>,
    pub cache_batch_idx: Option<&'a [i32]>,
    pub cache_leftpad: Option<&'a [i32]>,
}

/// A [`CacheView`] that can be appended to.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are documented where they are owned")]
pub struct CacheViewMut<'a, T> {
    pub k: ArrayViewMut4<'a, T>,
    pub v: ArrayViewMut4<'a, T>,
    pub cache_seqlens: &'a mut [i32],
    pub page_table: Option<ArrayView2<'a, i32>>,
    pub cache_batch_idx: Option<&'a [i32]>,
    pub cache_leftpad: Option<&'a [i32]>,
}

impl<'a, T> From<&'a KvCache<T>> for CacheView<'a, T> {
    fn from(cache: &'a KvCache<T>) -> CacheView<'a, T> {
        CacheView {
            k: cache.k.view(),
            v: cache.v.view(),
            cache_seqlens: &cache.cache_seqlens,
            page_table: cache.page_table.as_ref().map(|table| table.view()),
            cache_batch_idx: cache.cache_batch_idx.as_deref(),
            cache_leftpad: cache.cache_leftpad.as_deref(),
        }
    }
}

impl<'a, T> From<&'a mut KvCache<T>> for CacheViewMut<'a, T> {
    fn from(cache: &'a mut KvCache<T>) -> CacheViewMut<'a, T> {
        CacheViewMut {
            k: cache.k.view_mut(),
            v: cache.v.view_mut(),
            cache_seqlens: &mut cache.cache_seqlens,
            page_table: cache.page_table.as_ref().map(|table| table.view()),
            cache_batch_idx: cache.cache_batch_idx.as_deref(),
            cache_leftpad: cache.cache_leftpad.as_deref(),
        }
    }
}

impl<T: Scalar> CacheView<'_, T> {
    /// Copies of the keys and values in use, and the rows of each sequence in the copies. If `is_packed`, sequences lie
    /// one after the other, otherwise they are padded with zeros to the longest sequence.
    ///
    /// # Errors
    /// [`Error::Cache`] with the first invalid list, or if memory is insufficient.
    pub fn gathered(&self, is_packed: bool) -> Result<([Array4<T>; 2], SequenceRows), Error> {
        let held = self.held(|_| 0)?;
        let rows = held.rows(is_packed)?;
        let batch = if is_packed { 1 } else { rows.count() };
        let gather = |x: ArrayView4<'_, T>| {
            let (.., heads, head_dim) = x.dim();
            let mut to = zeros(Shape { batch, seqlen: rows.end(), heads, head_dim })?;
            for sequence in 0..rows.count() {
                let (batch, start) = rows.start(sequence);
                let mut to = to.index_axis_mut(Axis(0), batch);
                for row in 0..rows.len(sequence) {
                    let (entry, at) = held.place(sequence, row);
                    let from = x.index_axis(Axis(0), entry);
                    to.index_axis_mut(Axis(0), start + row).assign(&from.index_axis(Axis(0), at));
                }
            }
            Ok::<_, CacheError>(to)
        };
        Ok(([gather(self.k)?, gather(self.v)?], rows))
    }
}

/// An array of zeros, if there is enough memory.
fn zeros<T: Scalar>(shape: Shape) -> Result<Array4<T>, CacheError> {
    let elements = shape.dims().into_iter().try_fold(1_usize, usize::checked_mul);
    let mut zeros = Vec::new();
    match elements {
        Some(elements) if zeros.try_reserve_exact(elements).is_ok() => zeros.resize(elements, T::default()),
        _ => {
            let bytes = elements.unwrap_or(usize::MAX).saturating_mul(size_of::<T>());
            return Err(CacheError::Memory { bytes });
        }
    }
    Ok(Array4::from_shape_vec(shape.dims(), zeros).expect("they are so many"))
}

impl<T> CacheViewMut<'_, T> {
    /// A read-only view.
    pub fn view(&self) -> CacheView<'_, T> {
        CacheView {
            k: self.k.view(),
            v: self.v.view(),
            cache_seqlens: self.cache_seqlens,
            page_table: self.page_table,
            cache_batch_idx: self.cache_batch_idx,
            cache_leftpad: self.cache_leftpad,
        }
    }
}

impl<'a, T> CacheView<'a, T> {
    /// Entries of K.
    pub(super) fn entries(&self) -> usize {
        self.k.len_of(Axis(0))
    }

    /// Rows of each entry.
    pub(super) fn page_rows(&self) -> usize {
        self.k.len_of(Axis(1))
    }

    /// Number of sequences.
    pub(super) fn count(&self) -> usize {
        match (self.cache_batch_idx, &self.page_table) {
            (Some(index), _) => index.len(),
            (None, Some(table)) => table.nrows(),
            (None, None) => self.entries(),
        }
    }

    /// Number of pages of each sequence; one if sequences are not paged.
    pub(super) fn pages(&self) -> usize {
        self.page_table.map_or(1, |table| table.ncols())
    }

    /// The page table, or `None` if sequence i is simply entry i. Entries in another order become a table with one page
    /// for each sequence. The second value lists each sequence's row of the table, unless sequence i has row i.
    pub(crate) fn table(&self) -> (Option<ArrayView2<'a, i32>>, Option<&'a [i32]>) {
        match (self.page_table, self.cache_batch_idx) {
            (None, Some(entries)) => (ArrayView2::from_shape((entries.len(), 1), entries).ok(), None),
            both => both,
        }
    }

    /// The sequences for planning. The longest one has about `longest` rows.
    pub(super) fn sequences(&self, longest: usize) -> Sequences {
        let sequences = match self.table() {
            (Some(table), Some(_)) => Sequences::indexed(self.count(), [table.nrows(), table.ncols()]),
            (Some(table), None) => Sequences::paged(self.count(), table.ncols()),
            (None, _) => Sequences::dense(self.count(), self.page_rows()),
        };
        let sequences = sequences.longest(longest).used();
        if self.cache_leftpad.is_some() { sequences.left_padded() } else { sequences }
    }
}
