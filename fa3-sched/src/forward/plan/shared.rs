//! Keys that CTAs share: decoding, whose rows of Q are few; or any rows, in pieces that do not depend on the batch.

mod tiles;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Feature, Known, Problem};

use super::listed::{latent_rows, memory_rows};
use crate::forward::{CtaTile, PlanError, PlanOptions, SplitKeys, TileRow};
use crate::packed::{self, MemoryRows, Side};
use crate::{Shares, Tiling};
use tiles::tile;

/// The features that kernels compute where CTAs share keys. E4m3 is converted to 16 bits.
const KNOWN: Known = Known::new(
    "the forward kernels of shared keys",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::SoftCap,
        Feature::Sinks,
        Feature::Qv,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Packed,
        Feature::Used,
        Feature::Pages,
        Feature::Index,
        Feature::Leftpad,
    ],
);

/// Rows of a tile: one consumer warpgroup's, or those of two that share columns of O.
pub(super) const ROWS: u32 = 64;

/// Rows of Q that are copied at once are a multiple of so many, a period of the swizzle.
const PERIOD: u32 = 8;

/// H100 and H200 have 132 SMs, which 2, 3 and 4 divide.
const MOST_TWINS: u32 = 4;

/// The places of a sequence are divided by a number that only the device knows, which is exact below this.
const PLACES: u32 = 1 << 24;

/// Parts of a unit for which the merge of pieces is planned, whatever the lengths: which warps merge a row decides the
/// order of sums.
const PARTS_OF_PIECES: u32 = 16;

/// Tiles of 64 rows in which each CTA computes about as many blocks of keys as any other, whatever the lengths. Query
/// heads of a group are rows of one tile.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    sequences: packed::Plan,
    rows: [MemoryRows; 3],
    latent_rows: Option<MemoryRows>,
    pack: u32,
    positions: u32,
    heads: u32,
    twins: u32,
    per_sm: u32,
    ctas: u32,
    slack: u32,
    split: Split,
}

/// Where units are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// Where shares end, which are equal. Starts count as `extra` blocks. `units` is their number, if it is known and
    /// they are no more than CTAs.
    Equally { extra: u32, units: Option<u32> },
    /// In pieces of so many blocks, of which a unit has so many at most.
    Pieces { blocks: u32, most: u32 },
}

/// Who says which parts of units are to be merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartsSaidBy {
    /// Each unit says so of itself.
    Units,
    /// Each CTA says so of the unit that begins in it and goes on.
    Ctas,
    /// They follow from the lengths of sequences.
    Lengths,
}

/// Where CTAs have so few blocks, they leave half of the registers to those of the kernel that merges, which are there
/// then when the last of these ends. On an H100 one sequence of 1024 keys takes 7.4 us so, and 8.0 otherwise; 16
/// sequences of 4096 keys take 98.7 and 95.8.
const FEW_BLOCKS: u64 = 4;

/// Blocks for which a merge of parts takes as long, and elements of O of which the parts of a CTA take as long as
/// another block.
const SLACK: u32 = 4;
const SLACK_ELEMENTS: u32 = 4096;

/// Positions of Q whose keys are shared however many tiles their heads take: a token and some speculative ones. A tile
/// of one head would have no more rows than these.
const FEW: usize = 8;

/// Query heads that are rows of one tile: as many of a group as can be copied at once.
fn pack(group: u32) -> u32 {
    let fits = |heads: u32| heads * positions_multiple(heads) <= ROWS;
    (1..=group.min(ROWS)).rev().find(|&heads| group.is_multiple_of(heads) && fits(heads)).unwrap_or(1)
}

/// Positions whose rows of `pack` query heads are in a tile of `rows` rows.
pub fn packed_positions(pack: u32, rows: u32) -> u32 {
    let multiple = positions_multiple(pack);
    rows / pack / multiple * multiple
}

/// The number of which a tile's positions are a multiple.
fn positions_multiple(pack: u32) -> u32 {
    PERIOD / (1 << pack.trailing_zeros().min(3))
}

/// Tiles of a group's heads that read the same keys at the same time, of so many: a number that leaves few SMs without
/// work.
fn twins(tiles: u32) -> u32 {
    (1..=MOST_TWINS).rev().find(|&twins| tiles.is_multiple_of(twins)).unwrap_or(1)
}

/// Rows of a unit, as far as is known.
fn unit_rows(problem: &Problem, pack: u32) -> u32 {
    (problem.longest().q as u32 * pack).clamp(1, ROWS)
}

/// Numbers of LSE, which are fewer than 2³²: see [`PlanError::PieceRows`].
fn rows_of_lse(problem: &Problem) -> u32 {
    problem.lse_shape().into_iter().map(|extent| extent as u32).product()
}

/// Blocks of a piece of so many keys.
fn piece_blocks(
    problem: &Problem,
    options: &PlanOptions,
    keys: u64,
    tile: Option<(CtaTile, bool)>,
) -> Result<u32, PlanError> {
    KNOWN.check(problem).map_err(PlanError::Pieces)?;
    if options.tile.is_some() {
        return Err(PlanError::PieceTile);
    }
    let (CtaTile { tile_n: block, .. }, _) = tile.ok_or_else(|| TileRow::none(problem))?;
    if keys == 0 || !keys.is_multiple_of(block.into()) {
        return Err(PlanError::PieceKeys { keys, block });
    }
    let rows = problem.lse_shape().into_iter().map(|extent| extent as u128).product();
    if rows > u32::MAX.into() {
        return Err(PlanError::PieceRows { rows });
    }
    // No sequence has more blocks.
    Ok((keys / u64::from(block)).min(PLACES.into()) as u32)
}

impl Shared {
    /// Decides everything about them, if this is how the problem is to be computed: it has rows of Q; where shares are
    /// equal, few of a sequence, and not more keys than can be numbered. Gives the tile and how matrices are cut, too.
    pub(super) fn new(
        problem: &Problem,
        sms: NonZeroU32,
        options: &PlanOptions,
    ) -> Result<Option<(CtaTile, Tiling<u32>, Shared)>, PlanError> {
        let group = problem.heads().group_size() as u32;
        let (pack, tile) = (pack(group), tile(problem));
        let piece = match options.split_keys {
            None => return Ok(None),
            Some(SplitKeys::Equally) if KNOWN.check(problem).is_err() => return Ok(None),
            Some(SplitKeys::Equally) => {
                let positions = problem.longest().q;
                let is_short = positions <= FEW || positions.saturating_mul(pack as usize) <= ROWS as usize;
                if options.tile.is_some() || !is_short {
                    return Ok(None);
                }
                None
            }
            Some(SplitKeys::Pieces { keys }) => Some(piece_blocks(problem, options, keys, tile)?),
        };
        let Some((tile, is_slim)) = tile else { return Ok(None) };
        let positions = packed_positions(pack, ROWS);
        let tiling = Tiling::new(positions, tile.tile_n, group / pack, problem.mask());
        let sides = [(problem.seqs_q(), problem.q()), (problem.seqs_k(), problem.k())];
        let sides = sides.map(|(sequences, tensor)| Side::of(sequences, tensor.shape.seqlen));
        let sequences = packed::Plan::new(problem.batch(), sides, [positions, tile.tile_n], problem.mask())?;
        let heads = problem.heads().q() as u32 / pack;
        let blocks = (sides[1].rows as u64).div_ceil(tile.tile_n.into()) + 1;
        let units = u64::from(heads) * u64::from(sequences.capacity());
        // So many at most of one sequence, and of all of them fewer than 2³¹.
        let most = blocks.saturating_mul(u64::from(heads) * u64::from(sequences.most_blocks()));
        let are_too_many = most > PLACES.into() || blocks.saturating_mul(units) > i32::MAX as u64;
        if problem.batch() == 0 || !sequences.has_rows() {
            return Ok(None);
        }
        if are_too_many {
            let refusal = PlanError::PieceBlocks { blocks: most, limit: PLACES };
            return if piece.is_some() { Err(refusal) } else { Ok(None) };
        }
        let twins = twins(group / pack);
        let shares = u64::from(sms.get() / twins).min(blocks.saturating_mul(units / u64::from(twins))).max(1);
        let ctas = shares as u32 * twins;
        // A start is free where there are CTAs enough for each.
        let extra = u32::from(u64::from(heads) * problem.batch() as u64 > ctas.into());
        let about = (problem.longest().k as u64).div_ceil(tile.tile_n.into());
        let is_short = about * u64::from(heads) * problem.batch() as u64 <= FEW_BLOCKS * u64::from(ctas);
        // Kernels must not depend on other sequences where results do not.
        let per_sm = if is_slim && is_short && piece.is_none() { 2 } else { 1 };
        let (rows, latent_rows) = (memory_rows(problem)?, latent_rows(problem)?);
        // All sequences of a dense tensor have as many.
        let units = u64::from(heads) * u64::from(sequences.most_blocks()) * problem.batch() as u64;
        let units = (!sides[0].arrays.cu_seqlens && units <= ctas.into()).then_some(units as u32);
        let slack = SLACK + unit_rows(problem, pack) * tile.head_dim_v / SLACK_ELEMENTS;
        let split = match piece {
            None => Split::Equally { extra, units },
            // A sequence has fewer than 2²⁴ blocks.
            Some(piece) => Split::Pieces { blocks: piece, most: (blocks as u32 - 1).div_ceil(piece).max(1) },
        };
        Ok(Some((
            tile,
            tiling,
            Shared {
                sequences,
                rows,
                latent_rows,
                pack,
                positions,
                heads,
                twins,
                per_sm,
                ctas,
                slack,
                split,
            },
        )))
    }

    /// Why tiles are as they are.
    pub(super) fn why(&self) -> &'static str {
        match self.split {
            Split::Equally { .. } => "few rows of Q: keys are shared by all SMs",
            Split::Pieces { .. } => "keys in pieces: results are the same bits in any batch",
        }
    }

    /// The sequences, cut into tiles of positions.
    pub fn sequences(&self) -> &packed::Plan {
        &self.sequences
    }

    /// The rows of Q, K and V in memory.
    pub fn rows(&self) -> [MemoryRows; 3] {
        self.rows
    }

    /// The rows of `qv` in memory, if there is one.
    pub fn latent_rows(&self) -> Option<MemoryRows> {
        self.latent_rows
    }

    /// Query heads that are rows of one tile: row r is of head r mod `pack` and of position r / `pack`.
    pub fn pack(&self) -> u32 {
        self.pack
    }

    /// Tiles of the same positions, of different heads.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Whether several tiles of a group's heads read the same keys at the same time ([`Shares::of_twins`]).
    pub fn has_twins(&self) -> bool {
        self.twins > 1
    }

    /// Positions of a tile.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// CTAs for which an SM has registers: two where another kernel's may begin beside one of these.
    pub fn per_sm(&self) -> u32 {
        self.per_sm
    }

    /// Number of CTAs, at least one.
    pub fn ctas(&self) -> u32 {
        self.ctas
    }

    /// The numbers that give CTAs their shares.
    pub fn shares(&self) -> Shares<u32> {
        let Shared { heads, twins, ctas, .. } = *self;
        let shares = |extra| {
            let shares = Shares::new(heads / twins, ctas / twins, extra, self.sequences.cut());
            let shares = shares.or_whole_units(self.slack);
            if twins > 1 { shares.of_twins(twins) } else { shares }
        };
        match self.split {
            Split::Equally { extra, .. } => shares(extra),
            Split::Pieces { blocks, .. } => shares(0).in_pieces(blocks),
        }
    }

    /// Who says which parts of units are to be merged: units, if their number is known and they are no more than CTAs,
    /// else CTAs; or nobody, where they follow from lengths.
    pub fn parts_said_by(&self) -> PartsSaidBy {
        match self.split {
            Split::Equally { units: Some(_), .. } => PartsSaidBy::Units,
            Split::Equally { units: None, .. } => PartsSaidBy::Ctas,
            Split::Pieces { .. } => PartsSaidBy::Lengths,
        }
    }

    /// How many units or CTAs say so; none if nobody does.
    pub fn sayings(&self) -> Option<u32> {
        match self.split {
            Split::Equally { units, .. } => Some(units.unwrap_or(self.ctas)),
            Split::Pieces { .. } => None,
        }
    }

    /// Slots of results of parts, and rows of each: CTAs have two each, of a tile; or a unit has one for each piece
    /// that it may have, of all rows of O of all query heads.
    pub fn part_dims(&self, problem: &Problem) -> [u32; 2] {
        match self.split {
            Split::Equally { .. } => [2 * self.ctas, ROWS],
            Split::Pieces { most, .. } => [most, rows_of_lse(problem)],
        }
    }

    /// Whether units may have several parts.
    pub fn merges(&self) -> bool {
        !matches!(self.split, Split::Pieces { most: 1, .. })
    }

    /// Rows of a unit, as far as is known.
    pub fn unit_rows(&self, problem: &Problem) -> u32 {
        unit_rows(problem, self.pack)
    }

    /// Parts of a unit for which merges are planned: so many if all are as long, or a number that does not depend on
    /// other sequences.
    pub fn parts(&self) -> u32 {
        match self.split {
            Split::Equally { units, .. } => units.map_or(1, |units| self.ctas / units.max(1)) + 1,
            Split::Pieces { .. } => PARTS_OF_PIECES,
        }
    }

    /// Writes how units reach CTAs of so many threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let Shared { pack, positions, ctas, .. } = self;
        writeln!(f, "rows       {positions} positions of {pack} query heads a tile")?;
        match self.split {
            Split::Equally { .. } => {
                writeln!(f, "scheduler  equal shares of all keys, {ctas} CTAs of {threads} threads")
            }
            Split::Pieces { blocks, .. } => {
                writeln!(f, "scheduler  pieces of {blocks} blocks of keys, {ctas} CTAs of {threads} threads")
            }
        }
    }

    /// Writes what they take of the device's memory.
    pub(super) fn write_memory(
        &self,
        f: &mut fmt::Formatter<'_>,
        problem: &Problem,
        tile: &CtaTile,
    ) -> fmt::Result {
        let [slots, rows] = self.part_dims(problem).map(u64::from);
        let bytes = 4 * slots * rows * u64::from(tile.head_dim_v + 1);
        write!(f, "memory     {bytes} bytes for parts of O and LSE")?;
        match self.sayings() {
            Some(_) => write!(f, ", and {} to find them", 32 * self.ctas),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape};

    use super::*;
    use crate::DeviceLimits;
    use crate::forward::{Plan, Precision, Way};

    /// The plan of `rows` rows of Q of each of `batch` sequences, in pages of 16 rows, `pages` of each.
    fn plan(batch: usize, rows: usize, pages: usize, heads: (usize, usize)) -> Plan {
        let q = Shape { batch, seqlen: rows, heads: heads.0, head_dim: 128 };
        let kv = Shape { batch: 1000, seqlen: 16, heads: heads.1, head_dim: 128 };
        let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).mask(Mask::Causal);
        let problem = spec.seqs_k(Sequences::paged(batch, pages).used()).validate().unwrap();
        let options = PlanOptions::default().split_keys(SplitKeys::Equally);
        Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).unwrap()
    }

    #[test]
    fn few_rows_share_keys() {
        let shared = |batch, rows, pages, heads| match plan(batch, rows, pages, heads).way() {
            Way::Shared(shared) => Some(*shared),
            Way::Numbered(_) | Way::Listed(_) => None,
        };
        let one = shared(1, 1, 64, (32, 8)).unwrap();
        assert_eq!(
            (one.ctas(), one.sayings(), one.pack(), one.positions(), one.per_sm()),
            (132, Some(8), 4, 16, 2)
        );
        let plan_of_one = plan(1, 1, 64, (32, 8));
        assert_eq!(
            (one.parts(), one.part_dims(plan_of_one.problem()), plan_of_one.pages().unwrap().block_rows),
            (17, [264, 64], 16)
        );
        let registers = "registers  128 at entry, then 56 a producer and 200 a consumer thread";
        assert!(plan_of_one.to_string().contains(registers), "{plan_of_one}");
        // More units than CTAs: each CTA says which one begins in it.
        let many = shared(64, 1, 256, (32, 8)).unwrap();
        assert_eq!((many.ctas(), many.sayings(), many.per_sm(), many.parts()), (132, Some(132), 1, 2));
        assert_eq!([one, many].map(|of| of.parts_said_by()), [PartsSaidBy::Units, PartsSaidBy::Ctas]);
        // 17 rows of four heads are more than a tile; nothing is shared where there is nothing.
        assert!(shared(1, 16, 64, (32, 8)).is_some());
        assert!(shared(1, 17, 64, (32, 8)).is_none());
        // A few positions share keys, however many tiles their heads take.
        let two = shared(4, 8, 64, (128, 1)).unwrap();
        assert_eq!((two.pack(), two.positions(), two.heads(), two.sayings()), (64, 1, 2, Some(64)));
        assert!(shared(4, 9, 64, (128, 1)).is_none());
        assert!(shared(0, 1, 64, (32, 8)).is_none() && shared(1, 0, 64, (32, 8)).is_none());
        // More blocks of a sequence than can be divided exactly.
        assert!(shared(1, 1, 1 << 26, (32, 32)).is_none());
    }

    #[test]
    fn pieces_do_not_depend_on_the_batch() {
        let plan = |batch, rows, keys, dtype| {
            let q = Shape { batch, seqlen: rows, heads: 32, head_dim: 128 };
            let kv = Shape { batch: 1000, seqlen: 16, heads: 8, head_dim: 128 };
            let spec = ProblemSpec::dense(dtype, q, kv).mask(Mask::Causal);
            let problem = spec.seqs_k(Sequences::paged(batch, 512).used()).validate().unwrap();
            let options = PlanOptions::default().split_keys(SplitKeys::Pieces { keys });
            Plan::with(&problem, &DeviceLimits::h100_sxm(), &options)
        };
        for (batch, rows) in [(1, 1), (64, 1), (3, 300)] {
            let plan = plan(batch, rows, 1024, Dtype::Bf16).unwrap();
            let Way::Shared(shared) = plan.way() else { panic!("{plan}") };
            assert_eq!(plan.tile().tile_m, ROWS);
            assert_eq!((shared.parts(), shared.per_sm(), shared.sayings()), (16, 1, None));
            assert_eq!(shared.parts_said_by(), PartsSaidBy::Lengths);
            assert_eq!(shared.part_dims(plan.problem()), [8, (batch * rows * 32) as u32]);
        }
        let whole = plan(1, 1, 8192, Dtype::Bf16).unwrap();
        assert!(matches!(whole.way(), Way::Shared(shared) if !shared.merges()));
        let refused = |keys, rows, dtype| plan(1, rows, keys, dtype).unwrap_err().to_string();
        for keys in [0, 100] {
            let expected = format!("a piece of {keys} keys is not one or several blocks of 64 keys");
            assert_eq!(refused(keys, 1, Dtype::Bf16), expected);
        }
        assert_eq!(
            refused(1024, 1 << 20, Dtype::Bf16),
            "a sequence may have 67633152 blocks of keys in all of its tiles, more than 16777216, to cut into pieces"
        );
    }

    #[test]
    fn keys_of_e4m3_are_shared() {
        let q = Shape { batch: 2, seqlen: 1, heads: 8, head_dim: 128 };
        let kv = Shape { batch: 100, seqlen: 16, heads: 2, head_dim: 128 };
        let plan = |spec: ProblemSpec| {
            let problem = spec.seqs_k(Sequences::paged(2, 60).used()).validate().unwrap();
            let options = PlanOptions::default().split_keys(SplitKeys::Equally);
            Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).unwrap()
        };
        let converted = plan(ProblemSpec::dense(Dtype::F16, q, kv).e4m3_keys());
        let Way::Shared(shared) = converted.way() else { panic!("{converted}") };
        // Converting warps have the registers that another kernel would need.
        assert_eq!((shared.per_sm(), converted.tile().precision), (1, Precision::Converted { q: false }));
        let half = plan(ProblemSpec::dense(Dtype::F16, q, kv));
        assert_eq!(converted.tile().tile_n, half.tile().tile_n, "the same sums");
        let text = converted.to_string();
        assert!(text.contains("56 a producer, 96 a converting and 256 a consumer thread"), "{text}");
        let of_e4m3 = plan(ProblemSpec::dense(Dtype::E4m3, q, kv));
        assert!(matches!(of_e4m3.way(), Way::Shared(_)));
        let tile = CtaTile { precision: Precision::Converted { q: true }, ..converted.tile() };
        assert_eq!(of_e4m3.tile(), tile, "the same sums");
    }

    #[test]
    fn heads_of_a_group_are_rows_of_a_tile() {
        let packs = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 32, 64, 71, 128].map(|group| {
            let pack = pack(group);
            (pack, packed_positions(pack, ROWS))
        });
        let of_groups = [(1, 64), (2, 32), (3, 16), (4, 16), (5, 8), (6, 8), (7, 8), (8, 8), (3, 16)];
        let of_more = [(10, 4), (12, 4), (1, 64), (5, 8), (16, 4), (32, 2), (64, 1), (1, 64), (64, 1)];
        assert_eq!(packs[..], [of_groups, of_more].concat());
        assert!(packs.iter().all(|(pack, positions)| (pack * positions).is_multiple_of(PERIOD)));
    }
}
