//! The rows of a cache's sequences.

use std::borrow::Cow;

use fa3::ndarray::{Array2, ArrayView2, ArrayView4, ArrayViewMut4, CowArray, Ix2};
use fa3::{CacheView, CacheViewMut};
use fa3_types::{ProblemSpec, SequenceRows};

use crate::cpu::lists::Lists;
use crate::cpu::memory::Memory;
use crate::error::Error;

/// Whether the call must be computed as attention over a cache: K is not packed, and either Q is packed, or the shape
/// of K does not determine the lengths of its sequences.
pub(crate) fn is_cache(spec: &ProblemSpec) -> bool {
    let (of_q, of_k) = (spec.seqs_q, spec.seqs_k);
    !of_k.is_packed() && (of_q.is_packed() || !of_k.are_equal())
}

/// The rows of sequences in K and V.
pub(crate) struct CacheRows<'a> {
    /// Number of rows in use of each sequence, left padding included.
    pub(super) seqused: Vec<i32>,
    /// Number of padding rows before each sequence's first row, which `seqused` counts as well.
    leftpad: Option<Cow<'a, [i32]>>,
    /// The pages of sequences.
    table: Option<CowArray<'a, i32, Ix2>>,
    /// Each sequence's row of the page table.
    index: Option<&'a [i32]>,
}

impl<'a> CacheRows<'a> {
    /// The rows of a call.
    ///
    /// # Safety
    /// `memory` must have the page table and the index of `spec`. They stay alive and are not written to as long as the
    /// result lives.
    ///
    /// # Errors
    /// An address or a list is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(crate) unsafe fn of(
        spec: &ProblemSpec,
        lists: Lists<'a>,
        memory: &Memory<'_>,
    ) -> Result<CacheRows<'a>, Error> {
        let (sequences, count) = (spec.seqs_k, spec.seqs_k.count());
        if sequences.is_packed() {
            // The whole tensor is one page, which all sequences share.
            let rows = lists.rows_k(spec)?;
            let first: Vec<i32> = (0..count).map(|i| rows.start(i).1 as i32).collect();
            let seqused = first.iter().enumerate().map(|(i, first)| first + rows.len(i) as i32).collect();
            let table = Some(Array2::zeros((count, 1)).into());
            return Ok(CacheRows { seqused, leftpad: Some(first.into()), table, index: None });
        }
        let capacity = sequences.capacity(spec.k.shape.seqlen);
        let seqused = match lists.used_k() {
            Some(used) => used.to_vec(),
            None => vec![i32::try_from(capacity).map_err(|_| Error::CacheRows { capacity })?; count],
        };
        // SAFETY: the caller guarantees the tensors.
        let list = |name, is_there: bool| is_there.then(|| unsafe { memory.slice(name, count) }).transpose();
        let leftpad = list("leftpad_k", sequences.has_leftpad())?.map(Cow::Borrowed);
        let index = list("cache_batch_idx", sequences.has_index())?;
        let table = sequences.table_rows().zip(sequences.pages()).map(|dims| {
            // SAFETY: as above.
            let entries = unsafe { memory.slice("page_table", dims.0 * dims.1) }?;
            Ok::<_, Error>(ArrayView2::from_shape(dims, entries).expect("one element for each index").into())
        });
        Ok(CacheRows { seqused, leftpad, table: table.transpose()?, index })
    }

    /// The entries (pages or batch entries) of K and V that sequences use after the append. Entries that the cache does
    /// not have are left out.
    pub(super) fn entries(&self, spec: &ProblemSpec, new: &SequenceRows) -> Vec<usize> {
        let (page_rows, mut entries) = (spec.k.shape.seqlen.max(1), vec![]);
        for (sequence, &used) in self.seqused.iter().enumerate() {
            let Some(table) = &self.table else {
                entries.push(sequence);
                continue;
            };
            let pages = (used.max(0) as usize + new.len(sequence)).div_ceil(page_rows);
            let row = self.index.map_or(Some(sequence), |index| index[sequence].try_into().ok());
            let row = row.filter(|&row| row < table.nrows());
            let listed = row.into_iter().flat_map(|row| table.row(row).into_iter().take(pages));
            let there = |&page: &i32| usize::try_from(page).ok().filter(|&page| page < spec.k.shape.batch);
            entries.extend(listed.filter_map(there));
        }
        entries
    }

    /// A cache with these tensors as K and V.
    pub(crate) fn of_tensors<'b, C>(&'b self, [k, v]: [ArrayView4<'b, C>; 2]) -> CacheView<'b, C> {
        CacheView {
            k,
            v,
            cache_seqlens: &self.seqused,
            page_table: self.table.as_ref().map(|table| table.view()),
            cache_batch_idx: self.index,
            cache_leftpad: self.leftpad.as_deref(),
        }
    }

    /// A cache with these tensors as K and V, to which rows are written.
    pub(super) fn of_written<'b, C>(&'b mut self, [k, v]: [ArrayViewMut4<'b, C>; 2]) -> CacheViewMut<'b, C> {
        CacheViewMut {
            k,
            v,
            cache_seqlens: &mut self.seqused,
            page_table: self.table.as_ref().map(|table| table.view()),
            cache_batch_idx: self.index,
            cache_leftpad: self.leftpad.as_deref(),
        }
    }
}
