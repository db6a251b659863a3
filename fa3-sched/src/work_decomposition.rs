//! Split-KV work decomposition: CTAs get equal shares of all keys, whatever the lengths (as in Stream-K).
//!
//! A unit is a work tile: one tile of query rows of one head, with the KV blocks that it visits. All units lie on one
//! line, ordered by sequence, head and tile. A unit takes one place on the line for each of its blocks, and `extra`
//! iterations for its start. CTA c takes iterations c · share up to (c + 1) · share:
//!
//! ```text
//! units   ├─ 0 ───┼─ 1 ───────────────────┼─ 2 ───┼─ 3 ───┤
//! CTAs    ├─ 0 ─────────┼─ 1 ─────────┼─ 2 ─────────┼─ 3 ─┤
//! ```
//!
//! So a CTA has at most three kinds of work: the end of a unit that began in an earlier CTA, whole units, and the
//! beginning of a unit that goes on in the next CTA. It stores at most two partial results, in the slots that
//! [`WorkDecomposition::partial_index`] gives. The parts of a unit that begins in CTA c are in slot 2c + 1, then in
//! slots 2 (c + 1), 2 (c +
//! 2), ...
//!
//! The parts have to be merged (split-KV reduction). Where whole units balance nearly as well
//! ([`WorkDecomposition::or_whole_units`]), each unit counts as long as the longest unit, and all CTAs take the same
//! number of units ([`WorkDecomposition::iteration_space`]).
//!
//! Alternatively, units are cut into pieces (splits of a fixed number of blocks), from their first block on
//! ([`WorkDecomposition::fixed_size`]). A CTA takes the pieces that begin in its share. The parts of a unit then follow
//! from its sequence's lengths alone.
//!
//! Where the query heads of a group take several tiles, these tiles read the same keys. Such tiles are co_scheduled
//! ([`WorkDecomposition::co_scheduled`]): they have one unit on the line, and each share has one CTA for each twin.
//! These CTAs read the same keys at the same time, so that HBM delivers the keys once. CTA c has twin c / shares and
//! share c mod shares, so that the parts of a unit are in neighbouring CTAs here as well.

use crate::packed::Cut;
use crate::{FastDiv, Int, SeqLens};

/// The numbers of a launch that determine each CTA's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkDecomposition<T> {
    /// Number of heads on the line. Twins count once.
    heads: T,
    /// Number of shares: the number of CTAs, divided by the number of co_scheduled.
    count: FastDiv<T>,
    /// Number of heads that have the same place on the line (co_scheduled), if there are several.
    co_scheduled: Option<T>,
    extra: T,
    /// Number of iterations by which a share may grow if that avoids splitting units.
    reduction_cost: Option<T>,
    cut: Cut<T>,
    /// Blocks per piece, if units are cut into pieces.
    piece: Option<FastDiv<T>>,
}

/// The units (work tiles) of a sequence, which are equally long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkUnits<T> {
    /// Tiles per head.
    pub tiles: T,
    /// Number of blocks of the longest tile. The other tiles count the same number, and visit fewer.
    pub blocks: T,
    /// Places per unit.
    pub iterations: T,
    /// Number of units, over all heads on the line.
    pub count: T,
}

/// The layout of all units on the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IterationSpace<T> {
    /// Places per share.
    pub share: T,
    /// Places of all units together.
    pub total: T,
    /// Smallest number of iterations of a unit: the iterations of the longest unit if shares consist of whole units,
    /// otherwise
    /// 0.
    pub least: T,
}

/// A part of a unit, which one CTA computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split<T> {
    /// The tile.
    pub m_block: T,
    /// The head. With co_scheduled, the head's place on the line ([`WorkDecomposition::head`]).
    pub head: T,
    /// The first block, counted from the unit's first block.
    pub first: T,
    /// One past the last block of the part.
    pub end: T,
    /// Number of blocks of the unit after this part.
    pub left: T,
    /// Number of iterations that the part takes on the line.
    pub iterations: T,
}

impl WorkDecomposition<u32> {
    /// WorkDecomposition for `ctas` CTAs of units of `heads` heads. A unit's start counts as `extra` blocks: 0, or 1 so
    /// that a unit without blocks is not split.
    ///
    /// # Panics
    /// If there are no CTAs, or `extra` is above 1.
    pub fn new(heads: u32, ctas: u32, extra: u32, cut: Cut<u32>) -> WorkDecomposition<u32> {
        assert!(extra <= 1, "a start counts as {extra} blocks");
        WorkDecomposition {
            heads,
            count: FastDiv::new(ctas),
            co_scheduled: None,
            extra,
            reduction_cost: None,
            cut,
            piece: None,
        }
    }

    /// These shares for `co_scheduled` times as many heads and CTAs: the heads h · co_scheduled up to (h + 1) ·
    /// co_scheduled take the place of head h.
    #[must_use]
    pub fn co_scheduled(self, co_scheduled: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { co_scheduled: Some(co_scheduled), ..self }
    }

    /// These shares, or shares of whole units if a share of whole units has at most `reduction_cost` iterations more.
    #[must_use]
    pub fn or_whole_units(self, reduction_cost: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { reduction_cost: Some(reduction_cost), ..self }
    }

    /// These shares with units cut into pieces of `blocks` blocks. One CTA computes each piece. The start of a unit
    /// costs nothing.
    ///
    /// # Panics
    /// If `blocks` is 0.
    #[must_use]
    pub fn fixed_size(self, blocks: u32) -> WorkDecomposition<u32> {
        WorkDecomposition { extra: 0, reduction_cost: None, piece: Some(FastDiv::new(blocks)), ..self }
    }
}

impl<T> WorkDecomposition<T> {
    /// Applies `f` to each number of this value, by name, in a fixed order.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> WorkDecomposition<U> {
        WorkDecomposition {
            heads: f("share_heads", self.heads),
            count: self.count.map_named("share_ctas", f),
            co_scheduled: self.co_scheduled.map(|co_scheduled| f("share_twins", co_scheduled)),
            extra: f("share_extra", self.extra),
            reduction_cost: self.reduction_cost.map(|reduction_cost| f("share_slack", reduction_cost)),
            cut: self.cut.map_named(&mut |name, number| f(&format!("cut_{name}"), number)),
            piece: self.piece.map(|piece| piece.map_named("share_piece", f)),
        }
    }
}

impl<T: Int> WorkDecomposition<T> {
    /// Number of heads of a sequence's units, co_scheduled included.
    pub fn heads(&self) -> T {
        self.co_scheduled.map_or(self.heads, |co_scheduled| self.heads * co_scheduled)
    }

    /// The number of the share of CTA `cta`.
    pub fn number(&self, cta: T) -> T {
        self.co_scheduled.map_or(cta, |_| self.count.div_rem(cta).1)
    }

    /// The head of the part that CTA `cta` computes: one of the co_scheduled at place `head` of the line.
    pub fn head(&self, head: T, cta: T) -> T {
        self.co_scheduled.map_or(head, |co_scheduled| head * co_scheduled + self.count.quotient(cta))
    }

    /// The units of a sequence with `rows` rows of O and the lengths `len`.
    pub fn units(&self, rows: T, len: SeqLens<T>) -> WorkUnits<T> {
        let (tiles, blocks) = (self.cut.blocks(rows), self.cut.most(len));
        let iterations = (blocks + self.extra).at_least(rows.lit(1));
        WorkUnits { tiles, blocks, iterations, count: tiles * self.heads }
    }

    /// The line of units that have `total` iterations. `units` returns the number of units and the iterations of the
    /// longest one; it is called only where shares may consist of whole units.
    pub fn iteration_space(&self, total: T, units: impl FnOnce() -> [T; 2]) -> IterationSpace<T> {
        let [zero, one] = [0, 1].map(|number| total.lit(number));
        let equal = IterationSpace { share: self.count.div_ceil(total).at_least(one), total, least: zero };
        let Some(reduction_cost) = self.reduction_cost else { return equal };
        let [units, longest] = units();
        let each = self.count.div_ceil(units);
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

    /// Number of pieces of each unit, at least one; `None` if units are not cut into pieces.
    pub fn num_splits(&self, units: &WorkUnits<T>) -> Option<T> {
        self.piece.map(|piece| piece.div_ceil(units.blocks).at_least(units.blocks.lit(1)))
    }

    /// The first place from `from` on where a part may begin. If units are cut into pieces, this is the start of the
    /// next piece. It lies in the sequence with these units, or one past them.
    pub fn begin(&self, units: &WorkUnits<T>, from: T) -> T {
        let Some(piece) = self.piece else { return from };
        let first = from.div(units.iterations) * units.iterations;
        let within = piece.div_ceil(from.sub_sat(first)) * piece.divisor();
        first + within.at_most(units.iterations)
    }

    /// The part of a unit that begins at place `from` of the sequence with these units. It has at most `most`
    /// iterations. If units are cut into pieces, the part is the piece that begins there.
    pub fn split(&self, units: &WorkUnits<T>, from: T, most: T) -> Split<T> {
        let most = self.piece.map_or(most, FastDiv::divisor);
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

    /// The slot in which CTA `cta` stores its result of a part, plus 1; 0 if the part is the whole unit. With pieces,
    /// the slot has the number of the piece.
    pub fn partial_index(&self, part: &Split<T>, cta: T) -> T {
        match self.piece {
            None => part.partial_of_share(cta),
            Some(piece) => part.partial_of_split(piece.quotient(part.first)),
        }
    }
}

impl<T: Int> WorkUnits<T> {
    /// Raises the iterations per unit to at least `line.least`.
    #[must_use]
    pub fn on(self, line: &IterationSpace<T>) -> WorkUnits<T> {
        WorkUnits { iterations: self.iterations.at_least(line.least), ..self }
    }

    /// Number of iterations of all of these units together.
    pub fn all(&self) -> T {
        self.count * self.iterations
    }
}

impl<T: Int> Split<T> {
    /// [`WorkDecomposition::partial_index`] of a part of an equal share.
    fn partial_of_share(&self, cta: T) -> T {
        let (zero, one) = (cta.lit(0), cta.lit(1));
        let two = cta + cta;
        let of_beginning = T::select(self.left.eq(zero), zero, two + one + one);
        T::select(self.first.eq(zero), of_beginning, two + one)
    }

    /// [`WorkDecomposition::partial_index`] of piece `number`.
    fn partial_of_split(&self, number: T) -> T {
        let (zero, one) = (number.lit(0), number.lit(1));
        let is_whole = (self.first + self.left).eq(zero);
        T::select(is_whole, zero, number + one)
    }

    /// The number of the unit's parts, if this is the first part and others follow; otherwise 0. Each of the other
    /// parts takes a whole share or ends the unit.
    pub fn splits(&self, share: T) -> T {
        let (zero, one) = (share.lit(0), share.lit(1));
        let parts = one + (self.left + share).sub_sat(one).div(share);
        let goes_on = T::select(self.left.eq(zero), zero, parts);
        // A share that ends right after a unit's start has no block of the unit.
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

    /// The list of these work tiles.
    fn line(shares: &WorkDecomposition<Checked>, units: &[WorkUnits<Checked>]) -> IterationSpace<Checked> {
        let sum = |of: &dyn Fn(&WorkUnits<Checked>) -> u64| Checked(units.iter().map(of).sum::<u64>());
        let longest = units.iter().map(|units| units.iterations.0).max().unwrap_or(0);
        shares
            .iteration_space(sum(&|units| units.all().0), || [sum(&|units| units.count.0), Checked(longest)])
    }

    /// The splits of a CTA, with the indices of their partial results and the number of splits that they announce.
    fn walk(
        shares: &WorkDecomposition<Checked>,
        units: &[WorkUnits<Checked>],
        cta: u32,
    ) -> Vec<(Unit, Split<Checked>, u64, u64)> {
        let line = line(shares, units);
        let units: Vec<_> = units.iter().map(|units| units.on(&line)).collect();
        let (share, total, number) = (line.share, line.total.0, shares.number(cta.into()).0);
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
            let (slot, parts) = (shares.partial_index(&split, cta.into()).0, split.parts(share).0);
            splits.push((unit, split, slot, parts));
            place += split.iterations.0;
        }
        splits
    }

    proptest! {
        /// Each block of each work tile is in one split. Partial results are where the tile's first CTA states, and
        /// no two share an index.
        #[test]
        fn shares_are_all_blocks_of_all_units(
            lengths in proptest::collection::vec((0_u32..80, 0_u32..900), 1..8), heads in 1_u32..4,
            ctas in 1_u32..40, extra in 0_u32..2, reduction_cost in prop_oneof![Just(None), (0_u32..9).prop_map(Some)],
            co_scheduled in prop_oneof![Just(None), (2_u32..4).prop_map(Some)],
            mask in prop_oneof![Just(Mask::None), Just(Mask::Causal), Just(Mask::window(Some(90), Some(7)))],
        ) {
            let (cut, tiling) = (Cut::new(16, 32, mask), Tiling::new(16, 32, 1, mask));
            let shares = WorkDecomposition::new(heads, ctas, extra, cut);
            let shares = co_scheduled.map_or(shares, |co_scheduled| shares.co_scheduled(co_scheduled));
            let shares = reduction_cost.map_or(shares, |reduction_cost| shares.or_whole_units(reduction_cost));
            let shares = shares.map_named(&mut |_, number| Checked::from(number));
            let all_heads = shares.heads().0;
            prop_assert_eq!(all_heads, u64::from(heads * co_scheduled.unwrap_or(1)));
            let units: Vec<_> = lengths.iter().map(|&(q, k)| {
                shares.units(q.into(), SeqLens { q: q.into(), k: k.into() })
            }).collect();
            let (mut blocks, mut whole, mut results) = (BTreeMap::<Unit, u64>::new(), Vec::new(), BTreeMap::new());
            let mut announced = BTreeMap::new();
            let mut most = 0;
            for cta in 0..ctas * co_scheduled.unwrap_or(1) {
                let splits = walk(&shares, &units, cta);
                most = most.max(splits.iter().map(|(_, split, ..)| split.iterations.0).sum::<u64>());
                for (unit, split, slot, parts) in splits {
                    // The blocks of a work tile come in order.
                    let done = blocks.entry(unit).or_default();
                    prop_assert_eq!(*done, split.first.0);
                    *done = split.end.0;
                    if slot == 0 {
                        whole.push(unit);
                    } else if split.end.0 > split.first.0 {
                        prop_assert!(slot == 1 + 2 * u64::from(cta) || slot == 2 + 2 * u64::from(cta));
                        prop_assert!(results.insert(slot - 1, (unit, split.first.0)).is_none());
                    }
                    if parts > 0 {
                        prop_assert!(announced.insert(unit, (u64::from(cta), parts)).is_none());
                    }
                }
            }
            let total: u64 = units.iter().map(|units| units.all().0).sum();
            prop_assert!(most <= total.div_ceil(ctas.into()).max(1) + u64::from(reduction_cost.unwrap_or(0)));
            if line(&shares, &units).least.0 > 0 {
                prop_assert!(announced.is_empty());
            }
            for (sequence, units) in units.iter().enumerate() {
                for (head, tile) in (0..all_heads).flat_map(|head| (0..units.tiles.0).map(move |t| (head, t))) {
                    let (unit, (q, k)) = ((sequence, head, tile), lengths[sequence]);
                    let visits = tiling.kv_range(tile as u32, SeqLens { q, k }).blocks();
                    prop_assert!(u64::from(visits) <= units.blocks.0, "a tile of {visits} blocks, {:?}", units);
                    prop_assert_eq!(blocks.remove(&unit), Some(units.blocks.0), "{:?}", unit);
                    if whole.contains(&unit) {
                        prop_assert!(!announced.contains_key(&unit));
                        continue;
                    }
                    let (cta, parts) = announced[&unit];
                    let slots = std::iter::once(2 * cta + 1).chain((1..parts).map(|part| 2 * (cta + part)));
                    let parts: Vec<_> = slots.map(|slot| results.remove(&slot)).collect();
                    prop_assert!(parts.iter().all(|part| part.is_some_and(|(of, _)| of == unit)), "{parts:?}");
                    prop_assert!(parts.is_sorted_by_key(|part| part.map(|(_, first)| first)));
                }
            }
            prop_assert!(blocks.is_empty() && results.is_empty(), "{:?} {:?}", blocks, results);
        }

        /// Work tiles of equal length stay whole if that costs at most the reduction_cost, and not otherwise.
        #[test]
        fn units_are_whole_where_they_balance(units in 1_u32..400, iterations in 1_u32..90, ctas in 1_u32..140, reduction_cost in 0_u32..9) {
            let shares = WorkDecomposition::new(1, ctas, 0, Cut::new(16, 32, Mask::None)).or_whole_units(reduction_cost);
            let shares = shares.map_named(&mut |_, x| Checked::from(x));
            let line = shares.iteration_space((units * iterations).into(), || [units.into(), iterations.into()]);
            let (whole, equal) = (units.div_ceil(ctas) * iterations, (units * iterations).div_ceil(ctas));
            let is_whole = whole <= equal + reduction_cost;
            prop_assert_eq!(line.share.0, u64::from(if is_whole { whole } else { equal }));
            prop_assert_eq!((line.least.0 > 0, line.total.0), (is_whole, u64::from(units * iterations)));
        }

        /// One CTA computes each fixed-size split of each work tile: the CTA in whose share the split begins. The
        /// splits depend neither on other sequences nor on the number of CTAs.
        #[test]
        fn pieces_are_a_sequences_own(
            lengths in proptest::collection::vec((0_u32..80, 0_u32..900), 1..8), heads in 1_u32..4,
            ctas in 1_u32..40, blocks in 1_u32..12,
            mask in prop_oneof![Just(Mask::None), Just(Mask::Causal), Just(Mask::window(Some(90), Some(7)))],
        ) {
            let cut = Cut::new(16, 32, mask);
            let shares = WorkDecomposition::new(heads, ctas, 1, cut).fixed_size(blocks).map_named(&mut |_, x| Checked::from(x));
            let of = |(q, k): (u32, u32)| shares.units(q.into(), SeqLens { q: q.into(), k: k.into() });
            let units: Vec<_> = lengths.iter().copied().map(of).collect();
            let total = units.iter().map(|units| units.all().0).sum::<u64>();
            let mut computed = BTreeMap::<Unit, Vec<[u64; 3]>>::new();
            for cta in 0..ctas {
                let splits = walk(&shares, &units, cta);
                let iterations = splits.iter().map(|(_, split, ..)| split.iterations.0).sum::<u64>();
                prop_assert!(iterations < total.div_ceil(ctas.into()).max(1) + u64::from(blocks));
                for (unit, Split { first, end, .. }, slot, _) in splits {
                    computed.entry(unit).or_default().push([first.0, end.0, slot]);
                }
            }
            for (sequence, units) in units.iter().enumerate() {
                let pieces = shares.num_splits(units).map_or(0, |pieces| pieces.0);
                let number = |from: u64| if pieces == 1 { 0 } else { from + 1 };
                let expected = (0..pieces).map(|piece| {
                    let first = piece * u64::from(blocks);
                    [first, (first + u64::from(blocks)).min(units.blocks.0), number(piece)]
                });
                let expected: Vec<_> = expected.collect();
                for (head, tile) in (0..u64::from(heads)).flat_map(|head| (0..units.tiles.0).map(move |t| (head, t))) {
                    let computed = computed.remove(&(sequence, head, tile));
                    prop_assert_eq!(computed.as_ref(), Some(&expected));
                }
            }
            prop_assert!(computed.is_empty());
        }
    }
}
