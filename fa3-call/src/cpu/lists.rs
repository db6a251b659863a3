//! The lists that give the rows of packed sequences, and the rows in use of each sequence.

use fa3::{Attention, CachedAttention, Error as CpuError, Scalar};
use fa3_types::{ProblemError, ProblemSpec, SequenceRows, Sequences, Shape};

use super::memory::Memory;
use crate::error::Error;

/// The lists `cu_seqlens` and `seqused`, each for Q and for K and V, if the call has them.
#[derive(Clone, Copy)]
pub(super) struct Lists<'a> {
    cu_seqlens: [Option<&'a [i32]>; 2],
    seqused: [Option<&'a [i32]>; 2],
}

impl<'a> Lists<'a> {
    /// The lists of a call's sequences.
    ///
    /// # Safety
    /// `memory` must have the lists, with the lengths that `spec` implies. They stay alive and are not written to as
    /// long as the result lives.
    ///
    /// # Errors
    /// An address is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn of(spec: &ProblemSpec, memory: &Memory<'_>) -> Result<Lists<'a>, Error> {
        let (of_q, of_k) = (spec.seqs_q, spec.seqs_k);
        let used = |list, of: Sequences| {
            // SAFETY: the caller guarantees the tensors.
            of.has_used().then(|| unsafe { memory.slice(list, of.count()) }).transpose()
        };
        let seqused = [used("seqused_q", of_q)?, used("seqused_k", of_k)?];
        let ends = |list, of: Sequences| {
            // SAFETY: as above.
            of.is_packed().then(|| unsafe { memory.slice(list, of.count() + 1) }).transpose()
        };
        Ok(Lists { cu_seqlens: [ends("cu_seqlens_q", of_q)?, ends("cu_seqlens_k", of_k)?], seqused })
    }

    /// These lists with another `seqused` of K and V.
    pub(super) fn with_used_k(self, seqused: &'a [i32]) -> Lists<'a> {
        Lists { seqused: [self.seqused[0], Some(seqused)], ..self }
    }

    /// Number of rows in use of each sequence of K and V; `None` if all rows are in use.
    pub(super) fn used_k(self) -> Option<&'a [i32]> {
        self.seqused[1]
    }

    /// Gives the lists to an attention.
    pub(super) fn given<T: Scalar>(self, mut attention: Attention<'a, T>) -> Attention<'a, T> {
        if let [Some(of_q), Some(of_k)] = self.cu_seqlens {
            attention = attention.packed(of_q, of_k);
        }
        if let Some(seqused) = self.seqused[0] {
            attention = attention.seqused_q(seqused);
        }
        match self.seqused[1] {
            Some(seqused) => attention.seqused_k(seqused),
            None => attention,
        }
    }

    /// Gives the lists of Q to an attention over a cache.
    pub(super) fn of_q<T: Scalar>(self, mut attention: CachedAttention<'a, T>) -> CachedAttention<'a, T> {
        if let Some(of_q) = self.cu_seqlens[0] {
            attention = attention.cu_seqlens_q(of_q);
        }
        match self.seqused[0] {
            Some(seqused) => attention.seqused_q(seqused),
            None => attention,
        }
    }

    /// The rows of the sequences of Q.
    ///
    /// # Errors
    /// The lists are invalid.
    pub(super) fn rows_q(self, spec: &ProblemSpec) -> Result<SequenceRows, Error> {
        Ok(self.rows(0, spec.q.shape).map_err(CpuError::SequencesOfQ)?)
    }

    /// The rows of the sequences of K and V.
    ///
    /// # Errors
    /// The lists are invalid.
    pub(super) fn rows_k(self, spec: &ProblemSpec) -> Result<SequenceRows, Error> {
        Ok(self.rows(1, spec.k.shape).map_err(CpuError::SequencesOfK)?)
    }

    fn rows(self, side: usize, shape: Shape) -> Result<SequenceRows, ProblemError> {
        SequenceRows::listed(shape.batch, shape.seqlen, self.cu_seqlens[side], self.seqused[side])
    }
}
