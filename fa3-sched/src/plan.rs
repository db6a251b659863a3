//! Everything that is decided before a forward kernel is built and launched.

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Mask, Problem};

use crate::runs::{Cut, Equals, TILE_LIMIT};
use crate::{
    DeviceLimits, KvRange, Loads, Longest, Makespan, Order, PlanError, Registers, Run, Scheduler, SplitQuery,
    TILE_COST, Tile, TileQuery, TileRow, Tiling, num_splits, packs_gqa,
};

/// What a caller may decide instead of [`Plan::new`]; everything is open by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// The tile. It must serve the problem's types and head dimensions.
    pub row: Option<TileRow>,
    /// Whether to pack the query heads of a group into one tile.
    pub pack_gqa: Option<bool>,
    /// In how many parts to compute each KV range. One part, with `row` and `pack_gqa` given as well, makes a
    /// row's result independent of its batch: each of the three changes the order of sums.
    pub splits: Option<NonZeroU32>,
    /// The order of tiles.
    pub order: Option<Order>,
    /// How tiles reach CTAs.
    pub scheduler: Option<Scheduler>,
}

/// Device memory that a launch needs besides its tensors, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workspace {
    /// O of each split in fp32, (splits, rows of O, head_dim_v); 0 without splits.
    pub partial_o: u64,
    /// LSE of each split in fp32, (splits, rows of O); 0 without splits.
    pub partial_lse: u64,
    /// The tile counter of [`Scheduler::DynamicPersistent`], 0 at every launch.
    pub counter: u64,
}

/// One tile, and the KV blocks of its split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// What it computes.
    pub tile: Tile<u32>,
    /// What it visits.
    pub kv: KvRange<u32>,
}

/// What all tiles visit together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// KV blocks.
    pub blocks: u64,
    /// KV blocks whose elements need masking.
    pub masked_blocks: u64,
    /// KV blocks of the longest tile.
    pub longest: u32,
}

/// How a problem is computed on a device: the kernel's tile and everything that its launch needs. Plain
/// numbers, consistent with each other; [`Plan::new`] makes them, [`Plan::with`] with some of them given.
///
/// ```
/// use fa3_sched::{DeviceLimits, Plan, Scheduler};
/// use fa3_types::{Dtype, ProblemSpec, Shape};
///
/// let shape = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
/// let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
/// let plan = Plan::new(&problem, &DeviceLimits::h100_sxm())?;
/// assert_eq!((plan.num_tiles, plan.grid, plan.row.shape.threads()), (1024, 132, 384));
/// assert_eq!(plan.scheduler, Scheduler::DynamicPersistent);
/// assert_eq!(plan.tiles().next().unwrap().kv.blocks(), 32); // the longest tile comes first
/// println!("{plan}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// What is computed.
    pub problem: Problem,
    /// The tile, and why it is this one.
    pub row: TileRow,
    /// How each head's attention matrix is cut. It knows whether query heads are packed, and then its tiles may
    /// have fewer rows than the row's: as many as whole groups fill.
    pub tiling: Tiling<u32>,
    /// The order of tiles. Runs of sequences follow it too.
    pub order: Order,
    /// How tiles reach CTAs.
    pub scheduler: Scheduler,
    /// Parts of each KV range, the same number for every sequence: see [`num_splits`].
    pub splits: u32,
    /// The numbering of tiles: one run if all sequences have equal lengths, none if there are no tiles.
    pub runs: Vec<Run<u32>>,
    /// Number of tiles, splits included.
    pub num_tiles: u32,
    /// Number of CTAs; 0 if there are no tiles, and then nothing is to be launched.
    pub grid: u32,
    /// The device's SMs.
    pub sms: NonZeroU32,
    /// Device memory besides the tensors.
    pub workspace: Workspace,
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn new(problem: &Problem, limits: &DeviceLimits) -> Result<Plan, PlanError> {
        Plan::with(problem, limits, &PlanOptions::default())
    }

    /// Decides what `options` leave open.
    ///
    /// # Errors
    /// See [`PlanError`].
    pub fn with(problem: &Problem, limits: &DeviceLimits, options: &PlanOptions) -> Result<Plan, PlanError> {
        let equals = Equals::of(problem);
        let (row, cut) = choose_tile(problem, limits, &equals, options)?;
        let splits = match options.splits {
            Some(splits) => splits.get(),
            None => choose_splits(problem, limits, &equals, &row, &cut)?,
        };
        let order = options.order.unwrap_or_else(|| choose_order(problem, limits, &equals, &cut));
        let tiling = cut.tiling;
        let (runs, num_tiles) = cut.runs(equals, splits, order)?;
        let equal_tiles = problem.mask() == Mask::None && runs.len() <= 1;
        // To draw a tile's number is a producer's work.
        let dealt = equal_tiles || row.shape.loads == Loads::Consumers;
        let scheduler = options.scheduler.unwrap_or_else(|| Scheduler::choose(num_tiles, dealt, limits.sms));
        let workspace = Workspace::new(problem, splits, scheduler)?;
        let grid = scheduler.grid(num_tiles, limits.sms);
        let problem = problem.clone();
        let sms = limits.sms;
        Ok(Plan { problem, row, tiling, order, scheduler, splits, runs, num_tiles, grid, sms, workspace })
    }

    /// All tiles in their order.
    pub fn tiles(&self) -> impl Iterator<Item = Work> + '_ {
        let ends = self.runs.iter().skip(1).map(|run| run.first_tile).chain([self.num_tiles]);
        self.runs
            .iter()
            .zip(ends)
            .flat_map(|(run, end)| (run.first_tile..end).map(|index| self.work(run, index)))
    }

    /// Tile number `index`, if there is one.
    pub fn tile(&self, index: u32) -> Option<Work> {
        let run = self.runs.partition_point(|run| run.first_tile <= index).checked_sub(1)?;
        (index < self.num_tiles).then(|| self.work(&self.runs[run], index))
    }

    fn work(&self, run: &Run<u32>, index: u32) -> Work {
        let tile = run.decode(index);
        let whole = self.tiling.kv_range(tile.m_block, run.lens);
        Work { tile, kv: whole.split(tile.split, run.decoder.splits()) }
    }

    /// The schedule in the cost model: each tile costs its KV blocks and [`TILE_COST`].
    pub fn simulate(&self) -> Makespan {
        let costs: Vec<u64> = self.tiles().map(|work| work.cost()).collect();
        match self.scheduler {
            Scheduler::StaticPersistent => Makespan::round_robin(&costs, self.sms),
            // The hardware hands a free SM the next CTA, as a counter would the next tile.
            Scheduler::OneTile | Scheduler::DynamicPersistent => Makespan::greedy(&costs, self.sms),
        }
    }

    /// What all tiles visit together.
    pub fn cost(&self) -> Cost {
        self.tiles().fold(Cost::default(), |cost, Work { kv, .. }| Cost {
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

impl Workspace {
    fn new(problem: &Problem, splits: u32, scheduler: Scheduler) -> Result<Workspace, PlanError> {
        let counter = if scheduler == Scheduler::DynamicPersistent { 4 } else { 0 };
        if splits == 1 {
            return Ok(Workspace { counter, ..Workspace::default() });
        }
        let (lse, bytes) = fp32_bytes(problem);
        match (lse.checked_mul(splits.into()), bytes.checked_mul(splits.into())) {
            (Some(partial_lse), Some(partial_o)) => Ok(Workspace { partial_o, partial_lse, counter }),
            _ => Err(PlanError::Workspace { splits, bytes }),
        }
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.partial_o.saturating_add(self.partial_lse).saturating_add(self.counter)
    }
}

/// The tile, and the problem cut into it, query heads packed or not.
fn choose_tile(
    problem: &Problem,
    limits: &DeviceLimits,
    equals: &[Equals],
    options: &PlanOptions,
) -> Result<(TileRow, Cut), PlanError> {
    let cut = |packed| {
        let query = TileQuery::new(problem, packed);
        let row = match options.row {
            Some(row) => row.admits(&query).map(|()| row)?,
            None => *TileRow::find(query)?,
        };
        row.shape.check(limits)?;
        Ok((row, Cut::new(problem, &row.shape, packed, equals)?))
    };
    match options.pack_gqa {
        _ if problem.heads().group_size() == 1 => cut(false),
        Some(packed) => cut(packed),
        None => match (cut(true), cut(false)) {
            (Ok(packed), Ok(plain)) => {
                let pays = packs_gqa(packed.1.padded_rows(equals), plain.1.padded_rows(equals));
                Ok(if pays { packed } else { plain })
            }
            (Ok(packed), Err(_)) => Ok(packed),
            (Err(_), plain) => plain,
        },
    }
}

/// One row of K and one of V, in bytes.
fn kv_bytes(problem: &Problem) -> u64 {
    ((problem.head_dim() + problem.head_dim_v()) * problem.dtype().bytes()) as u64
}

/// K and V of one head of the longest sequence, in bytes.
fn kv_head_bytes(problem: &Problem, equals: &[Equals]) -> u64 {
    let keys = equals.iter().map(|equal| equal.lens.k).max().unwrap_or(0);
    u64::from(keys) * kv_bytes(problem)
}

/// LSE and O in fp32, in bytes. O has below 2^63 bytes in 16 bits, so one copy in 32 bits has below 2^64.
fn fp32_bytes(problem: &Problem) -> (u64, u64) {
    let lse = problem.lse_shape().iter().map(|&extent| extent as u64).product::<u64>() * 4;
    (lse, lse * problem.head_dim_v() as u64)
}

/// The number of splits that [`num_splits`] finds for the tiles of `cut`.
fn choose_splits(
    problem: &Problem,
    limits: &DeviceLimits,
    equals: &[Equals],
    row: &TileRow,
    cut: &Cut,
) -> Result<u32, PlanError> {
    let tiles = cut.numbered_tiles(equals, 1)?;
    let (lse, o) = fp32_bytes(problem);
    let query = SplitQuery {
        groups: &cut.groups(equals),
        m_blocks: equals.iter().map(|equal| cut.m_blocks(equal)).max().unwrap_or(0),
        kv_head_bytes: kv_head_bytes(problem, equals),
        block_bytes: u64::from(row.shape.tile_n) * kv_bytes(problem),
        partial_bytes: lse.saturating_add(o),
        dense: problem.mask() == Mask::None,
        sms: limits.sms,
        l2_bytes: limits.l2_bytes,
    };
    // As many as can be numbered.
    Ok(num_splits(&query).min(TILE_LIMIT / tiles.max(1)))
}

/// Linear where all tiles are equal. Otherwise in sections of as many KV heads, each with its query heads, as have a tile for
/// every other SM.
///
/// The SMs then work on two or three sections, and the last section is larger. With fewer tiles they wait for K and V of one
/// section after the other, with more, K and V no longer stay in L2. Measured on an H100 under a causal mask, the time of
/// FlashAttention-3 or cuDNN divided by the forward kernel's, in sections of 1/2, 1, 2 and 4 tiles for every SM:
///
/// ```text
/// head_dim  seqlen   1/2     1     2     4
///       64     512  1.10  1.05  1.03  0.96
///       64    4096  1.13  1.12  1.14  1.14
///      128     512  1.17  1.11  1.03  0.80
///      128    1024  1.19  1.13  1.08  0.82
///      128    4096  1.07  1.04  1.07  1.06
///      128    8192  1.12  1.08  1.10  1.11
///      256     512  1.01  0.95  0.77  0.70
///      256    1024  1.18  1.11  0.87  0.70
///      256    4096  1.04  1.06  1.07  1.05
///      256   16384  1.00  1.01  0.99  1.02
/// ```
fn choose_order(problem: &Problem, limits: &DeviceLimits, equals: &[Equals], cut: &Cut) -> Order {
    if problem.mask() == Mask::None && equals.len() <= 1 {
        return Order::Linear;
    }
    let batch = equals.iter().map(|equal| equal.batch).max().unwrap_or(1);
    let kv_heads = problem.heads().kv() as u64 * u64::from(batch);
    let group = if cut.tiling.is_packed() { 1 } else { problem.heads().group_size() as u64 };
    let m_blocks = equals.iter().map(|equal| cut.m_blocks(equal)).max().unwrap_or(0);
    let head_tiles = (u64::from(m_blocks) * group).max(1);
    let kv_section = u64::from(limits.sms.get()).div_ceil(2 * head_tiles).min(kv_heads);
    let section = kv_section.saturating_mul(group).min(TILE_LIMIT.into()) as u32;
    Order::LongestFirst { section, longest: Longest::from(problem.mask()) }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { blocks, masked_blocks, longest } = self.cost();
        let Registers { entry, producer, consumer } = self.row.shape.registers();
        let (shape, heads) = (&self.row.shape, self.problem.heads());
        writeln!(f, "problem    {}", self.problem)?;
        writeln!(f, "tile       {shape}")?;
        writeln!(f, "           {}", self.row.why)?;
        write!(f, "heads      {} of Q, {} of K and V", heads.q(), heads.kv())?;
        if self.tiling.is_packed() {
            write!(f, ", groups packed into tiles")?;
        }
        if self.tiling.tile_m() < shape.tile_m {
            write!(f, ", {} of {} rows used", self.tiling.tile_m(), shape.tile_m)?;
        }
        writeln!(f)?;
        writeln!(f, "order      {}", self.order)?;
        writeln!(f, "scheduler  {}, {} CTAs of {} threads", self.scheduler, self.grid, shape.threads())?;
        write!(f, "tiles      {}", self.num_tiles)?;
        if self.splits > 1 {
            write!(f, ", KV ranges in {} parts", self.splits)?;
        }
        if self.runs.len() > 1 {
            write!(f, ", {} runs of sequences", self.runs.len())?;
        }
        writeln!(f)?;
        writeln!(f, "KV blocks  {blocks}, {masked_blocks} of them masked, at most {longest} a tile")?;
        match producer {
            Some(producer) => writeln!(
                f,
                "registers  {entry} at entry, then {producer} a producer and {consumer} a consumer thread"
            )?,
            None => writeln!(f, "registers  {entry} a thread")?,
        }
        writeln!(f, "           {} of them hold S, P and O", shape.accumulators().total())?;
        writeln!(f, "shared     {}", shape.smem())?;
        write!(f, "workspace  {} bytes", self.workspace.total())
    }
}

#[cfg(test)]
mod tests;
