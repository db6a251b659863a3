//! Keys that CTAs share: decoding, whose rows of Q are few.

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::Problem;

use super::listed::memory_rows;
use crate::forward::{CtaTile, Loads, Pipeline, PlanError, PlanOptions, Precision};
use crate::packed::{self, MemoryRows, Side};
use crate::{Shares, Tiling};

/// Rows of a tile: one consumer warpgroup's.
pub(super) const ROWS: u32 = 64;

/// Rows of Q that are copied at once are a multiple of so many, a period of the swizzle.
const PERIOD: u32 = 8;

/// The places of a sequence are divided by a number that only the device knows, which is exact below this.
const PLACES: u32 = 1 << 24;

/// Tiles of 64 rows in which each CTA computes as many blocks of keys as any other, whatever the lengths. Query heads
/// of a group are rows of one tile.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    sequences: packed::Plan,
    rows: [MemoryRows; 3],
    pack: u32,
    positions: u32,
    heads: u32,
    per_sm: u32,
    ctas: u32,
    extra: u32,
    units: Option<u32>,
}

/// A row of the table: a head dimension of Q and K, and of V, the keys of a block, stages, and whether consumers can do
/// with half of an SM's registers.
type Row = (u32, u32, u32, u32, bool);

/// 64 KiB under way are what HBM needs of an SM. On an H100 two CTAs an SM, with fewer stages each, were slower in
/// every case: 9.4 us against 7.5 for one sequence of 1024 keys, 101 against 98 for 16 of 4096.
const HALF: [Row; 6] = [
    (64, 64, 128, 4, true),
    (96, 96, 64, 5, true),
    (128, 128, 64, 4, true),
    (192, 128, 64, 3, true),
    (192, 192, 64, 3, false),
    (256, 256, 64, 2, false),
];

/// The same for e4m3 that is converted: as many bytes under way take as many stages more as elements have fewer, and
/// converted blocks lie beside them. Warps that convert leave no registers to another kernel (not measured).
const CONVERTED: [Row; 6] = [
    (64, 64, 128, 6, false),
    (96, 96, 64, 8, false),
    (128, 128, 64, 6, false),
    (192, 128, 64, 5, false),
    (192, 192, 64, 4, false),
    (256, 256, 64, 2, false),
];

/// Where CTAs have so few blocks, they leave half of the registers to those of the kernel that merges, which are there
/// then when the last of these ends. On an H100 one sequence of 1024 keys takes 7.4 us so, and 8.0 otherwise; 16
/// sequences of 4096 keys take 98.7 and 95.8.
const FEW_BLOCKS: u64 = 4;

/// The tile of a problem, if there is one, and whether consumers can do with half of an SM's registers.
fn tile(problem: &Problem) -> Option<(CtaTile, bool)> {
    let precision = Precision::of(problem);
    let table = match precision {
        Precision::Half => HALF,
        Precision::Converted => CONVERTED,
        Precision::Fp8(_) => return None,
    };
    let tiles = table.into_iter().map(|(head_dim, head_dim_v, tile_n, stages, is_slim)| {
        let tile = CtaTile {
            head_dim,
            head_dim_v,
            precision,
            tile_m: ROWS,
            tile_n,
            stages,
            consumers: 1,
            loads: Loads::Producer,
            pipeline: Pipeline::Paired,
            ping_pong: false,
        };
        (tile, is_slim)
    });
    tiles.into_iter().find(|(tile, _)| tile.takes(problem))
}

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

impl Shared {
    /// Decides everything about them, if this is how the problem is to be computed: it has rows of Q, few of a
    /// sequence, and not more keys than can be numbered. Gives the tile and how matrices are cut, too.
    pub(super) fn new(
        problem: &Problem,
        sms: NonZeroU32,
        options: &PlanOptions,
    ) -> Result<Option<(CtaTile, Tiling<u32>, Shared)>, PlanError> {
        let group = problem.heads().group_size() as u32;
        let pack = pack(group);
        let is_wanted = options.split_keys && options.tile.is_none();
        if !is_wanted || problem.longest().q.saturating_mul(pack as usize) > ROWS as usize {
            return Ok(None);
        }
        let Some((tile, is_slim)) = tile(problem) else { return Ok(None) };
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
        if are_too_many || problem.batch() == 0 || !sequences.has_rows() {
            return Ok(None);
        }
        let ctas = u64::from(sms.get()).min(blocks.saturating_mul(units)) as u32;
        // A start is free where there are CTAs enough for each.
        let extra = u32::from(u64::from(heads) * problem.batch() as u64 > ctas.into());
        let about = (problem.longest().k as u64).div_ceil(tile.tile_n.into());
        let is_short = about * u64::from(heads) * problem.batch() as u64 <= FEW_BLOCKS * u64::from(ctas);
        let per_sm = if is_slim && is_short { 2 } else { 1 };
        let rows = memory_rows(problem)?;
        // All sequences of a dense tensor have as many.
        let units = u64::from(heads) * u64::from(sequences.most_blocks()) * problem.batch() as u64;
        let units = (!sides[0].arrays.cu_seqlens && units <= ctas.into()).then_some(units as u32);
        Ok(Some((
            tile,
            tiling,
            Shared { sequences, rows, pack, positions, heads, per_sm, ctas, extra, units },
        )))
    }

    /// The sequences, cut into tiles of positions.
    pub fn sequences(&self) -> &packed::Plan {
        &self.sequences
    }

    /// The rows of Q, K and V in memory.
    pub fn rows(&self) -> [MemoryRows; 3] {
        self.rows
    }

    /// Query heads that are rows of one tile: row r is of head r mod `pack` and of position r / `pack`.
    pub fn pack(&self) -> u32 {
        self.pack
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
        Shares::new(self.heads, self.ctas, self.extra, self.sequences.cut())
    }

    /// Results of parts of units that CTAs leave: two each.
    pub fn slots(&self) -> u32 {
        2 * self.ctas
    }

    /// The number of units, if it is known and they are no more than CTAs. Each then says what is to be merged of it.
    /// Otherwise each CTA says so of the unit that begins in it and goes on.
    pub fn units(&self) -> Option<u32> {
        self.units
    }

    /// Rows of a unit, as far as is known.
    pub fn unit_rows(&self, problem: &Problem) -> u32 {
        (problem.longest().q as u32 * self.pack).clamp(1, ROWS)
    }

    /// Parts of a unit, if all are as long.
    pub fn parts(&self) -> u32 {
        self.units.map_or(1, |units| self.ctas / units.max(1)) + 1
    }

    /// Writes how units reach CTAs of so many threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let Shared { pack, positions, ctas, .. } = self;
        writeln!(f, "rows       {positions} positions of {pack} query heads a tile")?;
        writeln!(f, "scheduler  equal shares of all keys, {ctas} CTAs of {threads} threads")
    }

    /// Writes what they take of the device's memory.
    pub(super) fn write_memory(&self, f: &mut fmt::Formatter<'_>, tile: &CtaTile) -> fmt::Result {
        let bytes = 4 * u64::from(self.slots()) * u64::from(ROWS * (tile.head_dim_v + 1));
        write!(f, "memory     {bytes} bytes for parts of O and LSE, and {} to find them", 32 * self.ctas)
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape};

    use super::*;
    use crate::DeviceLimits;
    use crate::forward::{Plan, Way};

    /// The plan of `rows` rows of Q of each of `batch` sequences, in pages of 16 rows, `pages` of each.
    fn plan(batch: usize, rows: usize, pages: usize, heads: (usize, usize)) -> Plan {
        let q = Shape { batch, seqlen: rows, heads: heads.0, head_dim: 128 };
        let kv = Shape { batch: 1000, seqlen: 16, heads: heads.1, head_dim: 128 };
        let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).mask(Mask::Causal);
        let problem = spec.seqs_k(Sequences::paged(batch, pages).used()).validate().unwrap();
        Plan::with(&problem, &DeviceLimits::h100_sxm(), &PlanOptions::default().split_keys()).unwrap()
    }

    #[test]
    fn few_rows_share_keys() {
        let shared = |batch, rows, pages, heads| match plan(batch, rows, pages, heads).way() {
            Way::Shared(shared) => Some(*shared),
            Way::Numbered(_) | Way::Listed(_) => None,
        };
        let one = shared(1, 1, 64, (32, 8)).unwrap();
        assert_eq!(
            (one.ctas(), one.units(), one.pack(), one.positions(), one.per_sm()),
            (132, Some(8), 4, 16, 2)
        );
        assert_eq!(
            (one.parts(), one.slots(), plan(1, 1, 64, (32, 8)).pages().unwrap().block_rows),
            (17, 264, 16)
        );
        // More units than CTAs: each CTA says which one begins in it.
        let many = shared(64, 1, 256, (32, 8)).unwrap();
        assert_eq!((many.ctas(), many.units(), many.per_sm(), many.parts()), (132, None, 1, 2));
        // 17 rows of four heads are more than a tile; nothing is shared where there is nothing.
        assert!(shared(1, 16, 64, (32, 8)).is_some());
        assert!(shared(1, 17, 64, (32, 8)).is_none());
        assert!(shared(0, 1, 64, (32, 8)).is_none() && shared(1, 0, 64, (32, 8)).is_none());
        // More blocks of a sequence than can be divided exactly.
        assert!(shared(1, 1, 1 << 26, (32, 32)).is_none());
    }

    #[test]
    fn keys_of_e4m3_are_shared_beside_queries_of_16_bits() {
        let q = Shape { batch: 2, seqlen: 1, heads: 8, head_dim: 128 };
        let kv = Shape { batch: 100, seqlen: 16, heads: 2, head_dim: 128 };
        let plan = |spec: ProblemSpec| {
            let problem = spec.seqs_k(Sequences::paged(2, 60).used()).validate().unwrap();
            let options = PlanOptions::default().split_keys();
            Plan::with(&problem, &DeviceLimits::h100_sxm(), &options).unwrap()
        };
        let converted = plan(ProblemSpec::dense(Dtype::F16, q, kv).e4m3_keys());
        let Way::Shared(shared) = converted.way() else { panic!("{converted}") };
        // Converting warps have the registers that another kernel would need.
        assert_eq!((shared.per_sm(), converted.tile().precision), (1, Precision::Converted));
        let half = plan(ProblemSpec::dense(Dtype::F16, q, kv));
        assert_eq!(converted.tile().tile_n, half.tile().tile_n, "the same sums");
        let text = converted.to_string();
        assert!(text.contains("56 a producer, 96 a converting and 256 a consumer thread"), "{text}");
        let fp8 = plan(ProblemSpec::dense(Dtype::E4m3, q, kv));
        assert!(matches!(fp8.way(), Way::Listed(_)) && fp8.pages().is_some());
        for ((head_dim, head_dim_v, keys, ..), converted) in HALF.into_iter().zip(CONVERTED) {
            assert_eq!(
                (head_dim, head_dim_v, keys),
                (converted.0, converted.1, converted.2),
                "the same sums"
            );
        }
    }

    #[test]
    fn every_tile_fits() {
        for (head_dim, head_dim_v, ..) in HALF {
            let [head_dim, head_dim_v] = [head_dim, head_dim_v].map(|columns| columns as usize);
            let shape = Shape { batch: 1, seqlen: 1, heads: 1, head_dim };
            let spec = ProblemSpec::dense(Dtype::Bf16, shape, shape).head_dim_v(head_dim_v);
            for spec in [spec.clone(), spec.e4m3_keys()] {
                let (tile, _) = tile(&spec.validate().unwrap()).unwrap();
                assert_eq!(tile.check(&DeviceLimits::h100_sxm()), Ok(()), "{tile}");
            }
        }
    }

    #[test]
    fn heads_of_a_group_are_rows_of_a_tile() {
        let packs = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 32, 64, 71, 128].map(|group| {
            let pack = pack(group);
            (pack, packed_positions(pack, ROWS))
        });
        let expected = [
            (1, 64),
            (2, 32),
            (3, 16),
            (4, 16),
            (5, 8),
            (6, 8),
            (7, 8),
            (8, 8),
            (3, 16),
            (10, 4),
            (12, 4),
            (1, 64),
            (5, 8),
            (16, 4),
            (32, 2),
            (64, 1),
            (1, 64),
            (64, 1),
        ];
        assert_eq!(packs, expected);
        assert!(packs.iter().all(|(pack, positions)| (pack * positions).is_multiple_of(PERIOD)));
    }
}
