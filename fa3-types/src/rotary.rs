//! Rotary position embedding (Su et al., arXiv 2104.09864).

use std::fmt;

use crate::Real;

/// Elements of a row that rotate are a multiple of this.
pub(crate) const ROTARY_MULTIPLE: usize = 16;

/// Rotates a pair by an angle: one product, rounded, and one fused multiply-add for each result.
///
/// ```text
/// (x, y) → (x cos − y sin, x sin + y cos)
/// ```
pub fn rotate<T: Real>([x, y]: [T; 2], cos: T, sin: T) -> [T; 2] {
    [x.fma(cos, -(y * sin)), x.fma(sin, y * cos)]
}

/// The pairing of a row's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Entries 2i and 2i + 1, as in the RoFormer paper and GPT-J.
    Interleaved,
    /// Entries i and i + rotary_dim / 2, as in GPT-NeoX and Llama.
    HalfSplit,
}

impl fmt::Display for RopeStyle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RopeStyle::Interleaved => "interleaved",
            RopeStyle::HalfSplit => "half-split",
        })
    }
}

/// A rotation of the pairs of a row's leading `rotary_dim` entries, by cosines and sines from two tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rotary {
    /// The pairing of entries.
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
    /// A contiguous i32 tensor (batch, seqlen) has the positions. A row whose position is outside of the tables becomes
    /// NaN.
    Listed,
}
