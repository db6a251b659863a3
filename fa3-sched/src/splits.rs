//! When to split the keys and when to pack query heads.

use std::num::NonZeroU32;

use crate::makespan::TILE_COST;

/// The most parts, as in FlashAttention-3: whoever combines them reads them all.
const MOST_SPLITS: u32 = 128;

/// What the number of splits depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitQuery {
    /// Tiles without splits.
    pub tiles: u64,
    /// Tiles of one head of the longest sequence.
    pub m_blocks: u32,
    /// KV blocks of the longest tile.
    pub kv_blocks: u32,
    /// K and V of one head of the longest sequence, in bytes.
    pub kv_head_bytes: u64,
    /// Whether every tile visits all keys.
    pub dense: bool,
    /// Streaming multiprocessors.
    pub sms: NonZeroU32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
}

/// What combining partial results costs, in KV blocks: O and LSE travel through memory in fp32, and a second
/// kernel starts. Not measured; with it no range of up to 5 blocks is split, where FlashAttention-3 stops at 4.
const COMBINE_COST: u64 = 4;

/// In how many parts to compute each KV range.
///
/// - Where tiles fill at least 4/5 of the SMs, ranges stay whole; except that a head whose K and V exceed L2,
///   read by at least two waves of its own tiles, is cut into parts that fit L2.
/// - Otherwise the time of s parts is modelled as waves of equal tiles, ⌈tiles · s / SMs⌉ · (⌈blocks / s⌉ + 1),
///   [`TILE_COST`] being 1, and 4 more blocks to combine them if s > 1. The smallest s within a factor 0.85 of
///   the best is taken, because each part adds to the traffic of the combination.
pub fn num_splits(query: &SplitQuery) -> u32 {
    let SplitQuery { tiles, m_blocks, kv_blocks, kv_head_bytes, dense, sms, l2_bytes } = *query;
    let sms = u64::from(sms.get());
    let most = MOST_SPLITS.min(kv_blocks).max(1);
    if 5 * tiles >= 4 * sms {
        let sweeps = dense && u64::from(m_blocks) >= 2 * sms;
        let parts = if sweeps { kv_head_bytes.div_ceil(l2_bytes.max(1)) } else { 1 };
        return parts.clamp(1, most.into()) as u32;
    }
    let time = |splits: u32| {
        let waves = (tiles * u64::from(splits)).div_ceil(sms);
        let combine = if splits > 1 { COMBINE_COST } else { 0 };
        waves * (u64::from(kv_blocks.div_ceil(splits)) + TILE_COST) + combine
    };
    let best = (1..=most).map(time).min().unwrap_or(0);
    (1..=most).find(|&splits| 85 * time(splits) <= 100 * best).unwrap_or(1)
}

/// Whether to pack the query heads of a group into one tile, given how many rows, padding included, all tiles
/// have with and without. Packed rows are addressed in two dimensions, so a gain below a tenth is not worth
/// it.
pub fn packs_gqa(padded_rows_packed: u128, padded_rows: u128) -> bool {
    10 * padded_rows_packed < 9 * padded_rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Decoding 1 row of 8 KV heads against 64 Ki keys in blocks of 128.
    fn decode() -> SplitQuery {
        SplitQuery {
            tiles: 8,
            m_blocks: 1,
            kv_blocks: 512,
            kv_head_bytes: 32 << 20,
            dense: true,
            sms: NonZeroU32::new(132).unwrap(),
            l2_bytes: 50 << 20,
        }
    }

    #[test]
    fn decoding_fills_the_device() {
        // 8 tiles leave room for 16 parts each in one wave: 128 CTAs of 32 blocks, 37 with their costs. 14 parts
        // (37 blocks) take 42, 13 parts (40 blocks) take 45, more than 37 / 0.85 = 43.5.
        assert_eq!(num_splits(&decode()), 14);
    }

    #[test]
    fn enough_tiles_stay_whole() {
        assert_eq!(num_splits(&SplitQuery { tiles: 106, ..decode() }), 1);
        assert!(num_splits(&SplitQuery { tiles: 60, ..decode() }) > 1);
        let sms = NonZeroU32::new(5).unwrap();
        assert_eq!(num_splits(&SplitQuery { tiles: 4, kv_blocks: 5, sms, dense: false, ..decode() }), 1);
        assert_eq!(num_splits(&SplitQuery { tiles: 4, sms, dense: false, ..decode() }), 1);
    }

    #[test]
    fn few_blocks_stay_whole() {
        // In one wave, 5 blocks take 6 whole and 1 + 1 + 4 in 5 parts; 8 take 9 whole and 2 + 1 + 4 in 4.
        assert_eq!(num_splits(&SplitQuery { kv_blocks: 5, ..decode() }), 1);
        assert_eq!(num_splits(&SplitQuery { kv_blocks: 8, ..decode() }), 4);
        assert_eq!(num_splits(&SplitQuery { tiles: 0, ..decode() }), 1);
        assert_eq!(num_splits(&SplitQuery { kv_blocks: 0, ..decode() }), 1);
    }

    #[test]
    fn long_heads_are_cut_to_fit_l2() {
        let long = SplitQuery { tiles: 4096, m_blocks: 4096, kv_head_bytes: 256 << 20, ..decode() };
        assert_eq!(num_splits(&long), 6);
        assert_eq!(num_splits(&SplitQuery { l2_bytes: 1, ..long }), 128);
        assert_eq!(num_splits(&SplitQuery { l2_bytes: 0, kv_blocks: 9, ..long }), 9);
        assert_eq!(num_splits(&SplitQuery { dense: false, ..long }), 1);
        assert_eq!(num_splits(&SplitQuery { m_blocks: 263, ..long }), 1);
        assert_eq!(num_splits(&SplitQuery { kv_head_bytes: 50 << 20, ..long }), 1);
    }

    #[test]
    fn packing_needs_a_tenth() {
        // 16 query heads of 1 row on one KV head: 16 tiles of 64 rows, or one.
        assert!(packs_gqa(64, 16 * 64));
        assert!(!packs_gqa(90, 100));
        assert!(packs_gqa(89, 100));
        assert!(!packs_gqa(0, 0));
    }

    proptest! {
        /// Splitting makes up for its cost, and no part is empty in the longest tile.
        #[test]
        fn splits_help(tiles in 0u64..400, kv_blocks in 0u32..600, sms in 1u32..200) {
            let sms = NonZeroU32::new(sms).unwrap();
            let query = SplitQuery { tiles, kv_blocks, sms, ..decode() };
            let splits = num_splits(&query);
            prop_assert!(splits >= 1 && splits <= kv_blocks.max(1) && splits <= 128);
            // Waves of whole CTAs, counted one wave at a time.
            let time = |splits: u32| {
                let (mut left, mut time) = (tiles * u64::from(splits), 0);
                while left > 0 {
                    left = left.saturating_sub(sms.get().into());
                    time += u64::from(kv_blocks.div_ceil(splits)) + TILE_COST;
                }
                time
            };
            prop_assert!(splits == 1 || time(splits) + COMBINE_COST <= time(1));
        }
    }
}
