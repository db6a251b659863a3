//! What shares a scale.

use std::fmt;

/// What shares a scale of an e4m3 tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Granularity {
    /// The whole tensor.
    Tensor,
    /// One head of one sequence.
    Head,
    /// `rows` successive rows of one head, counted from the start of the sequence: B_r for Q, B_c for K and V
    /// (§3.3 "block quantization").
    Block {
        /// Rows a block; the last block of a sequence may have fewer.
        rows: usize,
    },
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::Tensor => f.pad("tensor"),
            Granularity::Head => f.pad("head"),
            Granularity::Block { rows } => f.pad(&format!("{rows} rows")),
        }
    }
}
