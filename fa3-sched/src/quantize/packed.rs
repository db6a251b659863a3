//! The sequences of a packed tensor that is quantized, and the reasons why there is no plan.

use fa3_types::QuantizeProblem;

use crate::TooManyTiles;
use crate::packed::{MemoryRows, NotInRows};

/// The sequences of a packed tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed {
    /// Number of sequences.
    pub sequences: u32,
    /// The tensor's rows in memory.
    pub rows: MemoryRows,
}

/// The reasons for which [`Plan::new`](super::Plan::new) refuses a problem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it")]
pub enum PlanError {
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
    #[error("the quantization kernels take x of packed sequences with {0}")]
    Rows(#[from] NotInRows),
}

impl Packed {
    pub(super) fn of(problem: &QuantizeProblem) -> Result<Option<Packed>, NotInRows> {
        let Some(sequences) = problem.packed() else { return Ok(None) };
        // A number of sequences beyond 32 bits means too many tiles.
        let sequences = u32::try_from(sequences).unwrap_or(u32::MAX);
        Ok(Some(Packed { sequences, rows: MemoryRows::of(problem.x())? }))
    }
}
