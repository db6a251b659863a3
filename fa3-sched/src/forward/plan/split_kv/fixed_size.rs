//! Splits of a fixed size: their blocks, and whether CTAs merge them.

use fa3_types::{Dtype, Problem};

use super::known::known;
use super::{MOST_ITERATIONS, rows_of_lse};
use crate::DeviceLimits;
use crate::forward::{CtaTile, PlanError, PlanOptions, SplitKeys, TileRow};
use crate::packed::PageLayout;

/// Limits of the bytes of partial results of splits of a fixed size where Q has few rows. Above them CTAs merge splits:
/// always, and where there are many units.
const MOST_BYTES: u64 = 1 << 30;
const BYTES_IN_L2: u64 = 32 << 20;

/// Keys of a piece under [`SplitKeys::Fixed`]: for tiles of O that one warpgroup holds beside a second tile of f32, and
/// for wider ones and latent attention.
const PIECE: u64 = 256;
const WIDE_PIECE: u64 = 512;

/// From this number of rows on, a third warpgroup pays where O has at most 64 columns, as in the tile table.
const ROWS_OF_THREE: usize = 1536;

/// Blocks of a split of a fixed size.
pub(super) fn split_blocks(
    problem: &Problem,
    options: &PlanOptions,
    split: SplitKeys,
    tile: Option<(CtaTile, bool)>,
) -> Result<u32, PlanError> {
    known(problem).check(problem).map_err(PlanError::FixedSizeSplits)?;
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

/// Whether CTAs merge splits of a fixed size, of which a unit has up to `most`: where Q has many rows, where partial
/// results would take too much memory, or where they are more than the L2 cache holds and whole units balance.
pub(super) fn merges_splits(
    problem: &Problem,
    options: &PlanOptions,
    tile: &CtaTile,
    (has_few_rows, most, least_units, ctas): (bool, u32, u32, u32),
) -> Result<bool, PlanError> {
    let bytes = u128::from(most) * u128::from(rows_of_lse(problem)) * 4 * u128::from(tile.head_dim_v + 1);
    let default = match (has_few_rows, least_units >= 2 * ctas) {
        (false, _) => 0,
        (true, true) => BYTES_IN_L2,
        (true, false) => MOST_BYTES,
    };
    if has_few_rows && most == 1 || bytes <= options.split_bytes.unwrap_or(default).into() {
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

/// The tile of split-KV with as many rows as fit, for tiles of one head whose pieces their CTA merges. Blocks have the
/// same keys, so that rows have the same bits.
pub(super) fn with_more_rows(problem: &Problem, tile: CtaTile, limits: &DeviceLimits) -> CtaTile {
    let rows = problem.longest().q;
    let is_narrow = tile.head_dim_v <= 64 && problem.dtype() != Dtype::E4m3 && !problem.converts_keys();
    let most = match rows {
        ..=64 => 1,
        ROWS_OF_THREE.. if is_narrow && !PageLayout::are_gathered(problem) => 3,
        _ => 2,
    };
    let tiles = (1..=most).rev().map(|consumers| CtaTile {
        tile_m: 64 * consumers,
        consumers,
        ping_pong: consumers > 1,
        ..tile
    });
    tiles.into_iter().find(|tile| tile.check(limits).is_ok()).unwrap_or(tile)
}
