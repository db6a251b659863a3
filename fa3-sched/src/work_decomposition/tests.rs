//! Tests of the split-KV work decomposition.

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

/// The rows and keys of a sequence. A few sequences have millions of keys.
fn lengths() -> impl Strategy<Value = (u32, u32)> {
    prop_oneof![40 => (0_u32..80, 0_u32..900), 1 => (0_u32..17, 4_000_000_u32..6_000_000)]
}

fn mask() -> impl Strategy<Value = Mask> {
    prop_oneof![Just(Mask::None), Just(Mask::Causal), Just(Mask::window(Some(90), Some(7)))]
}

/// The splits of a CTA, with the indices of their partial results and the number of splits that they announce.
fn walk(shares: &OfKernel, units: &[WorkUnits<Checked>], cta: u32) -> Vec<(Unit, Split<Checked>, u64, u64)> {
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
        lengths in proptest::collection::vec(lengths(), 1..8), heads in 1_u32..4,
        ctas in 1_u32..40, extra in 0_u32..2, reduction_cost in prop_oneof![Just(None), (0_u32..9).prop_map(Some)],
        together in prop_oneof![Just(None), (2_u32..4).prop_map(Some)], mask in mask(),
    ) {
        let (cut, tiling) = (Cut::new(16, 32, mask), Tiling::new(16, 32, 1, mask));
        let shares = WorkDecomposition::new(heads, ctas, extra, cut);
        let shares = together.map_or(shares, |count| shares.co_scheduled(count));
        let host = reduction_cost.map_or(shares, |cost| shares.or_whole_units(cost));
        let shares = checked(host);
        prop_assert_eq!(shares.heads().0, u64::from(heads * together.unwrap_or(1)));
        let units = units_of(&shares, &lengths);
        let (mut blocks, mut whole, mut results) = (BTreeMap::<Unit, u64>::new(), Vec::new(), BTreeMap::new());
        let mut announced = BTreeMap::new();
        let mut most = 0;
        let of_host = host.splits(&lengths.iter().map(|&(q, k)| SeqLens { q, k }).collect::<Vec<_>>());
        let mut of_host = of_host.expect("iterations are few").splits.into_iter();
        for cta in 0..ctas * together.unwrap_or(1) {
            let splits = walk(&shares, &units, cta);
            for ((sequence, head, m_block), split, ..) in &splits {
                let of_host = of_host.next().expect("the host finds as many splits");
                let found = (of_host.cta, of_host.sequence, of_host.head.into(), of_host.split.m_block.into());
                prop_assert_eq!(found, (cta, *sequence, *head, *m_block));
                prop_assert_eq!((of_host.split.first, of_host.split.end), (split.first.0 as u32, split.end.0 as u32));
            }
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
        prop_assert!(of_host.next().is_none());
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
        count in 1_u32..9, (rows, k) in lengths(), heads in 1_u32..4, ctas in 1_u32..40,
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
    /// splits depend neither on other sequences nor on the number of CTAs. Each has the tile's blocks of one piece
    /// of the sequence.
    #[test]
    fn fixed_size_splits_are_a_sequences_own(
        lengths in proptest::collection::vec(lengths(), 1..8), heads in 1_u32..4,
        ctas in 1_u32..40, blocks in 1_u32..12, mask in mask(),
        reduces_whole in any::<bool>(),
    ) {
        let (cut, tiling) = (Cut::new(16, 32, mask), Tiling::new(16, 32, 1, mask).map(Checked::from));
        let shares = WorkDecomposition::new(heads, ctas, 1, cut).fixed_size(blocks);
        let shares = checked(if reduces_whole { shares.reducing_whole_units() } else { shares });
        let units = units_of(&shares, &lengths);
        let total = units.iter().map(|units| units.all().0).sum::<u64>();
        let mut computed = BTreeMap::<Unit, Vec<[u64; 3]>>::new();
        let mut visited = BTreeMap::<Unit, (KvRange<Checked>, Vec<u64>)>::new();
        for cta in 0..ctas {
            let splits = walk(&shares, &units, cta);
            let iterations = splits.iter().map(|(_, split, ..)| split.iterations.0).sum::<u64>();
            prop_assert!(iterations < total.div_ceil(ctas.into()).max(1) + u64::from(blocks));
            for (unit, split, index, _) in splits {
                let (q, k) = lengths[unit.0];
                let kv = tiling.kv_range(Checked(unit.2), SeqLens { q: q.into(), k: k.into() });
                let part = shares.blocks(kv, &split);
                let last = part.end.0.saturating_sub(1).max(part.first.0);
                prop_assert_eq!(part.first.0 / u64::from(blocks), last / u64::from(blocks), "{:?}", part);
                visited.entry(unit).or_insert_with(|| (kv, Vec::new())).1.extend(part.first.0..part.end.0);
                computed.entry(unit).or_default().push([split.first.0, split.end.0, index]);
            }
        }
        for (unit, of) in each(&shares, &units) {
            let (count, size) = (shares.partial_results(of).map_or(0, |count| count.0), u64::from(blocks));
            let split = |number: u64| {
                let index = if count == 0 { 0 } else { number + 1 };
                [number * size, ((number + 1) * size).min(of.blocks.0), index]
            };
            prop_assert!(count != 1 || reduces_whole);
            let expected: Vec<_> = (0..of.blocks.0.div_ceil(size).max(1)).map(split).collect();
            prop_assert_eq!(computed.remove(&unit), Some(expected));
        }
        for (kv, blocks) in visited.into_values() {
            prop_assert_eq!(blocks, (kv.first.0..kv.end.0).collect::<Vec<_>>());
        }
        prop_assert!(computed.is_empty());
    }
}
