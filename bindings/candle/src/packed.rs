//! Packed sequences.

use candle_core::{Result, Tensor};

use crate::rows::{List, Rows};

/// Packed sequences: `cu_seqlens` and the longest sequence of Q, and of K and V.
///
/// Sequence i is rows `cu_seqlens_q[i] .. cu_seqlens_q[i + 1]` of Q and rows `cu_seqlens_k[i] .. cu_seqlens_k[i + 1]`
/// of K and V. The lists begin with 0 and never decrease.
#[derive(Clone, Debug)]
pub struct Packed(pub(crate) Rows);

impl Packed {
    /// Takes `cu_seqlens` of Q, and of K and V, as u32 or i32 (sequences + 1) on the tensors' device, and the number of
    /// rows of the longest sequence of each.
    ///
    /// On the CPU the lists are read, and a sequence that is longer than `max_seqlen` is refused. On a GPU only the
    /// kernels read the lists: an invalid list gives unspecified results and no error, and `max_seqlen` is only a hint
    /// for speed.
    ///
    /// # Errors
    /// The list has another shape or type.
    pub fn new(
        cu_seqlens_q: &Tensor,
        cu_seqlens_k: &Tensor,
        max_seqlen_q: usize,
        max_seqlen_k: usize,
    ) -> Result<Packed> {
        Ok(Packed(Rows {
            cu_seqlens_q: Some(List::ends("cu_seqlens_q", cu_seqlens_q)?),
            cu_seqlens_k: Some(List::ends("cu_seqlens_k", cu_seqlens_k)?),
            longest: [max_seqlen_q, max_seqlen_k],
            ..Rows::default()
        }))
    }
}
