//! Rotary position embedding, as a problem says it (Su et al., arXiv 2104.09864).

use crate::Real;

/// Rotates a pair by an angle: a product, rounded, and its sum with the other, rounded once.
///
/// ```text
/// (x, y) → (x cos − y sin, x sin + y cos)
/// ```
pub fn rotate<T: Real>([x, y]: [T; 2], cos: T, sin: T) -> [T; 2] {
    [x.fma(cos, -(y * sin)), x.fma(sin, y * cos)]
}

/// Which entries of a row rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Entries 2i and 2i + 1, as in the RoFormer paper and GPT-J.
    Interleaved,
    /// Entries i and i + rotary_dim / 2, as in GPT-NeoX and Llama.
    HalfSplit,
}

/// A rotation of the pairs of a row's leading `rotary_dim` entries, by cosines and sines from two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// Which entries are a pair.
    pub style: RopeStyle,
    /// Leading entries of a row that rotate: a positive multiple of 16, at most head_dim.
    pub rotary_dim: usize,
    /// Rows of the tables of cosines and sines, f32 (table_rows, rotary_dim / 2), contiguous. Row p is position p.
    pub table_rows: usize,
    /// The position of each row.
    pub positions: Positions,
}

/// The positions of a tensor's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Positions {
    /// Row i of each sequence is at this position plus i.
    From(usize),
    /// An i32 tensor (batch, seqlen), contiguous, says them. A row whose position is not one of the table's becomes
    /// NaN.
    Listed,
}
