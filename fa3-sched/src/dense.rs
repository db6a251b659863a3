//! The batches that kernels take: dense, every sequence in full.

use fa3_types::{Problem, TensorName};

use crate::Lens;

/// Why a problem is not of a dense batch with sequences in full. It reads as what kernels take instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum NotDense {
    #[error("dense batches, not {sequences} packed sequences")]
    Packed { sequences: usize },
    #[error("sequences in full, not {used} of {seqlen} rows of {tensor} of sequence {sequence}")]
    Used { tensor: TensorName, sequence: usize, used: usize, seqlen: usize },
}

/// Rows of Q and of K, the same for every sequence.
pub(crate) fn dense_lens(problem: &Problem) -> Result<Lens<u32>, NotDense> {
    if problem.seqs_q().is_packed() || problem.seqs_k().is_packed() {
        return Err(NotDense::Packed { sequences: problem.batch() });
    }
    let sides = [
        (TensorName::Q, problem.seqs_q(), problem.q().shape.seqlen),
        (TensorName::K, problem.seqs_k(), problem.k().shape.seqlen),
    ];
    for (tensor, sequences, seqlen) in sides {
        if let Some(sequence) = sequences.first_in_part() {
            return Err(NotDense::Used { tensor, sequence, used: sequences.len(sequence), seqlen });
        }
    }
    // Lengths are below 2³¹ in every problem.
    Ok(Lens { q: problem.q().shape.seqlen as u32, k: problem.k().shape.seqlen as u32 })
}
