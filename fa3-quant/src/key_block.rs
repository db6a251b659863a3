//! Blocks of keys and values, ready for the tensor core.

use fa3_types::KnownProblem;

use crate::head::head as head_of;
use crate::{Operand, Quantized};

/// Keys and values of one block, cut off at the end of the sequence. TMA fills the rest of the block with zeros, which
/// change no sum.
pub(crate) struct KeyBlock {
    /// The first key, counted from the sequence's start.
    pub(crate) first: usize,
    /// Kᵀ (head_dim, keys).
    pub(crate) keys: Operand,
    /// V (keys, head_dim_v).
    pub(crate) values: Operand,
    /// The scale of K.
    pub(crate) scale_k: f32,
    /// The scale of V.
    pub(crate) scale_v: f32,
}

/// The blocks of `rows` keys of one head of a sequence. No scale may change within a block.
pub(crate) fn key_blocks(
    problem: &KnownProblem,
    sequence: usize,
    head: usize,
    k: &Quantized,
    v: &Quantized,
    rows: usize,
) -> Vec<KeyBlock> {
    let len = problem.lengths(sequence).k;
    let (batch, start) = problem.rows_k().start(sequence);
    let (k_rows, v_rows) = (head_of(k.codes().view(), batch, head), head_of(v.codes().view(), batch, head));
    let block = |first: usize| {
        let keys = (len - first).min(rows);
        KeyBlock {
            first,
            keys: Operand::new(problem.head_dim(), keys, |d, key| k_rows[[start + first + key, d]]),
            values: Operand::new(keys, problem.head_dim_v(), |key, d| v_rows[[start + first + key, d]]),
            scale_k: k.scale(sequence, head, first),
            scale_v: v.scale(sequence, head, first),
        }
    };
    (0..len).step_by(rows).map(block).collect()
}
