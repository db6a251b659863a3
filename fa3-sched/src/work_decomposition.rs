//! Split-KV work decomposition (Stream-K): CTAs get equal shares of the KV blocks of all sequences, whatever the
//! lengths.
//!
//! | here | Stream-K | FlashAttention |
//! |---|---|---|
//! | work unit | output tile | work tile: `m_block`, head, batch, with all KV blocks that it visits |
//! | iteration | iteration | KV block (`n_block`); `extra` more for the start of a unit |
//! | share | share of a CTA | |
//! | split | part of a tile in a CTA | split (`n_split_idx`) |
//! | partial result | partial sums | `O_partial`, `LSE_partial` |
//! | reduction | fix-up | combine kernel |
//!
//! The iteration space is the iterations of all units, by sequence, head and tile. CTA c takes iterations c · share up
//! to (c + 1) · share:
//!
//! ```text
//! units   ├─ 0 ───┼─ 1 ───────────────────┼─ 2 ───┼─ 3 ───┤
//! CTAs    ├─ 0 ─────────┼─ 1 ─────────┼─ 2 ─────────┼─ 3 ─┤
//! ```
//!
//! A CTA thus has at most the last split of a unit, then whole units, then the first split of another unit: at most two
//! partial results. [`WorkDecomposition::partial_index`] numbers them. The splits of a unit that begins in CTA c have
//! the numbers 2c + 1, 2 (c + 1), 2 (c + 2), ...
//!
//! Splits have to be reduced. To avoid that where whole units balance nearly as well
//! ([`WorkDecomposition::or_whole_units`]), each unit counts as long as the longest one, and all CTAs take equally many
//! units ([`WorkDecomposition::iteration_space`]).
//!
//! Splits may have a fixed size instead, from a unit's first block on ([`WorkDecomposition::fixed_size`]). A CTA takes
//! the splits that begin in its share. Splits then follow from a sequence's lengths alone.
//!
//! Where all sequences have equally many iterations, the host computes the iteration space
//! ([`WorkDecomposition::equal_sequences`]), and a CTA finds its first sequence by a division.
//!
//! The query heads that one tile packs (PackGQA) count as one head here. Heads of a group read the same keys, and
//! several of them can be co-scheduled ([`WorkDecomposition::co_scheduled`]): they form one unit, and each share has a
//! CTA for each of the heads. The CTAs of a share read the same keys at the same time, so that HBM delivers the keys
//! once. CTA c computes a unit's head c / shares in share c mod shares, so that the splits of a head's tile are in
//! neighbouring CTAs here, too.

mod equal_sequences;

use crate::packed::Cut;
use crate::{FastDiv, Int, SeqLens};

pub use equal_sequences::EqualSequences;

/// The numbers of a launch that determine each CTA's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkDecomposition<T> {
    /// Heads that have units. A unit's co-scheduled heads count as one.
    heads: T,
    /// Number of shares.
    shares: FastDiv<T>,
    /// Co-scheduled heads per unit, if there are several.
    co_scheduled: Option<T>,
    extra: T,
    /// Iterations by which a share may grow if that avoids splits.
    reduction_cost: Option<T>,
    cut: Cut<T>,
    /// Blocks per split, if splits have a fixed size.
    split_blocks: Option<FastDiv<T>>,
    /// The iteration space, if all sequences have equally many iterations.
    equal: Option<EqualSequences<T>>,
}

/// The units (work tiles) of a sequence, which are equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkUnits<T> {
    /// Tiles per head.
    pub tiles: T,
    /// Number of blocks of the longest tile. The other tiles count the same number, and visit fewer.
    pub blocks: T,
    /// Iterations per unit.
    pub iterations: T,
    /// Number of units, over all heads.
    pub count: T,
}

/// The iterations of all units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IterationSpace<T> {
    /// Iterations per share.
    pub share: T,
    /// Iterations of all units together.
    pub total: T,
    /// The fewest iterations of a unit: as many as the longest unit has if shares consist of whole units, otherwise 0.
    pub least: T,
}

/// The part of a unit that one CTA computes. It may be the whole unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split<T> {
    /// The tile.
    pub m_block: T,
    /// The head, or the number of its co-scheduled heads' unit ([`WorkDecomposition::head`]).
    pub head: T,
    /// The first block, counted from the unit's first block.
    pub first: T,
    /// One past the last block of the part.
    pub end: T,
    /// Blocks of the unit after this split.
    pub left: T,
    /// Iterations of this split.
    pub iterations: T,
}

impl WorkDecomposition<u32> {
    /// Equal shares, for `ctas` CTAs, of the units of `heads` heads. A unit's start counts as `extra` blocks: 0, or 1
    /// so that a unit without blocks is not split.
    ///
    /// # Panics
    /// If there are no CTAs, or `extra` is above 1.
    pub fn new(heads: u32, ctas: u32, extra: u32, cut: Cut<u32>) -> WorkDecomposition<u32> {
        assert!(extra <= 1, "a start counts as {extra} blocks");
        WorkDecomposition {
            heads,
            shares: FastDiv::new(ctas),
            co_scheduled: None,
            extra,
            reduction_cost: None,
            cut,
            split_blocks: None,
            equal: None,
        }
    }

    /// Makes a unit of each `count` successive heads. There are `count` times as many heads and CTAs as `self` says.
    #[must_use]
    pub fn co_scheduled(self, count: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { co_scheduled: Some(count), ..self }
    }

    /// These shares, or shares of whole units if a share of whole units has at most `reduction_cost` iterations more.
    #[must_use]
    pub fn or_whole_units(self, reduction_cost: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { reduction_cost: Some(reduction_cost), ..self }
    }

    /// These shares with splits of `blocks` blocks, each of which one CTA computes. Starts are free.
    ///
    /// # Panics
    /// If `blocks` is 0.
    #[must_use]
    pub fn fixed_size(self, blocks: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { extra: 0, reduction_cost: None, split_blocks: Some(FastDiv::new(blocks)), ..self }
    }

    /// These shares of `count` sequences that all have these rows and lengths. The iterations of all sequences must be
    /// fewer than 2³¹.
    #[must_use]
    pub fn equal_sequences(self, count: u32, rows: u32, len: SeqLens<u32>) -> WorkDecomposition<u32> {
        let units = self.units(rows, len);
        let space = self.iteration_space(count * units.all(), || [count * units.count, units.iterations]);
        let iterations = FastDiv::new(units.all().max(1));
        WorkDecomposition { equal: Some(EqualSequences { space, iterations }), ..self }
    }
}

impl<T> WorkDecomposition<T> {
    /// Applies `f` to each number of this value, by name, in a fixed order.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> WorkDecomposition<U> {
        WorkDecomposition {
            heads: f("share_heads", self.heads),
            shares: self.shares.map_named("share_ctas", f),
            co_scheduled: self.co_scheduled.map(|count| f("share_twins", count)),
            extra: f("share_extra", self.extra),
            reduction_cost: self.reduction_cost.map(|cost| f("share_slack", cost)),
            cut: self.cut.map_named(&mut |name, number| f(&format!("cut_{name}"), number)),
            split_blocks: self.split_blocks.map(|blocks| blocks.map_named("share_piece", f)),
            equal: self.equal.map(|equal| equal.map_named(f)),
        }
    }
}

impl<T: Int> WorkDecomposition<T> {
    /// Number of heads, with each co-scheduled head counted.
    pub fn heads(&self) -> T {
        self.co_scheduled.map_or(self.heads, |count| self.heads * count)
    }

    /// The number of the share of CTA `cta`.
    pub fn number(&self, cta: T) -> T {
        self.co_scheduled.map_or(cta, |_| self.shares.div_rem(cta).1)
    }

    /// The head that CTA `cta` computes in the units of `head`: one of its co-scheduled heads, or `head` itself.
    pub fn head(&self, head: T, cta: T) -> T {
        self.co_scheduled.map_or(head, |count| head * count + self.shares.quotient(cta))
    }

    /// The units of a sequence with `rows` rows of O and the lengths `len`.
    pub fn units(&self, rows: T, len: SeqLens<T>) -> WorkUnits<T> {
        let (tiles, blocks) = (self.cut.blocks(rows), self.cut.most(len));
        let iterations = (blocks + self.extra).at_least(rows.lit(1));
        WorkUnits { tiles, blocks, iterations, count: tiles * self.heads }
    }

    /// The iteration space, if all sequences have equally many iterations.
    pub fn equal(&self) -> Option<EqualSequences<T>> {
        self.equal
    }

    /// The iteration space of units that have `total` iterations. `units` returns the number of units and the
    /// iterations of the longest one; it is called only where shares may consist of whole units.
    pub fn iteration_space(&self, total: T, units: impl FnOnce() -> [T; 2]) -> IterationSpace<T> {
        let [zero, one] = [0, 1].map(|number| total.lit(number));
        let equal = IterationSpace { share: self.shares.div_ceil(total).at_least(one), total, least: zero };
        let Some(reduction_cost) = self.reduction_cost else { return equal };
        let [units, longest] = units();
        let each = self.shares.div_ceil(units);
        // Divisions are exact below 2²⁴.
        let most = (equal.share + reduction_cost).at_most(total.lit((1 << 24) - 1));
        let is_whole = each.le(most.div(longest.at_least(one)));
        let if_whole = |number| T::select(is_whole, number, zero);
        IterationSpace {
            share: T::select(is_whole, if_whole(each) * longest, equal.share),
            total: T::select(is_whole, if_whole(units) * longest, total),
            least: if_whole(longest),
        }
    }

    /// Number of splits of each unit, at least one; `None` unless splits have a fixed size.
    pub fn num_splits(&self, units: &WorkUnits<T>) -> Option<T> {
        self.split_blocks.map(|size| size.div_ceil(units.blocks).at_least(units.blocks.lit(1)))
    }

    /// The first iteration where a split may begin, `from` or later: with splits of a fixed size, the beginning of the
    /// next split. `from` lies in the sequence with these units, and the result may be one past the sequence.
    pub fn begin(&self, units: &WorkUnits<T>, from: T) -> T {
        let Some(size) = self.split_blocks else { return from };
        let first = from.div(units.iterations) * units.iterations;
        let within = size.div_ceil(from.sub_sat(first)) * size.divisor();
        first + within.at_most(units.iterations)
    }

    /// The split that begins at iteration `from` of the sequence with these units. It has at most `most` iterations,
    /// unless splits have a fixed size.
    pub fn split(&self, units: &WorkUnits<T>, from: T, most: T) -> Split<T> {
        let most = self.split_blocks.map_or(most, FastDiv::divisor);
        let unit = from.div(units.iterations);
        let within = from.sub_sat(unit * units.iterations);
        let head = unit.div(units.tiles.at_least(from.lit(1)));
        let iterations = units.iterations.sub_sat(within).at_most(most);
        let end = (within + iterations).sub_sat(self.extra).at_most(units.blocks);
        Split {
            m_block: unit.sub_sat(head * units.tiles),
            head,
            first: within.sub_sat(self.extra).at_most(end),
            end,
            left: units.blocks.sub_sat(end),
            iterations,
        }
    }

    /// The index of the partial result of a split that CTA `cta` computes, plus 1; 0 if the split is the whole unit.
    /// With a fixed size, it is the split's number within its unit.
    pub fn partial_index(&self, split: &Split<T>, cta: T) -> T {
        let number = self.split_blocks.map(|size| size.quotient(split.first));
        let (zero, one) = (cta.lit(0), cta.lit(1));
        if let Some(number) = number {
            let is_whole = (split.first + split.left).eq(zero);
            return T::select(is_whole, zero, number + one);
        }
        let two = cta + cta;
        let of_first = T::select(split.left.eq(zero), zero, two + one + one);
        T::select(split.first.eq(zero), of_first, two + one)
    }
}

impl<T: Int> WorkUnits<T> {
    /// These units in an iteration space: each has at least [`IterationSpace::least`] iterations.
    #[must_use]
    pub fn on(self, space: &IterationSpace<T>) -> WorkUnits<T> {
        WorkUnits { iterations: self.iterations.at_least(space.least), ..self }
    }

    /// Iterations of all of these units together.
    pub fn all(&self) -> T {
        self.count * self.iterations
    }
}

impl<T: Int> Split<T> {
    /// The number of the unit's splits, if this split is the first one and others follow; otherwise 0. The other splits
    /// take whole shares of `share` iterations, or end the unit.
    pub fn splits(&self, share: T) -> T {
        let (zero, one) = (share.lit(0), share.lit(1));
        let splits = one + (self.left + share).sub_sat(one).div(share);
        let goes_on = T::select(self.left.eq(zero), zero, splits);
        // If a share ends right after a unit's start, it has no blocks of the unit, whose first split is in the next
        // share.
        let begins = T::select(self.end.eq(zero), zero, goes_on);
        T::select(self.first.eq(zero), begins, zero)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use fa3_types::Mask;
    use proptest::prelude::*;

    use super::*;
    use crate::Tiling;
    use crate::checked::Checked;

    /// A work tile: sequence, head, tile.
    type Unit = (usize, u64, u64);

    type OfKernel = WorkDecomposition<Checked>;

    /// A decomposition as a kernel computes it.
    fn checked(shares: WorkDecomposition<u32>) -> OfKernel {
        shares.map_named(&mut |_, number| Checked::from(number))
    }

    /// The units of sequences of these lengths.
    fn units_of(shares: &OfKernel, lengths: &[(u32, u32)]) -> Vec<WorkUnits<Checked>> {
        let of = |&(q, k): &(u32, u32)| shares.units(q.into(), SeqLens { q: q.into(), k: k.into() });
        lengths.iter().map(of).collect()
    }

    /// Each unit, with the units of its sequence.
    fn each<'u>(shares: &OfKernel, units: &'u [WorkUnits<Checked>]) -> Vec<(Unit, &'u WorkUnits<Checked>)> {
        let heads = shares.heads().0;
        let of = |(sequence, of): (usize, &'u WorkUnits<Checked>)| {
            let tiles = (0..heads).flat_map(|head| (0..of.tiles.0).map(move |tile| (head, tile)));
            tiles.map(move |(head, tile)| ((sequence, head, tile), of))
        };
        units.iter().enumerate().flat_map(of).collect()
    }

    fn space(shares: &OfKernel, units: &[WorkUnits<Checked>]) -> IterationSpace<Checked> {
        let sum = |of: &dyn Fn(&WorkUnits<Checked>) -> u64| Checked(units.iter().map(of).sum::<u64>());
        let longest = units.iter().map(|units| units.iterations.0).max().unwrap_or(0);
        let units = || [sum(&|units| units.count.0), Checked(longest)];
        shares.iteration_space(sum(&|units| units.all().0), units)
    }

    fn mask() -> impl Strategy<Value = Mask> {
        prop_oneof![Just(Mask::None), Just(Mask::Causal), Just(Mask::window(Some(90), Some(7)))]
    }

    /// The splits of a CTA, with the indices of their partial results and the number of splits that they announce.
    fn walk(
        shares: &OfKernel,
        units: &[WorkUnits<Checked>],
        cta: u32,
    ) -> Vec<(Unit, Split<Checked>, u64, u64)> {
        let space = space(shares, units);
        let units: Vec<_> = units.iter().map(|units| units.on(&space)).collect();
        let (share, total, number) = (space.share, space.total.0, shares.number(cta.into()).0);
        let (mut place, end) = (number * share.0, ((number + 1) * share.0).min(total));
        let (mut sequence, mut first, mut splits) = (0, 0, Vec::new());
        let mut begins = false;
        while place < end {
            while first + units[sequence].all().0 <= place {
                first += units[sequence].all().0;
                sequence += 1;
            }
            if !begins {
                begins = true;
                place = first + shares.begin(&units[sequence], Checked(place - first)).0;
                continue;
            }
            let split = shares.split(&units[sequence], Checked(place - first), Checked(end - place));
            let unit = (sequence, shares.head(split.head, cta.into()).0, split.m_block.0);
            let (index, count) = (shares.partial_index(&split, cta.into()).0, split.splits(share).0);
            splits.push((unit, split, index, count));
            place += split.iterations.0;
        }
        splits
    }

    proptest! {
        /// Each block of each work tile is in one split. The indices of a tile's partial results follow from its first
        /// CTA, and no two results share an index.
        #[test]
        fn shares_are_all_blocks_of_all_units(
            lengths in proptest::collection::vec((0_u32..80, 0_u32..900), 1..8), heads in 1_u32..4,
            ctas in 1_u32..40, extra in 0_u32..2, reduction_cost in prop_oneof![Just(None), (0_u32..9).prop_map(Some)],
            together in prop_oneof![Just(None), (2_u32..4).prop_map(Some)], mask in mask(),
        ) {
            let (cut, tiling) = (Cut::new(16, 32, mask), Tiling::new(16, 32, 1, mask));
            let shares = WorkDecomposition::new(heads, ctas, extra, cut);
            let shares = together.map_or(shares, |count| shares.co_scheduled(count));
            let shares = checked(reduction_cost.map_or(shares, |cost| shares.or_whole_units(cost)));
            prop_assert_eq!(shares.heads().0, u64::from(heads * together.unwrap_or(1)));
            let units = units_of(&shares, &lengths);
            let (mut blocks, mut whole, mut results) = (BTreeMap::<Unit, u64>::new(), Vec::new(), BTreeMap::new());
            let mut announced = BTreeMap::new();
            let mut most = 0;
            for cta in 0..ctas * together.unwrap_or(1) {
                let splits = walk(&shares, &units, cta);
                most = most.max(splits.iter().map(|(_, split, ..)| split.iterations.0).sum::<u64>());
                for (unit, split, index, count) in splits {
                    // Blocks come in order.
                    let done = blocks.entry(unit).or_default();
                    prop_assert_eq!(*done, split.first.0);
                    *done = split.end.0;
                    if index == 0 {
                        whole.push(unit);
                    } else if split.end.0 > split.first.0 {
                        prop_assert!(index == 1 + 2 * u64::from(cta) || index == 2 + 2 * u64::from(cta));
                        prop_assert!(results.insert(index - 1, (unit, split.first.0)).is_none());
                    }
                    if count > 0 {
                        prop_assert!(announced.insert(unit, (u64::from(cta), count)).is_none());
                    }
                }
            }
            let total: u64 = units.iter().map(|units| units.all().0).sum();
            prop_assert!(most <= total.div_ceil(ctas.into()).max(1) + u64::from(reduction_cost.unwrap_or(0)));
            prop_assert!(space(&shares, &units).least.0 == 0 || announced.is_empty());
            for (unit, of) in each(&shares, &units) {
                let (q, k) = lengths[unit.0];
                let visits = tiling.kv_range(unit.2 as u32, SeqLens { q, k }).blocks();
                prop_assert!(u64::from(visits) <= of.blocks.0, "a tile of {visits} blocks, {of:?}");
                prop_assert_eq!(blocks.remove(&unit), Some(of.blocks.0), "{:?}", unit);
                if whole.contains(&unit) {
                    prop_assert!(!announced.contains_key(&unit));
                    continue;
                }
                let (cta, count) = announced[&unit];
                let indices = std::iter::once(2 * cta + 1).chain((1..count).map(|split| 2 * (cta + split)));
                let splits: Vec<_> = indices.map(|index| results.remove(&index)).collect();
                prop_assert!(splits.iter().all(|split| split.is_some_and(|(of, _)| of == unit)), "{splits:?}");
                prop_assert!(splits.is_sorted_by_key(|split| split.map(|(_, first)| first)));
            }
            prop_assert!(blocks.is_empty() && results.is_empty(), "{:?} {:?}", blocks, results);
        }

        /// Units of equal length stay whole if that costs at most the reduction, and not otherwise.
        #[test]
        fn units_are_whole_where_they_balance(units in 1_u32..400, iterations in 1_u32..90, ctas in 1_u32..140, cost in 0_u32..9) {
            let shares = checked(WorkDecomposition::new(1, ctas, 0, Cut::new(16, 32, Mask::None)).or_whole_units(cost));
            let space = shares.iteration_space((units * iterations).into(), || [units.into(), iterations.into()]);
            let (whole, equal) = (units.div_ceil(ctas) * iterations, (units * iterations).div_ceil(ctas));
            let is_whole = whole <= equal + cost;
            prop_assert_eq!(space.share.0, u64::from(if is_whole { whole } else { equal }));
            prop_assert_eq!((space.least.0 > 0, space.total.0), (is_whole, u64::from(units * iterations)));
        }

        /// Equal sequences have the iteration space of any sequences of these lengths, and divisions find them.
        #[test]
        fn equal_sequences_are_found_by_division(
            count in 1_u32..9, (rows, k) in (0_u32..40, 0_u32..900), heads in 1_u32..4, ctas in 1_u32..40,
            extra in 0_u32..2, cost in prop_oneof![Just(None), (0_u32..9).prop_map(Some)],
            size in prop_oneof![Just(None), (1_u32..12).prop_map(Some)],
        ) {
            let shares = WorkDecomposition::new(heads, ctas, extra, Cut::new(16, 32, Mask::None));
            let shares = cost.map_or(shares, |cost| shares.or_whole_units(cost));
            let shares = size.map_or(shares, |size| shares.fixed_size(size));
            let equal = checked(shares.equal_sequences(count, rows, SeqLens { q: rows, k })).equal().unwrap();
            let shares = checked(shares);
            let units = units_of(&shares, &vec![(rows, k); count as usize]);
            let of_any = space(&shares, &units);
            prop_assert_eq!(equal.space, of_any);
            let all = units.first().map_or(0, |units| units.all().0);
            for place in (0..ctas).map(|cta| u64::from(cta) * of_any.share.0).chain([of_any.total.0]) {
                let sequence = place.min(of_any.total.0).checked_div(all).unwrap_or(0);
                prop_assert_eq!(equal.sequence(Checked(place)), [sequence, sequence * all].map(Checked));
            }
        }

        /// One CTA computes each fixed-size split of each work tile: the CTA in whose share the split begins. The
        /// splits depend neither on other sequences nor on the number of CTAs.
        #[test]
        fn fixed_size_splits_are_a_sequences_own(
            lengths in proptest::collection::vec((0_u32..80, 0_u32..900), 1..8), heads in 1_u32..4,
            ctas in 1_u32..40, blocks in 1_u32..12, mask in mask(),
        ) {
            let shares = checked(WorkDecomposition::new(heads, ctas, 1, Cut::new(16, 32, mask)).fixed_size(blocks));
            let units = units_of(&shares, &lengths);
            let total = units.iter().map(|units| units.all().0).sum::<u64>();
            let mut computed = BTreeMap::<Unit, Vec<[u64; 3]>>::new();
            for cta in 0..ctas {
                let splits = walk(&shares, &units, cta);
                let iterations = splits.iter().map(|(_, split, ..)| split.iterations.0).sum::<u64>();
                prop_assert!(iterations < total.div_ceil(ctas.into()).max(1) + u64::from(blocks));
                for (unit, Split { first, end, .. }, index, _) in splits {
                    computed.entry(unit).or_default().push([first.0, end.0, index]);
                }
            }
            for (unit, of) in each(&shares, &units) {
                let (count, size) = (shares.num_splits(of).map_or(0, |count| count.0), u64::from(blocks));
                let split = |number: u64| {
                    let index = if count == 1 { 0 } else { number + 1 };
                    [number * size, ((number + 1) * size).min(of.blocks.0), index]
                };
                let expected: Vec<_> = (0..count).map(split).collect();
                prop_assert_eq!(computed.remove(&unit), Some(expected));
            }
            prop_assert!(computed.is_empty());
        }
    }
}
