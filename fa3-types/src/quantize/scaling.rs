//! Where the scales of e4m3 codes come from.

use std::fmt;

use super::QuantizeProblemError;

/// Given scales lie between its inverse and itself: the inverse of such a scale is normal.
const SCALE_LIMIT: f32 = (1u128 << 64) as f32;

/// Where scales come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    /// amax / 448 of each block of so many rows of a head, 64 or 128. The last block of a sequence may have fewer.
    Block {
        /// Rows of a block.
        rows: usize,
    },
    /// amax / 448 of so many successive heads of a sequence: 1, or the query heads of a key head, as attention takes
    /// scales of heads. It takes another pass over the tensor, before the one that writes codes.
    Heads {
        /// Heads that share a scale; they divide those of the tensor.
        heads: usize,
    },
    /// amax / 448 of the whole tensor, in another pass before the one that writes codes.
    Tensor,
    /// This one, of the whole tensor. Larger numbers saturate.
    Given(f32),
    /// Of each channel, which is a column of a head of a sequence: its mean is subtracted, and its scale is amax / 448
    /// of what is left. For V, whose products with P are summed over keys: O gets the means back. It takes another pass
    /// over the tensor, before the one that writes codes.
    ///
    /// The mean counts numbers that are not finite as 0. It is 0 where a number minus the mean would not be finite. How
    /// it is rounded: see [`CHANNEL_ROWS`].
    Channel,
}

/// A channel's sum is added up in binary32 as follows, so that CPU and GPU have the same mean.
///
/// 1. Rows are cut into parts of so many.
/// 2. Of the [`CHANNEL_GROUPS`] groups of rows of a part whose numbers are equal modulo that count, each is summed in
///    the order of its rows, from 0. Then the groups' sums are added in the order of the groups.
/// 3. Parts are added as rows of a part are: in groups of those whose numbers are equal modulo [`CHANNEL_GROUPS`].
pub const CHANNEL_ROWS: usize = 256;

/// See [`CHANNEL_ROWS`].
pub const CHANNEL_GROUPS: usize = 16;

impl Scaling {
    /// Of a tensor with so many heads.
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
