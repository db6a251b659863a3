//! Keys and values of a cache, gathered into sequences as the CPU's engine takes them.

use bytemuck::Pod;
use fa3::ndarray::{Array2, Array4, ArrayView2};
use fa3_ref::{CachedRows, PageTable};
use fa3_types::{ProblemSpec, Sequences, Shape, TensorDesc};

use super::lists::Lists;
use super::memory::Memory;
use crate::error::Error;

/// Whether the keys of a call are found in ways that the CPU's engine does not know.
pub(super) fn is_cache(spec: &ProblemSpec) -> bool {
    let (of_q, of_k) = (spec.seqs_q, spec.seqs_k);
    !of_k.is_packed() && (of_q.is_packed() || !of_k.are_equal())
}

/// The rows of a cache that its sequences may have: dense sequences, or packed ones where Q is packed.
pub(super) struct Gathered<T> {
    k: Array4<T>,
    v: Array4<T>,
    /// Where they begin, if Q is packed.
    cu_seqlens: Option<Vec<i32>>,
    /// How many of their rows are in use.
    seqused: Vec<i32>,
}

impl<T: Pod + Default> Gathered<T> {
    /// The gathered cache of a call. Lengths and pages that make no sense count as on a GPU.
    ///
    /// # Safety
    /// K, V and the lists of `spec` lie there. They live, and nobody writes to them, for as long as this takes.
    ///
    /// # Errors
    /// An address that makes no sense, or more rows than 32 bits can count.
    #[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
    pub(super) unsafe fn of(spec: &ProblemSpec, memory: &Memory<'_>) -> Result<Gathered<T>, Error> {
        let (sequences, count) = (spec.seqs_k, spec.seqs_k.count());
        let (pages, page_rows) = (sequences.pages().unwrap_or(1), spec.k.shape.seqlen);
        let list = |name, is_there: bool| match is_there {
            // SAFETY: the caller vouches for it.
            true => unsafe { memory.slice::<i32>(name, count) },
            false => Ok(&[] as &[i32]),
        };
        // SAFETY: as above.
        let listed = unsafe { page_table(sequences, memory)? };
        // Without a table, sequence i is entry i.
        let own = Array2::from_shape_fn((count, 1), |(entry, _)| entry as i32);
        let page_table = listed.unwrap_or(PageTable { pages: own.view(), index: None });
        let (leftpad, seqused) =
            (list("leftpad_k", sequences.has_leftpad())?, list("seqused_k", sequences.has_used())?);
        let rows = CachedRows { page_table, leftpad, seqused };
        // SAFETY: as above.
        let (k, v) = unsafe { (memory.view::<T>("k", &spec.k)?, memory.view::<T>("v", &spec.v)?) };
        let (k, v) = (rows.gather(k, T::default()), rows.gather(v, T::default()));
        let of_sequences = rows.rows(page_rows)?;
        let seqused = (0..count).map(|i| of_sequences.len(i) as i32).collect();
        if !spec.seqs_q.is_packed() {
            return Ok(Gathered { k, v, cu_seqlens: None, seqused });
        }
        let first = |i: usize| i32::try_from(i * pages * page_rows);
        let cu_seqlens = (0..=count).map(first).collect::<Result<_, _>>().map_err(|_| Error::CacheRows)?;
        Ok(Gathered { k: packed(k), v: packed(v), cu_seqlens: Some(cu_seqlens), seqused })
    }

    /// K and V.
    pub(super) fn tensors(&self) -> [&Array4<T>; 2] {
        [&self.k, &self.v]
    }

    /// The lists of a call with those of its cache in place of its own.
    pub(super) fn lists<'a>(&'a self, of_call: Lists<'a>) -> Lists<'a> {
        of_call.with_k(self.cu_seqlens.as_deref(), &self.seqused)
    }

    /// The call with this K and V.
    pub(super) fn spec(&self, of_call: &ProblemSpec) -> ProblemSpec {
        let mut spec = of_call.clone();
        for (desc, tensor) in [(&mut spec.k, &self.k), (&mut spec.v, &self.v)] {
            let (batch, seqlen, heads, head_dim) = tensor.dim();
            *desc = TensorDesc::contiguous(desc.dtype, Shape { batch, seqlen, heads, head_dim });
        }
        spec
    }
}

/// The page table of a cache's sequences, if they have one.
///
/// # Safety
/// It and its index lie there. They live, and nobody writes to them, for as long as the result.
///
/// # Errors
/// An address that makes no sense.
#[allow(unsafe_code, reason = "torch's tensors are plain addresses")]
pub(super) unsafe fn page_table<'a>(
    sequences: Sequences,
    memory: &Memory<'_>,
) -> Result<Option<PageTable<'a>>, Error> {
    let Some(dims) = sequences.table_rows().zip(sequences.pages()) else { return Ok(None) };
    // SAFETY: the caller vouches for it.
    let entries = unsafe { memory.slice("page_table", dims.0 * dims.1)? };
    // SAFETY: as above.
    let index = sequences.has_index().then(|| unsafe { memory.slice("cache_batch_idx", sequences.count()) });
    let pages = ArrayView2::from_shape(dims, entries).expect("they are so many");
    Ok(Some(PageTable { pages, index: index.transpose()? }))
}

/// Sequences one after the other.
fn packed<T>(x: Array4<T>) -> Array4<T> {
    let (count, rows, heads, columns) = x.dim();
    x.into_shape_with_order((1, count * rows, heads, columns)).expect("an array of its own is contiguous")
}
