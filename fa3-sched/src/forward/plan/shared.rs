//! Split-KV: keys that CTAs share in decoding, whose rows of Q are few, or with any rows, in pieces that do not depend
//! on the batch.

mod tiles;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Feature, Known, Problem};

use super::listed::{latent_rows, memory_rows};
use crate::forward::{CtaTile, PlanError, PlanOptions, SplitKeys, TileRow};
use crate::packed::{self, MemoryRows, Side};
use crate::{Shares, Tiling};
use tiles::tile;

/// The features that split-KV kernels compute. They dequantize e4m3 to 16 bits.
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

/// Rows of a tile: one consumer warpgroup's, or shared by two warpgroups that divide the columns of O.
pub(super) const ROWS: u32 = 64;

/// Rows of Q that one copy moves are a multiple of this, a period of the swizzle.
const PERIOD: u32 = 8;

/// The most twins. H100 and H200 have 132 SMs, which 2, 3 and 4 divide.
const MOST_TWINS: u32 = 4;

/// Limit of the places of a sequence: the device divides them by a number that it alone knows, exactly below this
/// limit.
const PLACES: u32 = 1 << 24;

/// Parts per unit for which the reduction of pieces is planned, whatever the lengths: the warps that merge a row decide
/// the order of sums.
const PARTS_OF_PIECES: u32 = 16;

/// Split-KV work decomposition: tiles of 64 rows, and for each CTA about equally many blocks of keys, or pieces of a
/// fixed size, whatever the lengths. The query heads of a group are rows of one tile (PackGQA).
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

/// How units are split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// At the ends of equal shares. The start of a unit counts as `extra` blocks. `units` is the number of units, if it
    /// is known and at most the number of CTAs.
    Equally { extra: u32, units: Option<u32> },
    /// In pieces of `blocks` blocks. A unit has at most `most` pieces.
    Pieces { blocks: u32, most: u32 },
}

/// Where the reduction kernel reads which parts of units to merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PartsSaidBy {
    /// From each unit's entry.
    Units,
    /// From each CTA's entry. It is about the unit that begins in the CTA and continues in the next.
    Ctas,
    /// From the lengths of sequences.
    Lengths,
}

/// With at most this many KV blocks per CTA, consumers use half of the register file, so that the reduction kernel's
/// CTAs are already resident when the last split ends. On an H100 one sequence of 1024 keys then takes 7.4 us instead
/// of 8.0, but 16 sequences of 4096 keys take 98.7 instead of 95.8.
const FEW_BLOCKS: u64 = 4;

/// Cost of the split-KV reduction in units of one KV block, and the elements of O per CTA that add one more unit.
const SLACK: u32 = 4;
const SLACK_ELEMENTS: u32 = 4096;

/// Positions of Q whose keys are split whatever number of tiles their heads take: a token and a few speculative ones. A
/// tile of one head would have no more rows than this.
const FEW: usize = 8;

/// Query heads that are rows of one tile (PackGQA): as many of a group as one copy can move.
fn pack(group: u32) -> u32 {
    let fits = |heads: u32| heads * positions_multiple(heads) <= ROWS;
    (1..=group.min(ROWS)).rev().find(|&heads| group.is_multiple_of(heads) && fits(heads)).unwrap_or(1)
}

/// Query positions in a tile of `rows` rows, which has `pack` query heads.
pub fn packed_positions(pack: u32, rows: u32) -> u32 {
    let multiple = positions_multiple(pack);
    rows / pack / multiple * multiple
}

/// Granularity of a tile's positions.
fn positions_multiple(pack: u32) -> u32 {
    PERIOD / (1 << pack.trailing_zeros().min(3))
}

/// Number of tiles that read the same keys at the same time, of `tiles` tiles of a group's heads. It leaves few SMs
/// without work.
fn twins(tiles: u32) -> u32 {
    (1..=MOST_TWINS).rev().find(|&twins| tiles.is_multiple_of(twins)).unwrap_or(1)
}

/// Rows of a unit, estimated from the longest sequence.
fn unit_rows(problem: &Problem, pack: u32) -> u32 {
    (problem.longest().q as u32 * pack).clamp(1, ROWS)
}

/// Number of LSE entries, which is below 2³²: see [`PlanError::PieceRows`].
fn rows_of_lse(problem: &Problem) -> u32 {
    problem.lse_shape().into_iter().map(|extent| extent as u32).product()
}

/// Blocks of a piece of `keys` keys.
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
    /// Decides the decomposition, the tile and the tiling. `None` if the options do not split keys or Q has no rows;
    /// with equal shares also if a tile is given, a sequence has many rows, or there are more blocks than can be
    /// numbered.
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
        // The most places of one sequence. The places of all sequences must be fewer than 2³¹.
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
        // Starts are free if there are enough CTAs for all units.
        let extra = u32::from(u64::from(heads) * problem.batch() as u64 > ctas.into());
        let about = (problem.longest().k as u64).div_ceil(tile.tile_n.into());
        let is_short = about * u64::from(heads) * problem.batch() as u64 <= FEW_BLOCKS * u64::from(ctas);
        // Where results must not depend on other sequences, kernels must not, either.
        let per_sm = if is_slim && is_short && piece.is_none() { 2 } else { 1 };
        let (rows, latent_rows) = (memory_rows(problem)?, latent_rows(problem)?);
        // All sequences of a dense tensor have equally many.
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

    /// The reason for these tiles.
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

    /// Query heads that are rows of one tile (PackGQA): row r has head r mod `pack` and position r / `pack`.
    pub fn pack(&self) -> u32 {
        self.pack
    }

    /// Number of tiles, of different heads, that have the same positions.
    pub fn heads(&self) -> u32 {
        self.heads
    }

    /// Whether several tiles of a group's heads read the same keys at the same time ([`Shares::of_twins`]).
    pub fn has_twins(&self) -> bool {
        self.twins > 1
    }

    /// Query positions per tile.
    pub fn positions(&self) -> u32 {
        self.positions
    }

    /// CTAs for which an SM has registers: two where a CTA of the next kernel may start beside one of these.
    pub fn per_sm(&self) -> u32 {
        self.per_sm
    }

    /// Number of CTAs, at least one.
    pub fn ctas(&self) -> u32 {
        self.ctas
    }

    /// The numbers that determine each CTA's share.
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

    /// Where the reduction kernel reads which parts of units to merge: from entries of units if the number of units is
    /// known and at most the number of CTAs, otherwise from entries of CTAs; with pieces, from lengths.
    pub fn parts_said_by(&self) -> PartsSaidBy {
        match self.split {
            Split::Equally { units: Some(_), .. } => PartsSaidBy::Units,
            Split::Equally { units: None, .. } => PartsSaidBy::Ctas,
            Split::Pieces { .. } => PartsSaidBy::Lengths,
        }
    }

    /// Number of units or CTAs that have entries for the reduction; `None` if parts follow from lengths.
    pub fn sayings(&self) -> Option<u32> {
        match self.split {
            Split::Equally { units, .. } => Some(units.unwrap_or(self.ctas)),
            Split::Pieces { .. } => None,
        }
    }

    /// Slots of partial results, and rows per slot. With equal shares each CTA has two slots of a tile's rows. With
    /// pieces there is a slot for each piece of a unit, with the rows of O of all query heads.
    pub fn part_dims(&self, problem: &Problem) -> [u32; 2] {
        match self.split {
            Split::Equally { .. } => [2 * self.ctas, ROWS],
            Split::Pieces { most, .. } => [most, rows_of_lse(problem)],
        }
    }

    /// Whether a unit may have several parts.
    pub fn merges(&self) -> bool {
        !matches!(self.split, Split::Pieces { most: 1, .. })
    }

    /// Rows of a unit, estimated from the longest sequence.
    pub fn unit_rows(&self, problem: &Problem) -> u32 {
        unit_rows(problem, self.pack)
    }

    /// Parts per unit for which the reduction is planned: their number if all units are equally long, or with pieces a
    /// number that does not depend on other sequences.
    pub fn parts(&self) -> u32 {
        match self.split {
            Split::Equally { units, .. } => units.map_or(1, |units| self.ctas / units.max(1)) + 1,
            Split::Pieces { .. } => PARTS_OF_PIECES,
        }
    }

    /// Writes how units reach CTAs of `threads` threads.
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

    /// Writes how much device memory is needed.
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

    /// The plan of `batch` sequences with `rows` rows of Q and `pages` pages of 16 rows each.
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
        // More work units than CTAs: the plan states the unit that begins in each CTA.
        let many = shared(64, 1, 256, (32, 8)).unwrap();
        assert_eq!((many.ctas(), many.sayings(), many.per_sm(), many.parts()), (132, Some(132), 1, 2));
        assert_eq!([one, many].map(|of| of.parts_said_by()), [PartsSaidBy::Units, PartsSaidBy::Ctas]);
        // 17 rows of four heads exceed a tile. An empty problem has no split-KV.
        assert!(shared(1, 16, 64, (32, 8)).is_some());
        assert!(shared(1, 17, 64, (32, 8)).is_none());
        // Sequences of a few positions use split-KV, for any number of tiles of their heads.
        let two = shared(4, 8, 64, (128, 1)).unwrap();
        assert_eq!((two.pack(), two.positions(), two.heads(), two.sayings()), (64, 1, 2, Some(64)));
        assert!(shared(4, 9, 64, (128, 1)).is_none());
        assert!(shared(0, 1, 64, (32, 8)).is_none() && shared(1, 0, 64, (32, 8)).is_none());
        // A sequence with more blocks than exact division supports.
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
        // The dequantizing warps use the registers that a second CTA would need.
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
