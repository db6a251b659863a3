//! Granularity of the scales of e4m3 tensors.

use std::fmt;

use crate::{Dtype, ProblemError, Shape, TensorName};

/// The elements of an e4m3 tensor that share a scale.
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
    /// One column of one head of one sequence, of V. O has V's columns, so that it is their scales' at the end, and
    /// their means': V = mean + scale · code.
    Channel,
}

impl Granularity {
    /// Scales of Q, K and V are of heads, or of blocks of dense e4m3 tensors. In either case V's may be of channels.
    pub(crate) fn check(given: [Granularity; 3], dtype: Dtype, packed: bool) -> Result<(), ProblemError> {
        use Granularity::{Block, Channel, Head};
        match given {
            [Head, Head, Head] => Ok(()),
            [Head, Head, Channel]
            | [Block { rows: 64 | 128 }, Block { rows: 128 }, Block { rows: 128 } | Channel] => {
                if dtype != Dtype::E4m3 || packed {
                    return Err(ProblemError::FineScales { dtype, packed });
                }
                Ok(())
            }
            [q, k, v] => Err(ProblemError::Granularity { q, k, v }),
        }
    }

    /// Kernels count the scales of blocks in 32 bits.
    pub(crate) fn check_count(self, tensor: TensorName, shape: Shape) -> Result<(), ProblemError> {
        let Granularity::Block { rows } = self else { return Ok(()) };
        let dims = [shape.batch, shape.heads, shape.seqlen.div_ceil(rows)];
        match dims.iter().try_fold(1u32, |count, &dim| count.checked_mul(u32::try_from(dim).ok()?)) {
            Some(_) => Ok(()),
            None => Err(ProblemError::TooManyScales { tensor, shape, rows }),
        }
    }
}

impl fmt::Display for Granularity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Granularity::Tensor => f.pad("tensor"),
            Granularity::Head => f.pad("head"),
            Granularity::Block { rows } => f.pad(&format!("{rows} rows")),
            Granularity::Channel => f.pad("channel"),
        }
    }
}
