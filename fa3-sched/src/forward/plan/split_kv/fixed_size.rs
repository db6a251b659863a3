//! Splits of a fixed size: their blocks, and whether CTAs merge them.

use fa3_types::Problem;

use super::{KNOWN, MOST_ITERATIONS, rows_of_lse};
use crate::forward::{CtaTile, PlanError, PlanOptions, SplitKeys, TileRow};

/// Limits of the bytes of partial results of splits of a fixed size. Above them CTAs merge splits: always, and where
/// there are many units.
const MOST_BYTES: u64 = 1 << 30;
const BYTES_IN_L2: u64 = 32 << 20;

/// Keys of a piece under [`SplitKeys::Fixed`]: for tiles of O that one warpgroup holds beside a second tile of f32, and
/// for wider ones and latent attention.
const PIECE: u64 = 256;
const WIDE_PIECE: u64 = 512;

/// Blocks of a split of a fixed size.
pub(super) fn split_blocks(
    problem: &Problem,
    options: &PlanOptions,
    split: SplitKeys,
    tile: Option<(CtaTile, bool)>,
) -> Result<u32, PlanError> {
    KNOWN.check(problem).map_err(PlanError::FixedSizeSplits)?;
    if options.tile.is_some() {
        return Err(PlanError::SplitTile);
    }
    let (CtaTile { tile_n: block, head_dim_v, qv, .. }, _) = tile.ok_or_else(|| TileRow::none(problem))?;
    let of_head_dim = if qv || head_dim_v > 128 { WIDE_PIECE } else { PIECE };
    let keys = if let SplitKeys::FixedSize { keys } = split { keys } else { of_head_dim };
    if keys == 0 || !keys.is_multiple_of(block.into()) {
        return Err(PlanError::SplitSize { keys, block });
    }
    let rows = problem.lse_shape().into_iter().map(|extent| extent as u128).product();
    if rows > u32::MAX.into() {
        return Err(PlanError::SplitRows { rows });
    }
    // No sequence has more than `MOST_ITERATIONS` blocks.
    Ok((keys / u64::from(block)).min(MOST_ITERATIONS.into()) as u32)
}

/// Whether CTAs merge splits of a fixed size, of which a unit has up to `most`: where partial results would take too
/// much memory, or more than the L2 cache holds and whole units balance.
pub(super) fn merges_splits(
    problem: &Problem,
    options: &PlanOptions,
    tile: &CtaTile,
    (most, least_units, ctas): (u32, u32, u32),
) -> Result<bool, PlanError> {
    let bytes = u128::from(most) * u128::from(rows_of_lse(problem)) * 4 * u128::from(tile.head_dim_v + 1);
    let default = if least_units >= 2 * ctas { BYTES_IN_L2 } else { MOST_BYTES };
    if most == 1 || bytes <= options.split_bytes.unwrap_or(default).into() {
        return Ok(false);
    }
    if tile.column_groups() == 1 {
        return Ok(true);
    }
    if bytes <= MOST_BYTES.into() {
        Ok(false)
    } else {
        Err(PlanError::SplitMemory { bytes, limit: MOST_BYTES })
    }
}
