//! The rows of sequences on one side, Q or K and V, from the arrays of lengths.

use fa3_ir::lang::*;
use fa3_sched::packed::ClampedRows;

use super::params::Params;
use crate::kernels::params::InKernel;

/// Where the rows of Q, or of K and V, are said.
pub(super) struct SideRows<'k> {
    cu_seqlens: Option<V<'k, B64>>,
    seqused: Option<V<'k, B64>>,
    /// Rows of the packed tensor, or of each sequence of a dense one.
    rows: V<'k, B32>,
}

impl<'k> SideRows<'k> {
    /// Where the rows of Q are said.
    pub(super) fn q(params: &Params<InKernel<'k>>) -> SideRows<'k> {
        SideRows { cu_seqlens: params.cu_seqlens_q, seqused: params.seqused_q, rows: params.rows_q }
    }

    /// Where the rows of K and V are said.
    pub(super) fn k(params: &Params<InKernel<'k>>) -> SideRows<'k> {
        SideRows { cu_seqlens: params.cu_seqlens_k, seqused: params.seqused_k, rows: params.rows_k }
    }

    /// The rows of a sequence; none if it does not count.
    #[track_caller]
    pub(super) fn of_sequence(
        &self,
        b: &'k Builder,
        sequence: V<'k, B32>,
        counts: V<'k, Pred>,
    ) -> ClampedRows<V<'k, B32>> {
        let all = counts.select::<B32>(self.rows, 0);
        let rows = match self.cu_seqlens {
            Some(array) => {
                let at = sequence.mad_wide(4, array);
                ClampedRows::packed([b.load(at), b.load(at.at(4))], all)
            }
            None => ClampedRows::dense(all),
        };
        match self.seqused {
            Some(array) => rows.used(b.load(sequence.mad_wide(4, array))),
            None => rows,
        }
    }

    /// The last entry of `cu_seqlens`, if there is that array, given the number of sequences.
    #[track_caller]
    pub(super) fn end(&self, b: &'k Builder, count: V<'k, B32>) -> Option<V<'k, B32>> {
        self.cu_seqlens.map(|array| b.load(count.mad_wide(4, array)))
    }
}
