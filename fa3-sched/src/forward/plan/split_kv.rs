//! Split-KV: CTAs get even shares of all keys in decoding, where Q has few rows; or, for any rows, splits of a fixed
//! size, which do not depend on the batch. [`WorkDecomposition`] has the arithmetic, and names its counterparts in
//! Stream-K and FlashAttention.

mod fixed_size;
mod known;
mod tiles;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Dtype, Problem, TensorName};

use super::varlen::{latent_rows, memory_rows};
use crate::combine::Team;
use crate::forward::{CtaTile, PlanError, PlanOptions, SplitKeys, TileRow};
use crate::packed::{self, MemoryRows, Side};
use crate::{DeviceLimits, ListedRows, SeqLens, Tiling, WorkDecomposition};
use fixed_size::{merges_splits, split_blocks, with_more_rows};
use known::known;
use tiles::tile;

/// Rows of a tile: the rows of one consumer warpgroup, or of two that divide the columns of O.
pub(super) const ROWS: u32 = 64;

/// The number of rows of Q that one copy moves is a multiple of this, a period of the swizzle.
const PERIOD: u32 = 8;

/// The most tiles that are co-scheduled. H100 and H200 have 132 SMs, which 2, 3 and 4 divide.
const MOST_CO_SCHEDULED: u32 = 4;

/// Limit of the iterations of a sequence. The device divides them by a number that it alone knows, and the division is
/// exact below this limit.
const MOST_ITERATIONS: u32 = 1 << 24;

/// Plan with split-KV: tiles of 64 rows, and for each CTA about equally many KV blocks, or splits of a fixed size,
/// whatever the lengths. The query heads of a group are rows of one tile (PackGQA).
#[derive(Clone, Copy, Debug)]
pub struct SplitKvPlan {
    sequences: packed::Plan,
    rows: [MemoryRows; 3],
    latent_rows: Option<MemoryRows>,
    pack: u32,
    positions: u32,
    heads: u32,
    co_scheduled: u32,
    per_sm: u32,
    ctas: u32,
    reduction_cost: u32,
    split: SplitRule,
    /// Whether a unit of one split of a fixed size is reduced, too: only the reduction adds sinks then.
    reduces_whole: bool,
    lists: Option<(ListedRows, Option<ListedRows>)>,
}

/// How a problem's tiles are found, where its keys are split or have pieces of a fixed size.
#[allow(clippy::large_enum_variant, reason = "a plan has one of them while it is made")]
pub(super) enum Choice {
    /// As splits of all keys. If CTAs merge pieces of this number of keys, each has whole units.
    Split { tile: CtaTile, tiling: Tiling<u32>, plan: SplitKvPlan, pieces: Option<u32> },
    /// As where keys are not split, with this tile. CTAs merge pieces of this number of keys.
    Tiles { tile: CtaTile, pieces: u32 },
}

/// How work tiles are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SplitRule {
    /// Work tiles are split at the ends of equal shares. The start of a work tile counts as `extra` blocks. `units` is
    /// the number of work tiles, if it is known and at most the number of CTAs.
    Even { extra: u32, units: Option<u32> },
    /// Work tiles are split every `blocks` blocks, into at most `most` splits each.
    FixedSize { blocks: u32, most: u32 },
}

/// Where the reduction kernel reads which splits to reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReductionSource {
    /// The entry of each work tile.
    Units,
    /// The entry of each CTA, about the work tile that begins in the CTA and continues in the next CTA.
    Ctas,
    /// The lengths of sequences.
    Lengths,
}

/// With at most this many KV blocks per CTA, consumers use half of the register file, so that the reduction kernel's
/// CTAs are already resident when the last split ends. On an H100 one sequence of 1024 keys then takes 7.4 us instead
/// of 8.0, but 16 sequences of 4096 keys take 98.7 us instead of 95.8.
const FEW_BLOCKS: u64 = 4;

/// Cost of the split-KV reduction in units of one KV block, and the elements of O per CTA that add one more unit.
const REDUCTION_COST: u32 = 4;
const REDUCTION_ELEMENTS: u32 = 4096;

/// Smallest number of splits for which the warps that reduce a row are planned: long sequences have more splits than
/// the average.
const LEAST_SPLITS: u32 = 4;

/// Keys are split, whatever the number of tiles, if sequences have at most this number of query positions: a token and
/// a few speculative ones. A tile of one head would have no more rows than this.
const FEW: usize = 8;

/// Number of query heads that are rows of one tile (PackGQA): as many heads of a group as one copy can move.
fn pack(group: u32) -> u32 {
    let fits = |heads: u32| heads * positions_multiple(heads) <= ROWS;
    (1..=group.min(ROWS)).rev().find(|&heads| group.is_multiple_of(heads) && fits(heads)).unwrap_or(1)
}

/// Number of query heads that are rows of one tile of a single position, which has a list of keys.
fn pack_of_position(group: u32) -> u32 {
    (1..=group.min(ROWS)).rev().find(|&heads| group.is_multiple_of(heads)).unwrap_or(1)
}

/// Query positions in a tile of `rows` rows, which has `pack` query heads.
pub fn packed_positions(pack: u32, rows: u32) -> u32 {
    let multiple = positions_multiple(pack);
    rows / pack / multiple * multiple
}

/// The number of a tile's positions is a multiple of this.
fn positions_multiple(pack: u32) -> u32 {
    PERIOD / (1 << pack.trailing_zeros().min(3))
}

/// Number of tiles that read the same keys at the same time, if a group's heads have `tiles` tiles. It leaves few SMs
/// without work.
fn co_scheduled(tiles: u32) -> u32 {
    (1..=MOST_CO_SCHEDULED).rev().find(|&co_scheduled| tiles.is_multiple_of(co_scheduled)).unwrap_or(1)
}

/// Number of rows of a work tile, estimated from the longest sequence.
fn unit_rows(problem: &Problem, pack: u32) -> u32 {
    (problem.longest().q as u32 * pack).clamp(1, ROWS)
}

/// Number of LSE entries, which is below 2³²: see [`PlanError::SplitRows`].
fn rows_of_lse(problem: &Problem) -> u32 {
    problem.lse_shape().into_iter().map(|extent| extent as u32).product()
}

/// Listed rows are numbered in units of 16 bytes, and the last number stands for a missing row.
const LISTED_BYTES: u64 = 16 * (u32::MAX as u64);

/// Checks that each list belongs to one row of Q, that rows can be numbered, and that options leave the plan open.
fn check_lists(problem: &Problem, options: &PlanOptions) -> Result<(), PlanError> {
    known(problem).check(problem)?;
    let first = [(TensorName::K, problem.k()), (TensorName::V, problem.v())];
    let extra = problem.extra();
    let second =
        extra.into_iter().flat_map(|extra| [(TensorName::ExtraK, &extra.k), (TensorName::ExtraV, &extra.v)]);
    for (tensor, of) in first.into_iter().chain(second) {
        let (given, limit) = (of.extent_bytes().0, LISTED_BYTES);
        if given > limit {
            return Err(PlanError::ListedBytes { tensor, given, limit });
        }
    }
    match (problem.seqs_q().seqlen(), options.tile) {
        (Some(1), None) => Ok(()),
        (Some(1), Some(_)) => Err(PlanError::SplitTile),
        (rows, _) => Err(PlanError::ListRows { rows: rows.unwrap_or(problem.q().shape.seqlen) }),
    }
}

impl SplitKvPlan {
    /// Decides the decomposition, the tile and the tiling. `None` if the options do not split keys or Q has no rows.
    /// Without splits of a fixed size it is also `None` if a tile is given, if a sequence has many rows, or if there
    /// are more blocks than can be numbered. Lists of keys have no other plan: they are refused instead.
    pub(super) fn choose(
        problem: &Problem,
        limits: &DeviceLimits,
        sms: NonZeroU32,
        options: &PlanOptions,
    ) -> Result<Option<Choice>, PlanError> {
        let group = problem.heads().group_size() as u32;
        let lists = ListedRows::of(problem);
        if lists.is_some() {
            check_lists(problem, options)?;
        }
        let (pack, tile) =
            (if lists.is_some() { pack_of_position(group) } else { pack(group) }, tile(problem));
        let rows = problem.longest().q;
        let has_few_rows = rows <= FEW || rows.saturating_mul(pack as usize) <= ROWS as usize;
        let split_blocks = match options.split_keys {
            None if lists.is_some() => Some(MOST_ITERATIONS),
            None => return Ok(None),
            Some(SplitKeys::Even | SplitKeys::Whole) if known(problem).check(problem).is_err() => {
                return Ok(None);
            }
            Some(split @ (SplitKeys::Even | SplitKeys::Whole)) => {
                let is_whole = split == SplitKeys::Whole;
                if options.tile.is_some() || !has_few_rows || is_whole && pack == 1 && lists.is_none() {
                    return Ok(None);
                }
                // No sequence has more blocks than one split of this size.
                is_whole.then_some(MOST_ITERATIONS)
            }
            Some(split @ (SplitKeys::Fixed | SplitKeys::FixedSize { .. })) => {
                Some(split_blocks(problem, options, split, tile)?)
            }
        };
        let Some((tile, is_slim)) = tile else {
            return if lists.is_some() { Err(TileRow::none(problem)) } else { Ok(None) };
        };
        let is_asked = matches!(options.split_keys, Some(SplitKeys::Fixed | SplitKeys::FixedSize { .. }));
        let positions = if lists.is_some() { 1 } else { packed_positions(pack, ROWS) };
        let tiling = Tiling::new(positions, tile.tile_n, group / pack, problem.mask());
        let mut sides = Side::both(problem);
        if let Some(lists) = lists {
            sides[1].rows = ListedRows::most_keys(lists, tile.tile_n);
        }
        let sequences = packed::Plan::new(problem.batch(), sides, [positions, tile.tile_n], problem.mask())?;
        let heads = problem.heads().q() as u32 / pack;
        let blocks = (sides[1].rows as u64).div_ceil(tile.tile_n.into()) + 1;
        let units = u64::from(heads) * u64::from(sequences.capacity());
        // The most iterations of one sequence. The iterations of all sequences must be fewer than 2³¹.
        let most = blocks.saturating_mul(u64::from(heads) * u64::from(sequences.most_blocks()));
        let are_too_many = most > MOST_ITERATIONS.into() || blocks.saturating_mul(units) > i32::MAX as u64;
        if lists.is_none() && (problem.batch() == 0 || !sequences.has_rows()) {
            return Ok(None);
        }
        if are_too_many {
            let refusal = PlanError::SplitBlocks { blocks: most, limit: MOST_ITERATIONS };
            return if is_asked || lists.is_some() { Err(refusal) } else { Ok(None) };
        }
        let co_scheduled = co_scheduled(group / pack);
        let most_shares = blocks.saturating_mul(units / u64::from(co_scheduled));
        let shares = u64::from(sms.get() / co_scheduled).min(most_shares).max(1);
        let ctas = shares as u32 * co_scheduled;
        // Starts cost nothing if there are enough CTAs for all work tiles.
        let extra = u32::from(u64::from(heads) * problem.batch() as u64 > ctas.into());
        let about = (problem.longest().k as u64).div_ceil(tile.tile_n.into());
        let is_short = about * u64::from(heads) * problem.batch() as u64 <= FEW_BLOCKS * u64::from(ctas);
        // With splits of a fixed size, results must not depend on other sequences, and so neither may the choice of
        // kernel.
        let per_sm = if is_slim && is_short && split_blocks.is_none() { 2 } else { 1 };
        let (rows, latent_rows) = (memory_rows(problem)?, latent_rows(problem)?);
        // All sequences of a dense tensor have the same number of work tiles.
        let units = u64::from(heads) * u64::from(sequences.most_blocks()) * problem.batch() as u64;
        let units = (!sides[0].arrays.cu_seqlens && units <= ctas.into()).then_some(units as u32);
        let reduction_cost = REDUCTION_COST + unit_rows(problem, pack) * tile.head_dim_v / REDUCTION_ELEMENTS;
        let mut pieces = None;
        let split = match split_blocks {
            None => SplitRule::Even { extra, units },
            // A sequence has fewer than 2²⁴ blocks.
            Some(size) => {
                let most = (blocks as u32 - 1).div_ceil(size).max(1);
                // The fewest units that the rows of Q make.
                let least_units = heads * (rows_of_lse(problem) / problem.heads().q() as u32 / positions);
                // Tiles that skip blocks by their intervals do not find where pieces begin.
                let in_units = has_few_rows || problem.mask().intervals().is_some();
                if is_asked && merges_splits(problem, options, &tile, (in_units, most, least_units, ctas))? {
                    let keys = size.saturating_mul(tile.tile_n);
                    if !in_units {
                        let tile = with_more_rows(problem, tile, limits);
                        return Ok(Some(Choice::Tiles { tile, pieces: keys }));
                    }
                    pieces = Some(keys);
                }
                match pieces {
                    Some(_) => SplitRule::FixedSize { blocks: MOST_ITERATIONS, most: 1 },
                    None => SplitRule::FixedSize { blocks: size, most },
                }
            }
        };
        let plan = SplitKvPlan {
            sequences,
            rows,
            latent_rows,
            pack,
            positions,
            heads,
            co_scheduled,
            per_sm,
            ctas,
            reduction_cost,
            split,
            // Sinks of other splits are added by the kernel that has all of a unit's keys.
            reduces_whole: is_asked && problem.has_sink() && pieces.is_none(),
            lists,
        };
        Ok(Some(Choice::Split { tile, tiling, plan, pieces }))
    }

    /// The reason for this tile.
    pub(super) fn why(&self) -> &'static str {
        match self.split {
            SplitRule::Even { .. } => "few rows of Q: keys are shared by all SMs",
            SplitRule::FixedSize { most: 1, .. } => "few rows of Q, whose heads share a tile",
            SplitRule::FixedSize { .. } => "splits of a fixed size: results are the same bits in any batch",
        }
    }

    /// The cache whose rows are listed, and the second one, if keys are listed.
    pub fn lists(&self) -> Option<(ListedRows, Option<ListedRows>)> {
        self.lists
    }

    /// The sequences, cut into tiles of positions. If keys are listed, the rows of K are the keys of all blocks of
    /// whole lists, and `seqused` is for the first list.
    pub fn sequences(&self) -> &packed::Plan {
        &self.sequences
    }

    /// The rows of Q, K and V in memory.
    pub fn rows(&self) -> [MemoryRows; 3] {
        self.rows
    }

    /// The rows of `qv` in memory, if the problem has `qv`.
    pub fn latent_rows(&self) -> Option<MemoryRows> {
        self.latent_rows
    }

    /// Query heads that are rows of one tile (PackGQA): row r has head r mod `pack` and position r / `pack`.
    pub fn pack(&self) -> u32 {
        self.pack
    }

    /// Number of tiles, of different heads, that have the same positions.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Whether several tiles of a group's heads read the same keys at the same time
    /// ([`WorkDecomposition::co_scheduled`]).
    pub fn co_schedules_tiles(&self) -> bool {
        self.co_scheduled > 1
    }

    /// Query positions per tile.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// Number of CTAs for which an SM has registers: two if a CTA of the next kernel may start beside a CTA of this
    /// kernel.
    pub fn per_sm(&self) -> u32 {
        self.per_sm
    }

    /// Number of CTAs: none if Q has no rows.
    pub fn ctas(&self) -> u32 {
        if self.sequences.has_rows() { self.ctas } else { 0 }
    }

    /// The numbers that determine each CTA's share.
    pub fn decomposition(&self) -> WorkDecomposition<u32> {
        let SplitKvPlan { heads, co_scheduled, ctas, .. } = *self;
        let shares = |extra| {
            let (heads, ctas) = (heads / co_scheduled, ctas / co_scheduled);
            let shares = WorkDecomposition::new(heads, ctas, extra, self.sequences.cut());
            let shares = shares.or_whole_units(self.reduction_cost);
            if co_scheduled > 1 { shares.co_scheduled(co_scheduled) } else { shares }
        };
        let shares = match self.split {
            SplitRule::Even { extra, .. } => shares(extra),
            SplitRule::FixedSize { blocks, .. } => {
                let shares = shares(0).fixed_size(blocks);
                if self.reduces_whole { shares.reducing_whole_units() } else { shares }
            }
        };
        let are_whole = |(first, second): (ListedRows, Option<ListedRows>)| {
            !first.used && second.is_none_or(|second| !second.used)
        };
        if self.lists.is_some_and(are_whole) {
            // Sequences have one row and whole lists.
            let len = SeqLens { q: 1, k: self.sequences.k().rows as u32 };
            return shares.equal_sequences(self.sequences.count(), 1, len);
        }
        shares
    }

    /// Where the reduction kernel reads which splits to reduce: from entries of units if the number of units is known
    /// and at most the number of CTAs, otherwise from entries of CTAs; from lengths if splits have a fixed size.
    pub fn reduction_source(&self) -> ReductionSource {
        match self.split {
            SplitRule::Even { units: Some(_), .. } => ReductionSource::Units,
            SplitRule::Even { units: None, .. } => ReductionSource::Ctas,
            SplitRule::FixedSize { .. } => ReductionSource::Lengths,
        }
    }

    /// Number of units or CTAs that have entries for the reduction; `None` if splits follow from lengths.
    pub fn reduction_entries(&self) -> Option<u32> {
        match self.split {
            SplitRule::Even { units, .. } => Some(units.unwrap_or(self.ctas)),
            SplitRule::FixedSize { .. } => None,
        }
    }

    /// Number of partial results, and rows of each. With even shares each CTA has two, of a tile's rows. With splits of
    /// a fixed size there is one for each split of a unit, with the rows of O of all query heads.
    pub fn partial_dims(&self, problem: &Problem) -> [u32; 2] {
        match self.split {
            SplitRule::Even { .. } => [2 * self.ctas, ROWS],
            SplitRule::FixedSize { most, .. } => [most, rows_of_lse(problem)],
        }
    }

    /// Whether a unit may leave partial results.
    pub fn needs_reduction(&self) -> bool {
        self.reduces_whole || !matches!(self.split, SplitRule::FixedSize { most: 1, .. })
    }

    /// Whether a unit of one split leaves a partial result, too ([`WorkDecomposition::reducing_whole_units`]).
    pub fn reduces_whole_units(&self) -> bool {
        self.reduces_whole
    }

    /// Number of rows of a work tile, estimated from the longest sequence.
    pub fn unit_rows(&self, problem: &Problem) -> u32 {
        unit_rows(problem, self.pack)
    }

    /// The warps that reduce a row. They are planned for the number of splits that units have on average; splits of a
    /// fixed size are added one after the other, however many there are.
    pub fn team(&self, head_dim_v: u32) -> Team {
        match self.split {
            SplitRule::Even { units, .. } => {
                let splits = units.map_or(1, |units| self.ctas / units.max(1)) + 1;
                Team::new(splits.max(LEAST_SPLITS), head_dim_v, Dtype::F32)
            }
            SplitRule::FixedSize { .. } => Team::in_order(head_dim_v, Dtype::F32),
        }
    }

    /// Writes how work tiles reach CTAs of `threads` threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let SplitKvPlan { pack, positions, ctas, .. } = self;
        writeln!(f, "rows       {positions} positions of {pack} query heads a tile")?;
        match self.split {
            SplitRule::Even { .. } => {
                writeln!(f, "scheduler  split-KV, even shares, {ctas} CTAs of {threads} threads")
            }
            SplitRule::FixedSize { blocks, .. } => {
                writeln!(
                    f,
                    "scheduler  split-KV, splits of {blocks} KV blocks, {ctas} CTAs of {threads} threads"
                )
            }
        }
    }

    /// Writes how much device memory is needed.
    pub(super) fn write_memory(
        &self,
        f: &mut fmt::Formatter<'_>,
        problem: &Problem,
        tile: &CtaTile,
    ) -> fmt::Result {
        let [partials, rows] = self.partial_dims(problem).map(u64::from);
        let bytes = 4 * partials * rows * u64::from(tile.head_dim_v + 1);
        write!(f, "memory     {bytes} bytes for partial results of O and LSE")?;
        match self.reduction_entries() {
            Some(_) => write!(f, ", and {} to find them", 32 * self.ctas),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
