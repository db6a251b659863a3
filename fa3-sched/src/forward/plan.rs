//! Everything that is decided before a forward kernel is built and launched.

mod v_tiles;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Dtype, Mask, Problem, ValueLayout};

use super::{CtaTile, Loads, PlanError, PlanOptions, Precision, Registers, TileRow};
use crate::dense::dense_lens;
use crate::{
    DeviceLimits, KvRange, Lens, Makespan, Order, Schedule, Scheduler, TILE_COST, Tile, TileCounts, Tiling,
};

pub use v_tiles::V_TILE_KEYS;

/// One tile, and the KV blocks that it visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// The part of the output that it computes.
    pub tile: Tile<u32>,
    /// The KV blocks that it visits.
    pub kv: KvRange<u32>,
}

/// The KV blocks that all tiles visit together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// KV blocks.
    pub blocks: u64,
    /// KV blocks whose elements need masking.
    pub masked_blocks: u64,
    /// KV blocks of the longest tile.
    pub longest: u32,
}

/// How a problem is computed on a device: the kernel's tile and everything that its launch needs. A plan exists only if
/// a forward kernel runs it.
///
/// ```
/// use fa3_sched::{DeviceLimits, Scheduler};
/// use fa3_sched::forward::Plan;
/// use fa3_types::{Dtype, ProblemSpec, Shape};
///
/// let shape = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
/// let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
/// let plan = Plan::new(&problem, &DeviceLimits::h100_sxm())?;
/// let schedule = plan.schedule();
/// assert_eq!((schedule.num_tiles(), schedule.grid(), plan.tile().threads()), (1024, 132, 384));
/// assert_eq!(schedule.scheduler(), Scheduler::DynamicPersistent);
/// assert_eq!(plan.works().next().unwrap().kv.blocks(), 32); // the longest tile comes first
/// println!("{plan}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Problem,
    tile: CtaTile,
    why: &'static str,
    tiling: Tiling<u32>,
    lens: Lens<u32>,
    schedule: Schedule,
    cluster: u32,
    v_tiles: Option<TileCounts>,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`PlanError`] if no forward kernel computes the problem, or not on this device.
    pub fn new(problem: &Problem, limits: &DeviceLimits) -> Result<Plan, PlanError> {
        Plan::with(problem, limits, &PlanOptions::default())
    }

    /// Decides what `options` leave open.
    ///
    /// # Errors
    /// [`PlanError`] if no forward kernel computes the problem, or not on this device or with these options.
    pub fn with(problem: &Problem, limits: &DeviceLimits, options: &PlanOptions) -> Result<Plan, PlanError> {
        check_dtypes(problem)?;
        problem.check_rows().map_err(Box::new)?;
        let lens = dense_lens(problem)?;
        let (tile, why) = choose_tile(problem, options)?;
        let tiling =
            Tiling::new(tile.tile_m, tile.tile_n, problem.heads().group_size() as u32, problem.mask());
        let sms = options.sms.map_or(limits.sms, |sms| sms.min(limits.sms));
        // The kernel that transposes V takes all SMs.
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
        let scheduler = choose_scheduler(problem, &tile, counts.numbered()?, sms, options)?;
        let schedule = Schedule::new(counts, order, scheduler, sms)?;
        let clusters = options.clusters.unwrap_or(lens.k >= MIN_KEYS_OF_CLUSTERS);
        let cluster = if clusters && go_in_pairs(problem, &tile, counts, &schedule) { 2 } else { 1 };
        let v_tiles = v_tiles::of(problem, &tile).filter(|_| schedule.grid() > 0);
        if let Some(tiles) = v_tiles {
            tiles.numbered()?;
        }
        Ok(Plan { problem: problem.clone(), tile, why, tiling, lens, schedule, cluster, v_tiles })
    }

    /// The problem.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The tile.
    pub fn tile(&self) -> CtaTile {
        self.tile
    }

    /// How each head's attention matrix is cut.
    pub fn tiling(&self) -> Tiling<u32> {
        self.tiling
    }

    /// Rows of Q and of K, the same for every sequence.
    pub fn lens(&self) -> Lens<u32> {
        self.lens
    }

    /// The tiles of [`V_TILE_KEYS`](super::V_TILE_KEYS) keys of V, if a kernel transposes it before, into memory of the
    /// workspace. That is so where many tiles of Q visit each block of e4m3 V in rows; elsewhere it is transposed at
    /// every visit, in shared memory.
    pub fn v_tiles(&self) -> Option<TileCounts> {
        self.v_tiles
    }

    /// Bytes that V takes in the workspace, if it is transposed there; otherwise 0.
    pub fn transposed_v_bytes(&self) -> u64 {
        self.v_tiles.map_or(0, |_| ValueLayout::transposed_bytes(self.problem.v().shape).0)
    }

    /// The numbering of tiles, and how they reach CTAs.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// CTAs of a cluster: one, or two that compute neighbouring tiles of a head of K and V at a time, each of which
    /// loads half of K and V for both.
    pub fn cluster(&self) -> u32 {
        self.cluster
    }

    /// The work of each tile, in the order of tiles.
    pub fn works(&self) -> impl Iterator<Item = Work> {
        self.schedule.tiles().map(|tile| Work { tile, kv: self.tiling.kv_range(tile.m_block, self.lens) })
    }

    /// When and where each tile runs in the cost model: it costs its KV blocks and [`TILE_COST`].
    pub fn simulate(&self) -> Makespan {
        self.schedule.simulate(&self.works().map(|work| work.cost()).collect::<Vec<_>>())
    }

    /// The KV blocks that all tiles visit together.
    pub fn cost(&self) -> Cost {
        self.works().fold(Cost::default(), |cost, Work { kv, .. }| Cost {
            blocks: cost.blocks + u64::from(kv.blocks()),
            masked_blocks: cost.masked_blocks + u64::from(kv.masked_blocks()),
            longest: cost.longest.max(kv.blocks()),
        })
    }
}

impl Work {
    /// In the cost model, in KV blocks.
    pub fn cost(&self) -> u64 {
        u64::from(self.kv.blocks()) + TILE_COST
    }
}

/// The elements that the forward kernels take.
fn check_dtypes(problem: &Problem) -> Result<(), PlanError> {
    let (dtype, output) = (problem.dtype(), problem.o().dtype);
    let writes = match dtype {
        Dtype::F32 => return Err(PlanError::Dtype { dtype }),
        Dtype::F16 | Dtype::Bf16 => output == dtype,
        Dtype::E4m3 => matches!(output, Dtype::F16 | Dtype::Bf16),
    };
    if !writes {
        return Err(PlanError::Output { dtype, output });
    }
    Ok(())
}

/// The tile, and why it is this one.
fn choose_tile(problem: &Problem, options: &PlanOptions) -> Result<(CtaTile, &'static str), PlanError> {
    let Some(tile) = options.tile else {
        let row = TileRow::find(problem)?;
        return Ok((row.tile, row.why));
    };
    let needed = Precision::of(problem);
    if !tile.precision.takes(needed) {
        return Err(PlanError::Precision { given: tile.precision, needed });
    }
    if !tile.takes(problem) {
        let (most, most_v) = (tile.head_dim, tile.head_dim_v);
        let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
        return Err(PlanError::Narrow { most, most_v, head_dim, head_dim_v });
    }
    Ok((tile, "given, not the table's choice"))
}

/// [`Scheduler::choose`], and never one that draws tiles where there is no producer to do so. Kernels of e4m3 are
/// persistent however few tiles there are: of those of one tile a CTA and head_dim_v 256 ptxas spills registers, which
/// costs up to 25 %, and elsewhere both are as fast (docs/performance.md).
fn choose_scheduler(
    problem: &Problem,
    tile: &CtaTile,
    tiles: u32,
    sms: NonZeroU32,
    options: &PlanOptions,
) -> Result<Scheduler, PlanError> {
    let draws = tile.loads == Loads::Producer;
    let equal_tiles = problem.mask() == Mask::None;
    match options.scheduler {
        None if tile.precision.is_fp8() && tiles <= sms.get() => Ok(Scheduler::StaticPersistent),
        None => Ok(Scheduler::choose(tiles, equal_tiles || !draws, sms)),
        Some(scheduler @ Scheduler::DynamicPersistent) if !draws => Err(PlanError::NoProducer { scheduler }),
        Some(scheduler) => Ok(scheduler),
    }
}

/// The fewest keys for which CTAs form clusters. With fewer, clusters are up to 4 % slower in short runs and gain
/// nothing in long ones (docs/performance.md).
const MIN_KEYS_OF_CLUSTERS: u32 = 1024;

/// Whether CTAs compute neighbouring tiles at a time that need the same keys: equal tiles, dealt in turn, an even
/// number of them for a head of K and V. In 8 bits, clusters of such CTAs are slower (docs/performance.md).
fn go_in_pairs(problem: &Problem, tile: &CtaTile, counts: TileCounts, schedule: &Schedule) -> bool {
    let loads_ahead = tile.precision == Precision::Half && tile.loads == Loads::Producer;
    let alike = problem.mask() == Mask::None && schedule.order() == Order::Linear;
    let in_turn = schedule.scheduler() == Scheduler::StaticPersistent;
    // Few rows are bound by the loads of K and V: not measured.
    let many_rows = counts.m_blocks > 1;
    let tiles_a_head = counts.m_blocks as usize * problem.heads().group_size();
    let even = tiles_a_head.is_multiple_of(2) && schedule.grid().is_multiple_of(2);
    // Each loads half of a block's keys, and rows are swizzled in groups of eight.
    loads_ahead && alike && in_turn && many_rows && even && tile.tile_n.is_multiple_of(16)
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { blocks, masked_blocks, longest } = self.cost();
        let Registers { entry, producer, consumer } = self.tile.registers();
        let (tile, heads, schedule) = (&self.tile, self.problem.heads(), &self.schedule);
        writeln!(f, "problem    {}", self.problem)?;
        writeln!(f, "tile       {tile}")?;
        writeln!(f, "           {}", self.why)?;
        writeln!(f, "heads      {} of Q, {} of K and V", heads.q(), heads.kv())?;
        writeln!(f, "order      {}", schedule.order())?;
        let (grid, threads) = (schedule.grid(), tile.threads());
        let clusters =
            if self.cluster > 1 { format!(", in clusters of {}", self.cluster) } else { String::new() };
        writeln!(f, "scheduler  {}, {grid} CTAs of {threads} threads{clusters}", schedule.scheduler())?;
        writeln!(f, "tiles      {}", schedule.num_tiles())?;
        writeln!(f, "KV blocks  {blocks}, {masked_blocks} of them masked, at most {longest} a tile")?;
        match producer {
            Some(producer) => writeln!(
                f,
                "registers  {entry} at entry, then {producer} a producer and {consumer} a consumer thread"
            )?,
            None => writeln!(f, "registers  {entry} a thread")?,
        }
        writeln!(f, "           {} of them hold S, P and O", tile.accumulators().total())?;
        writeln!(f, "shared     {}", tile.smem())?;
        write!(f, "memory     {} bytes for the tile counter", schedule.counter_bytes())?;
        if self.v_tiles.is_some() {
            write!(f, ", and {} for V, which is transposed before", self.transposed_v_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
