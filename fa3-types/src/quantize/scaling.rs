//! The sources of the scales of e4m3 codes.

use std::fmt;

use super::QuantizeProblemError;

/// A given scale lies between 1 / this and this, so that its inverse is a normal number.
const SCALE_LIMIT: f32 = (1u128 << 64) as f32;

/// The source of the scales.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// amax / 448 of each block of `rows` rows of a head, 64 or 128. The last block of a sequence may have fewer.
    Block {
        /// Rows of a block.
        rows: usize,
    },
    /// amax / 448 of `heads` successive heads of a sequence: 1 head, or the query heads of a KV head, which share a
    /// scale in attention. The amax takes a pass of its own over the tensor, before the pass that writes codes.
    Heads {
        /// Heads that share a scale; they divide the tensor's heads.
        heads: usize,
    },
    /// amax / 448 of the whole tensor. The amax takes a pass of its own over the tensor.
    Tensor,
    /// A given scale for the whole tensor. Larger numbers saturate.
    Given(f32),
    /// A mean and a scale for each channel, which is a column of a head of a sequence. The mean is subtracted, and the
    /// scale is amax / 448 of the difference. This is for V: P·V sums over keys, so the means are added to O at the
    /// end. Means and amax take a pass of their own over the tensor.
    ///
    /// The mean counts infinities and NaN as 0. It is 0 where a number minus the mean would not be finite.
    /// [`CHANNEL_ROWS`] defines its rounding.
    Channel,
}

/// The rows of a part of a channel's sum. The sum is computed in binary32 in this order, so that CPU and GPU get the
/// same mean:
///
/// 1. Rows are cut into parts of this size.
/// 2. The rows of a part form [`CHANNEL_GROUPS`] groups, by their index modulo that count. Each group is summed in the
///    order of its rows, from 0. Then the groups' sums are added in the order of the groups.
/// 3. The sums of parts are added like the rows of a part: in groups by their index modulo [`CHANNEL_GROUPS`].
pub const CHANNEL_ROWS: usize = 256;

/// The groups into which the rows of a part are divided: see [`CHANNEL_ROWS`].
pub const CHANNEL_GROUPS: usize = 16;

impl Scaling {
    /// Checks the scaling of a tensor with `heads` heads.
    pub(super) fn check(self, heads: usize) -> Result<(), QuantizeProblemError> {
        match self {
            Scaling::Block { rows: 64 | 128 } | Scaling::Tensor | Scaling::Channel => Ok(()),
            Scaling::Block { rows } => Err(QuantizeProblemError::BlockRows { given: rows }),
            Scaling::Heads { heads: of_scale } if of_scale > 0 && heads.is_multiple_of(of_scale) => Ok(()),
            Scaling::Heads { heads: given } => Err(QuantizeProblemError::ScaleHeads { given, heads }),
            Scaling::Given(scale) if (1.0 / SCALE_LIMIT..=SCALE_LIMIT).contains(&scale) => Ok(()),
            Scaling::Given(given) => Err(QuantizeProblemError::Scale { given }),
        }
    }
}

impl fmt::Display for Scaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scaling::Block { rows } => write!(f, "a scale for each {rows} rows"),
            Scaling::Heads { heads: 1 } => f.write_str("a scale for each head"),
            Scaling::Heads { heads } => write!(f, "a scale for each {heads} heads"),
            Scaling::Tensor => f.write_str("a scale for all"),
            Scaling::Given(scale) => write!(f, "scale {scale}"),
            Scaling::Channel => f.write_str("a scale and a mean for each channel"),
        }
    }
}
