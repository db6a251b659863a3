//! The batches that kernels take: dense, every sequence in full.

use fa3_types::{Problem, TensorName};

use crate::Lens;

/// Why a problem is not of a dense batch with sequences in full. It reads as what kernels take instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum NotDense {
    #[error("dense batches, not {sequences} packed sequences")]
    Packed { sequences: usize },
    #[error("sequences in full, and {tensor} has sequences that are used in part")]
    Used { tensor: TensorName },
}

/// Whether lengths of the problem are data: sequences are packed, in use in part, or in a cache.
pub(crate) fn lengths_are_data(problem: &Problem) -> bool {
    [problem.seqs_q(), problem.seqs_k()].into_iter().any(|x| !x.are_equal())
}

/// Rows of Q and of K, the same for every sequence.
pub(crate) fn dense_lens(problem: &Problem) -> Result<Lens<u32>, NotDense> {
    let sides = [(TensorName::Q, problem.seqs_q()), (TensorName::K, problem.seqs_k())];
    for (tensor, sequences) in sides {
        if sequences.is_packed() {
            return Err(NotDense::Packed { sequences: sequences.count() });
        }
        if !sequences.are_equal() {
            return Err(NotDense::Used { tensor });
        }
    }
    // Lengths are below 2³¹ in every problem.
    Ok(Lens { q: problem.q().shape.seqlen as u32, k: problem.k().shape.seqlen as u32 })
}
