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
//! Splits may have a fixed size instead ([`WorkDecomposition::fixed_size`]). Then they are pieces of the sequence:
//! piece i has the blocks from i · size to (i + 1) · size, counted from the sequence's first key, whatever the mask and
//! the tile. A unit's first split is the piece in which its first block lies, so that a row has the same pieces in any
//! tile of any call. A CTA takes the splits that begin in its share.
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
mod known_lengths;

use crate::packed::Cut;
use crate::{FastDiv, Int, KvRange, SeqLens};

pub use equal_sequences::EqualSequences;
pub use known_lengths::{CtaSplit, Splits};

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
    /// Whether a unit of one split leaves a partial result, too.
    reduces_whole: bool,
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
    /// The first block, counted from the unit's first block, or with a fixed size from the first block of the piece in
    /// which the unit's first block lies. See [`WorkDecomposition::blocks`].
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
            reduces_whole: false,
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

    /// These shares, where a unit of one split of a fixed size leaves a partial result, too. So the reduction adds all
    /// sinks, and a row's bits do not depend on the number of its tile's splits.
    #[must_use]
    pub fn reducing_whole_units(self) -> WorkDecomposition<u32> {
        WorkDecomposition { reduces_whole: true, ..self }
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
            reduces_whole: self.reduces_whole,
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
        let tiles = self.cut.blocks(rows);
        let blocks =
            self.split_blocks.map_or_else(|| self.cut.most(len), |size| self.cut.most_from_pieces(len, size));
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

    /// Number of partial results of each unit, 0 if it has one split that writes its results; `None` unless splits have
    /// a fixed size.
    pub fn partial_results(&self, units: &WorkUnits<T>) -> Option<T> {
        let [zero, one] = [0, 1].map(|number| units.blocks.lit(number));
        let splits = self.split_blocks?.div_ceil(units.blocks).at_least(one);
        Some(if self.reduces_whole { splits } else { T::select(splits.le(one), zero, splits) })
    }

    /// The blocks of a split of a tile that visits `kv`.
    pub fn blocks(&self, kv: KvRange<T>, split: &Split<T>) -> KvRange<T> {
        let Some(size) = self.split_blocks else {
            return kv.part(split.first, split.end);
        };
        let from = size.quotient(kv.first) * size.divisor() + split.first;
        let [from, to] = [from, from + size.divisor()].map(|block| block.sub_sat(kv.first));
        kv.part(from, to)
    }

    /// The first iteration where a CTA may begin, `from` or later: with splits of a fixed size, the beginning of the
    /// next split. `from` lies in the sequence with these units, and the result may be one past the sequence.
    pub fn begin(&self, units: &WorkUnits<T>, from: T) -> T {
        let Some(size) = self.split_blocks else { return from };
        let first = from.div(units.iterations) * units.iterations;
        let passed = from.sub_sat(first);
        let within = size.div_ceil(passed) * size.divisor();
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
            return if self.reduces_whole { number + one } else { T::select(is_whole, zero, number + one) };
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
mod tests;
