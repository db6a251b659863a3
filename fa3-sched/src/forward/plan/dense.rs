//! Dense plans: sequences have one length, which the host knows, and tiles are found by their index.

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Feature, Known, Mask, Problem, ValueLayout};

use super::{Asked, v_tiles};
use crate::forward::tile_row::block_side;
use crate::forward::{CtaTile, Loads, PlanError, PlanOptions, Precision};
use crate::{
    DeviceLimits, KvRange, Makespan, Order, Schedule, Scheduler, SeqLens, TILE_COST, TileCoord, TileCounts,
    Tiling,
};

/// The features that kernels of dense plans compute.
const KNOWN: Known = Known::new(
    "the forward kernels of dense sequences",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Tree,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Qv,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Int8Keys,
        Feature::TokenScales,
        Feature::BlockScales,
        Feature::VChannels,
        Feature::TransposedV,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// One tile, and the KV blocks that it visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The part of the output that it computes.
    pub tile: TileCoord<u32>,
    /// The KV blocks that it visits.
    pub kv: KvRange<u32>,
}

/// Numbers of KV blocks that tiles visit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// KV blocks of all tiles, added up.
    pub blocks: u64,
    /// KV blocks of all tiles whose elements need masking, added up.
    pub masked_blocks: u64,
    /// KV blocks of the longest tile.
    pub longest: u32,
}

/// Plan of sequences of one length.
#[derive(Clone, Debug)]
pub struct DensePlan {
    tiling: Tiling<u32>,
    lens: SeqLens<u32>,
    schedule: Schedule,
    cluster: u32,
    v_tiles: Option<TileCounts>,
    transposed_v_bytes: u64,
    bounds_are_data: bool,
}

impl DensePlan {
    /// Decides the schedule, and the tile that is fastest for it.
    pub(super) fn new(
        asked: &Asked<'_>,
        lens: SeqLens<u32>,
        limits: &DeviceLimits,
    ) -> Result<(CtaTile, DensePlan), PlanError> {
        let &Asked { problem, tile, tiling, sms, options } = asked;
        KNOWN.check(problem)?;
        // A kernel that transposes V beforehand takes all SMs.
        let tile = if options.tile.is_none() && sms == limits.sms {
            v_tiles::fastest(problem, tile, tiling, lens)
        } else {
            tile
        };
        tile.check(limits)?;
        // Heads and the batch are below 2³¹ in every problem.
        let counts = TileCounts {
            m_blocks: lens.q.div_ceil(tile.tile_m),
            heads: problem.heads().q() as u32,
            batch: problem.batch() as u32,
        };
        let order = options.order.unwrap_or_else(|| {
            Order::choose(problem.mask(), counts, problem.heads().group_size() as u32, sms)
        });
        let scheduler = choose_scheduler(problem, &tile, counts.num_tiles()?, sms, options)?;
        let schedule = Schedule::new(counts, order, scheduler, sms)?;
        let clusters = options.clusters.unwrap_or(lens.k >= MIN_KEYS_OF_CLUSTERS);
        let cluster = if clusters && go_in_pairs(problem, &tile, counts, &schedule) { 2 } else { 1 };
        let v_tiles = v_tiles::of(problem, &tile).filter(|_| schedule.grid() > 0);
        if let Some(tiles) = v_tiles {
            tiles.num_tiles()?;
        }
        let transposed_v_bytes = v_tiles.map_or(0, |_| ValueLayout::transposed_bytes(problem.v().shape).0);
        let bounds_are_data = problem.mask().intervals().is_some();
        let dense =
            DensePlan { tiling, lens, schedule, cluster, v_tiles, transposed_v_bytes, bounds_are_data };
        Ok((tile, dense))
    }

    /// Lengths of Q and K, equal for all sequences.
    pub fn lens(&self) -> SeqLens<u32> {
        self.lens
    }

    /// The tiles of [`V_TILE_KEYS`](crate::forward::V_TILE_KEYS) keys of V, if a kernel transposes V beforehand into
    /// the workspace. It does so where many tiles of Q visit each block of e4m3 V in rows; elsewhere V is transposed in
    /// shared memory at every visit.
    pub fn v_tiles(&self) -> Option<TileCounts> {
        self.v_tiles
    }

    /// Bytes of transposed V in the workspace; 0 if there is none.
    pub fn transposed_v_bytes(&self) -> u64 {
        self.transposed_v_bytes
    }

    /// The numbering of tiles, and how they reach CTAs.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// CTAs per cluster, see [`Plan::cluster`](crate::forward::Plan::cluster).
    pub(super) fn cluster(&self) -> u32 {
        self.cluster
    }

    /// The work of each tile, in the order of tiles. Under a mask of intervals, which are data, a tile has the blocks
    /// of all keys, the most that it can have.
    pub fn works(&self) -> impl Iterator<Item = Work> {
        self.schedule.tiles().map(|tile| Work { tile, kv: self.tiling.kv_range(tile.m_block, self.lens) })
    }

    /// Simulates when and where each tile runs. A tile costs its KV blocks and [`TILE_COST`].
    pub fn simulate(&self) -> Makespan {
        self.schedule.simulate(&self.works().map(|work| work.cost()).collect::<Vec<_>>())
    }

    /// Numbers of KV blocks that tiles visit. All heads and sequences have equal numbers of blocks, so one head is
    /// counted.
    pub fn cost(&self) -> Cost {
        let m_blocks = self.lens.q.div_ceil(self.tiling.tile_m());
        let heads = u64::from(self.schedule.num_tiles().checked_div(m_blocks).unwrap_or(0));
        let m_blocks = if heads == 0 { 0 } else { m_blocks };
        let ranges = (0..m_blocks).map(|m_block| self.tiling.kv_range(m_block, self.lens));
        ranges.fold(Cost::default(), |cost, kv| Cost {
            blocks: cost.blocks + heads * u64::from(kv.blocks()),
            masked_blocks: cost.masked_blocks + heads * u64::from(kv.masked_blocks()),
            longest: cost.longest.max(kv.blocks()),
        })
    }

    /// Writes the number of tiles, and how they reach CTAs of `threads` threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let Cost { blocks, masked_blocks, longest } = self.cost();
        let (schedule, grid) = (&self.schedule, self.schedule.grid());
        let clusters =
            if self.cluster > 1 { format!(", in clusters of {}", self.cluster) } else { String::new() };
        writeln!(f, "scheduler  {}, {grid} CTAs of {threads} threads{clusters}", schedule.scheduler())?;
        writeln!(f, "tiles      {}", schedule.num_tiles())?;
        match self.bounds_are_data {
            true => writeln!(f, "KV blocks  as intervals say, at most {blocks}"),
            false => {
                writeln!(f, "KV blocks  {blocks}, {masked_blocks} of them masked, at most {longest} a tile")
            }
        }
    }

    /// Writes how much device memory is needed.
    pub(super) fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory     {} bytes for the tile counter", self.schedule.counter_bytes())?;
        if self.v_tiles.is_some() {
            write!(f, ", and {} for V, which is transposed before", self.transposed_v_bytes)?;
        }
        Ok(())
    }
}

impl Work {
    /// Cost in the model, in KV blocks.
    pub fn cost(&self) -> u64 {
        u64::from(self.kv.blocks()) + TILE_COST
    }
}

/// Chooses as [`Scheduler::choose`] does, but takes the dynamic scheduler only with a producer, which fetches tiles.
/// e4m3 kernels are always persistent. With one tile per CTA, ptxas spills registers at head_dim_v 256, which costs up
/// to 25 %; at other head dimensions both schedulers are equally fast (docs/performance.md).
fn choose_scheduler(
    problem: &Problem,
    tile: &CtaTile,
    tiles: u32,
    sms: NonZeroU32,
    options: &PlanOptions,
) -> Result<Scheduler, PlanError> {
    let draws = tile.loads == Loads::Producer;
    if problem.mask().intervals().is_some() && block_side(problem).is_none() {
        // The producer derives a tile's blocks from the bounds when it fetches the tile, and sends them to the
        // consumers.
        let scheduler = options.scheduler.unwrap_or(Scheduler::DynamicPersistent);
        return match (draws, scheduler == Scheduler::DynamicPersistent) {
            (false, _) => Err(PlanError::NoProducer { scheduler }),
            (true, false) => Err(PlanError::IntervalsScheduler { scheduler }),
            (true, true) => Ok(scheduler),
        };
    }
    let equal_tiles = problem.mask() == Mask::None;
    match options.scheduler {
        None if tile.precision.is_fp8() && tiles <= sms.get() => Ok(Scheduler::StaticPersistent),
        None => Ok(Scheduler::choose(tiles, equal_tiles || !draws, sms)),
        Some(scheduler @ Scheduler::DynamicPersistent) if !draws => Err(PlanError::NoProducer { scheduler }),
        Some(scheduler) => Ok(scheduler),
    }
}

/// Smallest number of keys for which CTAs form clusters. With fewer keys, clusters are up to 4 % slower in short runs
/// and gain nothing in long runs (docs/performance.md).
const MIN_KEYS_OF_CLUSTERS: u32 = 1024;

/// Whether CTAs compute neighbouring tiles that need the same keys at the same time. They do if tiles are equal, the
/// scheduler is static round robin, and each KV head has an even number of tiles. In 8 bits, clusters of such CTAs are
/// slower (docs/performance.md).
fn go_in_pairs(problem: &Problem, tile: &CtaTile, counts: TileCounts, schedule: &Schedule) -> bool {
    let loads_ahead = tile.precision == Precision::Half && tile.loads == Loads::Producer;
    let alike = problem.mask() == Mask::None && schedule.order() == Order::Linear;
    let in_turn = schedule.scheduler() == Scheduler::StaticPersistent;
    // With few rows, loads of K and V are the bottleneck, and clusters were not measured.
    let many_rows = counts.m_blocks > 1;
    let tiles_a_head = counts.m_blocks as usize * problem.heads().group_size();
    let even = tiles_a_head.is_multiple_of(2) && schedule.grid().is_multiple_of(2);
    // Each CTA loads half of a block's keys, and rows are swizzled in groups of eight.
    loads_ahead && alike && in_turn && many_rows && even && tile.tile_n.is_multiple_of(16)
}
