//! Granularity of the scales of e4m3 tensors.

use std::fmt;

use crate::{Dtype, ProblemError, ScaleBlocks, Sequences, Shape, TensorName};

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
        /// Rows of a block; the last block of a sequence may have fewer.
        rows: usize,
    },
    /// One column of one head of one sequence, for V only. O has V's columns, so the scales and means are applied to O
    /// at the end: V = mean + scale · code.
    Channel,
}

impl Granularity {
    /// Checks that the scales of Q, K and V belong to heads, or to blocks of e4m3 tensors outside of a cache. In both
    /// cases the scales of dense V may belong to channels.
    pub(crate) fn check(
        given: [Granularity; 3],
        dtype: Dtype,
        seqs: [Sequences; 2],
    ) -> Result<(), ProblemError> {
        let packed = seqs.iter().any(|seqs| seqs.is_packed());
        let cache = seqs.iter().any(|seqs| seqs.is_cache());
        use Granularity::{Block, Channel, Head};
        match given {
            [Head, Head, Head] => Ok(()),
            [Head, Head, Channel]
            | [Block { rows: 64 | 128 }, Block { rows: 128 }, Block { rows: 128 } | Channel] => {
                let of_channels = given[2] == Channel;
                if dtype != Dtype::E4m3 || cache || packed && of_channels {
                    return Err(ProblemError::FineScales { dtype, packed, cache });
                }
                Ok(())
            }
            [q, k, v] => Err(ProblemError::Granularity { q, k, v }),
        }
    }

    /// The block scales of one head of a tensor of this shape, if scales belong to blocks.
    pub(crate) fn blocks(self, shape: Shape, seqs: Sequences) -> Option<ScaleBlocks> {
        let Granularity::Block { rows } = self else { return None };
        Some(match seqs.is_packed() {
            true => ScaleBlocks::packed(shape.seqlen, seqs.count(), rows),
            false => ScaleBlocks::dense(shape.seqlen, rows),
        })
    }

    /// Checks that the scales of blocks can be counted in 32 bits, as kernels do.
    pub(crate) fn check_count(
        self,
        tensor: TensorName,
        shape: Shape,
        seqs: Sequences,
    ) -> Result<(), ProblemError> {
        let (Granularity::Block { rows }, Some(blocks)) = (self, self.blocks(shape, seqs)) else {
            return Ok(());
        };
        let dims = [shape.batch, shape.heads, blocks.count()];
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
