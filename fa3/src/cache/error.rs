//! Errors of a cache's lists.

use fa3_types::Dtype;

/// The reasons why a cache's lists are invalid, or why rows cannot be appended to it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum CacheError {
    #[error("{list} has {given} entries for {sequences} sequences")]
    Count { list: &'static str, given: usize, sequences: usize },
    #[error("cache_seqlens is {given} for sequence {sequence}, outside 0 to {capacity}")]
    Seqlen { sequence: usize, given: i32, capacity: usize },
    #[error("cache_leftpad is {given} for sequence {sequence}, outside 0 to cache_seqlens, {seqlen}")]
    Leftpad { sequence: usize, given: i32, seqlen: usize },
    #[error("{list} has {given} as entry {entry} of sequence {sequence}, and k has {entries} entries")]
    Entry { list: &'static str, sequence: usize, entry: usize, given: i32, entries: usize },
    #[error("cache_batch_idx is {given} for sequence {sequence}, and page_table has {rows} rows")]
    TableRow { sequence: usize, given: i32, rows: usize },
    #[error("{new} rows do not fit behind the {used} of sequence {sequence}, whose capacity is {capacity}")]
    Full { sequence: usize, used: usize, new: usize, capacity: usize },
    #[error("new rows of sequences {first} and {second} go to one place: row {row} of entry {entry}")]
    SamePlace { first: usize, second: usize, entry: usize, row: usize },
    #[error("there is no memory of {bytes} bytes for a copy of the rows in use")]
    Memory { bytes: usize },
    #[error("{list} has shape {given:?}, expected {expected:?}: (sequences, heads_kv)")]
    Scales { list: &'static str, given: Vec<usize>, expected: [usize; 2] },
    #[error("scales were given for a cache of {given}; only e4m3 has some")]
    ScaledDtype { given: Dtype },
    #[error("k_descale or v_descale is given beside scales of tokens and heads")]
    ScaledTwice,
    #[error("rotary_seqlens is {given} for sequence {sequence}, less than 0")]
    RotarySeqlen { sequence: usize, given: i32 },
    #[error("sequence {sequence} has rows up to position {last}, and the tables have {positions} positions")]
    Position { sequence: usize, last: usize, positions: usize },
}
