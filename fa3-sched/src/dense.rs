//! Lengths that the host knows: dense batches of full sequences.

use fa3_types::Problem;

use crate::SeqLens;

/// Whether the lengths of the problem are data: sequences are packed, partly in use, or in a cache.
pub(crate) fn lengths_are_data(problem: &Problem) -> bool {
    [problem.seqs_q(), problem.seqs_k()].into_iter().any(|x| !x.are_equal())
}

/// Lengths of Q and K, equal for all sequences; `None` if lengths are data.
pub(crate) fn dense_lens(problem: &Problem) -> Option<SeqLens<u32>> {
    // Lengths are below 2³¹ in every problem.
    let lens = SeqLens { q: problem.q().shape.seqlen as u32, k: problem.k().shape.seqlen as u32 };
    (!lengths_are_data(problem)).then_some(lens)
}
