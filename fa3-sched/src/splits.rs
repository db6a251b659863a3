//! When to split the keys and when to pack query heads.

use std::num::NonZeroU32;

use crate::makespan::TILE_COST;

/// The most parts, as in FlashAttention-3: whoever combines them reads them all.
const MOST_SPLITS: u32 = 128;

/// Tiles that visit equally many KV blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileGroup {
    /// KV blocks of each.
    pub blocks: u32,
    /// How many tiles there are, without splits.
    pub tiles: u64,
}

/// What the number of splits depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitQuery<'a> {
    /// All tiles, those with the most blocks first.
    pub groups: &'a [TileGroup],
    /// Tiles of one head of the longest sequence.
    pub m_blocks: u32,
    /// K and V of one head of the longest sequence, in bytes.
    pub kv_head_bytes: u64,
    /// K and V of one block, in bytes.
    pub block_bytes: u64,
    /// O and LSE of one part of all tiles in fp32, in bytes.
    pub partial_bytes: u64,
    /// Whether every tile visits all keys.
    pub dense: bool,
    /// Streaming multiprocessors.
    pub sms: NonZeroU32,
    /// L2 cache, in bytes.
    pub l2_bytes: u64,
}

/// What the start of a second kernel costs, which combines the parts, in KV blocks. Not measured; with it no
/// range of up to 5 blocks is split, where FlashAttention-3 stops at 4.
const COMBINE_COST: u128 = 4;

/// In how many parts to compute each KV range.
///
/// A head whose K and V exceed L2, read by at least two waves of its own tiles, is cut into parts that fit L2.
/// Otherwise the time of s parts is modelled, in KV blocks, by what no schedule of theirs can beat (all of a
/// tile's being as long as its longest) and, if s > 1, by what combining them costs:
///
/// ```text
/// max(Σ (blocks + s) / SMs, max over tiles of ⌈n · s / SMs⌉ · (⌈blocks / s⌉ + 1)) + combine(s)
/// combine(s) = 4 + 2 · s · partial_bytes / (SMs · block_bytes)
/// ```
///
/// The first is the SMs' even share; the second, where n counts the tiles with at least as many blocks, the waves
/// of long parts, of which the last may leave most SMs without work. The 1 a part is [`TILE_COST`]. Parts are
/// combined by a kernel that takes 4 blocks' time to start; they are written and read at the speed at which all
/// SMs together load blocks. The smallest s within a factor 0.85 of the best is taken, because the model is not
/// finer than that.
///
/// There is one number for the whole batch: beside one long sequence, many short ones are split as well, into
/// parts that may be empty, and the model counts what that costs.
pub fn num_splits(query: &SplitQuery<'_>) -> u32 {
    let SplitQuery { groups, m_blocks, kv_head_bytes, dense, sms, l2_bytes, .. } = *query;
    let longest = groups.iter().map(|group| group.blocks).max().unwrap_or(0);
    let most = MOST_SPLITS.min(longest).max(1);
    let sweeps = dense && u64::from(m_blocks) >= 2 * u64::from(sms.get());
    if sweeps && kv_head_bytes > l2_bytes {
        return kv_head_bytes.div_ceil(l2_bytes.max(1)).clamp(1, most.into()) as u32;
    }
    let close = |time, best| 85 * time <= 100 * best;
    // Parts only add to the even share, so that nothing is faster than that of whole tiles.
    if close(query.time(1), query.even_share(1)) {
        return 1;
    }
    let best = (1..=most).map(|splits| query.time(splits)).min().unwrap_or(0);
    (1..=most).find(|&splits| close(query.time(splits), best)).unwrap_or(1)
}

impl SplitQuery<'_> {
    /// The modelled time of `splits` parts.
    fn time(&self, splits: u32) -> u128 {
        self.waves(splits).max(self.even_share(splits)) + self.combine(splits)
    }

    fn waves(&self, splits: u32) -> u128 {
        let mut parts = 0;
        let waves = |group: &TileGroup| {
            parts += u128::from(group.tiles) * u128::from(splits);
            self.share(parts) * u128::from(u64::from(group.blocks.div_ceil(splits)) + TILE_COST)
        };
        self.groups.iter().map(waves).max().unwrap_or(0)
    }

    fn even_share(&self, splits: u32) -> u128 {
        let parts_cost = u64::from(splits) * TILE_COST;
        let cost =
            |group: &TileGroup| u128::from(group.tiles) * u128::from(u64::from(group.blocks) + parts_cost);
        self.share(self.groups.iter().map(cost).sum())
    }

    fn combine(&self, splits: u32) -> u128 {
        let bytes = 2 * u128::from(splits) * u128::from(self.partial_bytes);
        if splits == 1 {
            0
        } else {
            COMBINE_COST + self.share(bytes.div_ceil(self.block_bytes.max(1).into()))
        }
    }

    /// Of `amount`, what falls to the SM that has most.
    fn share(&self, amount: u128) -> u128 {
        amount.div_ceil(self.sms.get().into())
    }
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
    use crate::Makespan;
    use proptest::prelude::*;

    fn sms(n: u32) -> NonZeroU32 {
        NonZeroU32::new(n).unwrap()
    }

    /// Heads that fit L2, and parts of few rows.
    fn query(groups: &[TileGroup], n: u32) -> SplitQuery<'_> {
        SplitQuery {
            groups,
            m_blocks: 1,
            kv_head_bytes: 32 << 20,
            block_bytes: 64 << 10,
            partial_bytes: 0,
            dense: true,
            sms: sms(n),
            l2_bytes: 50 << 20,
        }
    }

    fn splits(groups: &[TileGroup], n: u32) -> u32 {
        num_splits(&query(groups, n))
    }

    fn equal(tiles: u64, blocks: u32, n: u32) -> u32 {
        splits(&[TileGroup { blocks, tiles }], n)
    }

    /// The makespan of the parts, longest tiles first, with the start of the kernel that combines them.
    fn simulated(groups: &[TileGroup], splits: u32, n: u32) -> u64 {
        let part = |blocks: u32, i| u64::from(blocks / splits + u32::from(i < blocks % splits)) + TILE_COST;
        let tile = |group: &TileGroup| (0..splits).map(|i| part(group.blocks, i)).collect::<Vec<_>>();
        let costs: Vec<u64> =
            groups.iter().flat_map(|group| tile(group).repeat(group.tiles as usize)).collect();
        Makespan::greedy(&costs, sms(n)).length() + if splits > 1 { COMBINE_COST as u64 } else { 0 }
    }

    #[test]
    fn decoding_fills_the_device() {
        // 8 tiles leave room for 16 parts each in one wave: 128 CTAs of 32 blocks, 37 with their costs. 14 parts
        // (37 blocks) take 42, 13 parts (40 blocks) take 45, more than 37 / 0.85 = 43.5.
        assert_eq!(equal(8, 512, 132), 14);
        assert!(equal(60, 512, 132) > 1);
    }

    #[test]
    fn whole_waves_stay_whole() {
        for tiles in [112, 120, 132, 256, 264] {
            assert_eq!(equal(tiles, 512, 132), 1, "{tiles} tiles");
        }
        assert_eq!(equal(5, 5, 5), 1);
        // From 7 waves on the last one is less than 15 % of the time.
        assert_eq!(equal(6 * 132 + 1, 512, 132), 1);
    }

    /// Decoding 17, 20 and 24 sequences of 32 Ki keys with 8 KV heads: the second wave has 4, 28 and 60 tiles.
    /// By hand: ⌈136 · 4 / 132⌉ = 5 waves of parts of 64 + 1 blocks take 329 with their combination; 160 tiles in
    /// 3 parts take 4 waves of 86 + 1 (but for two thirds of the parts, which have a block less); and so on.
    #[test]
    fn an_almost_empty_last_wave_is_spread() {
        for (tiles, parts, time) in [(136, 4, 5 * 65 + 4), (160, 3, 4 * 87 + 4), (192, 2, 3 * 129 + 4)] {
            assert_eq!(equal(tiles, 256, 132), parts, "{tiles} tiles");
            let group = [TileGroup { blocks: 256, tiles }];
            assert_eq!(simulated(&group, 1, 132), 514);
            assert_eq!(query(&group, 132).time(parts), time);
            assert!(u128::from(simulated(&group, parts, 132)) <= time);
        }
        // Lengths that differ a little change nothing.
        let groups = [TileGroup { blocks: 257, tiles: 60 }, TileGroup { blocks: 256, tiles: 76 }];
        assert_eq!(splits(&groups, 132), 4);
    }

    #[test]
    fn a_tile_far_longer_than_the_others_is_split() {
        let groups = [TileGroup { blocks: 1000, tiles: 1 }, TileGroup { blocks: 100, tiles: 131 }];
        let parts = splits(&groups, 132);
        assert!(parts > 1 && 2 * simulated(&groups, parts, 132) < simulated(&groups, 1, 132), "{parts}");
        // Beside enough short ones to keep all SMs busy it stays whole.
        let groups = [TileGroup { blocks: 1000, tiles: 1 }, TileGroup { blocks: 100, tiles: 1320 }];
        assert_eq!(splits(&groups, 132), 1);
    }

    #[test]
    fn many_rows_are_dear_to_combine() {
        // In blocks of 64 KiB, 132 of them at a time: two parts of 8448 blocks are read and written in 256.
        let groups = [TileGroup { blocks: 256, tiles: 136 }];
        let tall = SplitQuery { partial_bytes: 8448 << 16, ..query(&groups, 132) };
        assert_eq!((query(&groups, 132).combine(2), tall.combine(2), tall.combine(1)), (4, 4 + 256, 0));
        assert_eq!(num_splits(&tall), 1);
    }

    #[test]
    fn few_blocks_stay_whole() {
        // In one wave, 5 blocks take 6 whole and 1 + 1 + 4 in 5 parts; 8 take 9 whole and 2 + 1 + 4 in 4.
        assert_eq!(equal(8, 5, 132), 1);
        assert_eq!(equal(8, 8, 132), 4);
        assert_eq!(equal(0, 8, 132), 1);
        assert_eq!(equal(8, 0, 132), 1);
        assert_eq!(splits(&[], 132), 1);
        assert_eq!(equal(u64::MAX, u32::MAX, 1), 1);
    }

    #[test]
    fn long_heads_are_cut_to_fit_l2() {
        let group = |blocks| [TileGroup { blocks, tiles: 4096 }];
        let (groups, short) = (group(512), group(9));
        let long = SplitQuery { m_blocks: 4096, kv_head_bytes: 256 << 20, ..query(&groups, 132) };
        assert_eq!(num_splits(&long), 6);
        assert_eq!(num_splits(&SplitQuery { l2_bytes: 1, ..long }), 128);
        assert_eq!(num_splits(&SplitQuery { l2_bytes: 0, groups: &short, ..long }), 9);
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

    prop_compose! {
        fn groups()(counts in proptest::collection::btree_map(0u32..300, 1u64..80, 0..8)) -> Vec<TileGroup> {
            counts.into_iter().rev().map(|(blocks, tiles)| TileGroup { blocks, tiles }).collect()
        }
    }

    proptest! {
        /// Splitting equal tiles makes up for its cost, and no part is empty.
        #[test]
        fn splits_help(tiles in 1u64..400, blocks in 0u32..600, n in 1u32..200) {
            let group = [TileGroup { blocks, tiles }];
            let parts = splits(&group, n);
            prop_assert!(parts >= 1 && parts <= blocks.max(1) && parts <= 128);
            prop_assert!(simulated(&group, parts, n) <= simulated(&group, 1, n));
        }

        /// No schedule beats the model while tiles are whole. Scheduled longest first, whole or in parts, they
        /// exceed it by less than another longest part, and by nothing where all are equal.
        #[test]
        fn the_model_is_close(groups in groups(), n in 1u32..200, splits in 1u32..9) {
            let [whole, parts] = [1, splits].map(|s| (simulated(&groups, s, n), query(&groups, n).time(s) as u64));
            prop_assert!(whole.1 <= whole.0);
            let longest = groups.first().map_or(0, |group| u64::from(group.blocks.div_ceil(splits)) + TILE_COST);
            prop_assert!(parts.0 <= parts.1 + longest);
            prop_assert!(groups.len() != 1 || parts.0 <= parts.1);
        }
    }
}
