//! A KV cache.

use candle_core::{Result, Tensor};

use crate::rows::{List, Rows};

/// The rows of a KV cache that are in use: the number of rows of each sequence, and the page table, if the cache is
/// paged.
///
/// ```text
/// dense              K and V (sequences, rows, heads_kv, head_dim)     sequence i is entry i
/// with a page table  K and V (pages, page_rows, heads_kv, head_dim)    row r of sequence i is row r mod page_rows
///                                                                      of page page_table[i][r / page_rows]
/// ```
///
/// Keys and values are read where they lie in memory. Before the call, the caller writes new rows to the cache, for
/// example by candle's `slice_set`:
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fa3_candle::{Attention, Cached};
///
/// // Room for 64 rows of each of two sequences. Four query heads share a key/value head.
/// let cache = || Tensor::zeros((2, 64, 2, 32), DType::F32, &Device::Cpu);
/// let token = |heads| Tensor::randn(0f32, 1., (2, 1, heads, 32), &Device::Cpu);
/// let (k, v) = (cache()?, cache()?);
/// for step in 0..3 {
///     k.slice_set(&token(2)?, 1, step)?;
///     v.slice_set(&token(2)?, 1, step)?;
///     let used = Tensor::new(&[step as u32 + 1; 2], &Device::Cpu)?;
///     let q = token(8)?;
///     let o = Attention::new(0.2).causal().forward_cached(&q, &k, &v, &Cached::new(&used, step + 1)?)?;
///     assert_eq!(o.dims(), q.dims());
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cached(pub(crate) Rows);

impl Cached {
    /// Takes the number of rows in use of each sequence, new rows included, as u32 or i32 (sequences) on the tensors'
    /// device. `max_seqlen` is the number of rows of the longest sequence.
    ///
    /// On the CPU the list is read, and a sequence that is longer than `max_seqlen` is refused. On a GPU only the
    /// kernels read the list: an invalid list gives unspecified results and no error, and `max_seqlen` is only a hint
    /// for speed.
    ///
    /// # Errors
    /// The list has another shape or type.
    pub fn new(cache_seqlens: &Tensor, max_seqlen: usize) -> Result<Cached> {
        let seqused_k = List::new("cache_seqlens", cache_seqlens, cache_seqlens.rank() == 1, "(sequences)")?;
        Ok(Cached(Rows { seqused_k: Some(seqused_k), longest: [0, max_seqlen], ..Rows::default() }))
    }

    /// Takes K and V as pages. Row i of the table, u32 or i32 (sequences, pages), lists the pages of sequence i in
    /// order. Sequences may share pages. Entries after a sequence's last page are ignored.
    ///
    /// # Errors
    /// The table has another shape or type.
    pub fn page_table(mut self, page_table: &Tensor) -> Result<Cached> {
        let sequences = self.0.seqused_k.as_ref().map_or(0, |used| used.numbers.elem_count());
        let fits = page_table.rank() == 2 && page_table.dims()[0] == sequences;
        let table = List::new("page_table", page_table, fits, format!("({sequences} sequences, pages)"))?;
        self.0.page_table = Some(table);
        Ok(self)
    }

    /// Takes Q as packed, (total_q, heads_q, head_dim): sequence i is rows `cu_seqlens_q[i] .. cu_seqlens_q[i + 1]`.
    /// [`Packed::new`](crate::Packed::new) describes `cu_seqlens_q` and `max_seqlen_q`.
    ///
    /// # Errors
    /// The list has another shape or type.
    pub fn packed_queries(mut self, cu_seqlens_q: &Tensor, max_seqlen_q: usize) -> Result<Cached> {
        self.0.cu_seqlens_q = Some(List::ends("cu_seqlens_q", cu_seqlens_q)?);
        self.0.longest[0] = max_seqlen_q;
        Ok(self)
    }
}
