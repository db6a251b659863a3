//! Everything that is decided before a forward kernel is built and launched.

mod dense;
mod split_kv;
mod v_tiles;
mod varlen;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{Dtype, Feature, Known, Problem, UnknownFeature};

use super::tile_row::{block_side, divides_blocks};
use super::{CtaTile, Pieces, PlanError, PlanOptions, Precision, Registers, RunningO, TileRow};
use crate::dense::dense_lens;
use crate::packed::{self, PageLayout};
use crate::{DeviceLimits, Order, Scheduler, Tiling};

pub use dense::{Cost, DensePlan, Work};
use split_kv::Choice;
pub use split_kv::{ReductionSource, SplitKvPlan, packed_positions};
pub use v_tiles::V_TILE_KEYS;
pub use varlen::VarlenPlan;

/// Largest number of columns of O of one warpgroup; two warpgroups share more columns.
const MOST_COLUMNS: u32 = 256;

/// The features beside which kernels compute a function of scores.
const SCORED: Known = Known::new(
    "the forward kernels of functions of scores",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Packed,
        Feature::Used,
        Feature::Pages,
        Feature::Index,
        Feature::Leftpad,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

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
/// let tiles = plan.dense().ok_or("sequences of one length have a dense plan")?;
/// let schedule = tiles.schedule();
/// assert_eq!((schedule.num_tiles(), schedule.grid(), plan.tile().threads()), (1024, 132, 384));
/// assert_eq!(schedule.scheduler(), Scheduler::DynamicPersistent);
/// assert_eq!(tiles.works().next().unwrap().kv.blocks(), 32); // the longest tile comes first
/// println!("{plan}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: Problem,
    tile: CtaTile,
    why: &'static str,
    tiling: Tiling<u32>,
    kind: PlanKind,
    pages: Option<PageLayout>,
    pieces: Option<Pieces>,
}

/// How a launch finds its tiles.
#[derive(Clone, Debug)]
pub enum PlanKind {
    /// Tiles are found by their index: all sequences have one length, which the host knows.
    Dense(DensePlan),
    /// Tiles are found through a table in device memory: lengths are data (varlen).
    Varlen(VarlenPlan),
    /// Tiles are splits of the keys: decoding, where Q has few rows.
    SplitKv(SplitKvPlan),
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
        if problem.score().is_some() {
            SCORED.check(problem)?;
        }
        problem.check_rows().map_err(Box::new)?;
        if Precision::of(problem).is_fp8() && PageLayout::are_gathered(problem) {
            return Err(PlanError::CachePrecision { precision: Precision::of(problem) });
        }
        let is_packed = problem.seqs_q().is_packed() && problem.seqs_k().is_packed();
        let has_intervals = problem.mask().intervals().is_some();
        if options.given_table && (!is_packed || has_intervals || options.split_keys.is_some()) {
            return Err(PlanError::GivenTable);
        }
        let sms = options.sms.map_or(limits.sms, |sms| sms.min(limits.sms));
        let pieces = |tile: &CtaTile, keys| Pieces { keys, running: RunningO::of(tile, limits) };
        let (tile, why, pieces) = match SplitKvPlan::choose(problem, limits, sms, options)? {
            Some(Choice::Split { tile, tiling, plan: split_kv, pieces: keys }) => {
                tile.check(limits)?;
                check_blocks(problem, tile)?;
                check_token_scales(problem, tile)?;
                return Ok(Plan {
                    problem: problem.clone(),
                    tile,
                    why: split_kv.why(),
                    tiling,
                    kind: PlanKind::SplitKv(split_kv),
                    pages: PageLayout::of(problem, tile.tile_n, tile.converts_rows())?,
                    pieces: keys.map(|keys| pieces(&tile, keys)),
                });
            }
            Some(Choice::Tiles { tile, pieces: keys }) => (
                tile,
                "pieces of a fixed size: results are the same bits in any batch",
                Some(pieces(&tile, keys)),
            ),
            None => {
                let (tile, why) = choose_tile(problem, options)?;
                (tile, why, None)
            }
        };
        check_blocks(problem, tile)?;
        check_token_scales(problem, tile)?;
        let tile = match problem.seqs_k().pages() {
            Some(2..) if options.tile.is_some() => tile,
            Some(2..) if PageLayout::are_gathered(problem) => tile.of_gathered_rows(),
            Some(2..) => tile.of_pages(problem.k().shape.seqlen),
            _ => tile,
        };
        // A warpgroup that converts rows receives its work tiles, which then come from a table.
        let dense_lens = dense_lens(problem).filter(|_| !tile.converts_rows());
        let tiling =
            Tiling::new(tile.tile_m, tile.tile_n, problem.heads().group_size() as u32, problem.mask());
        // The workspace has a place for each CTA, so that there is one for each SM, and not for each tile.
        let persistent = pieces.filter(|pieces| pieces.running == RunningO::Workspace);
        let scheduler = options.scheduler.or(persistent.map(|_| Scheduler::DynamicPersistent));
        let options = &PlanOptions { scheduler, ..*options };
        let asked = Asked { problem, tile, tiling, sms, options };
        let (tile, kind) = match dense_lens {
            None => {
                tile.check(limits)?;
                (tile, PlanKind::Varlen(VarlenPlan::new(&asked)?))
            }
            Some(lens) => {
                let (tile, dense) = DensePlan::new(&asked, lens, limits)?;
                (tile, PlanKind::Dense(dense))
            }
        };
        let pages = PageLayout::of(problem, tile.tile_n, tile.converts_rows())?;
        Ok(Plan { problem: problem.clone(), tile, why, tiling, kind, pages, pieces })
    }

    /// The varlen table through which tiles are found, if there is one: its size, and the data from which it is
    /// written. Plans with equal tables can share one table, even if the plans differ otherwise.
    pub fn table(&self) -> Option<&packed::Plan> {
        match &self.kind {
            PlanKind::Varlen(varlen) => Some(varlen.tiles().table()),
            PlanKind::Dense(_) | PlanKind::SplitKv(_) => None,
        }
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

    /// How the launch finds its tiles.
    pub fn kind(&self) -> &PlanKind {
        &self.kind
    }

    /// The dense plan, if it is one.
    pub fn dense(&self) -> Option<&DensePlan> {
        match &self.kind {
            PlanKind::Dense(dense) => Some(dense),
            PlanKind::Varlen(_) | PlanKind::SplitKv(_) => None,
        }
    }

    /// The pages of K and V, if K and V are paged.
    pub fn pages(&self) -> Option<PageLayout> {
        self.pages
    }

    /// The pieces of keys that CTAs merge in their main loop, where splits have a fixed size. Otherwise such splits
    /// leave partial results, or there is one split.
    pub fn pieces(&self) -> Option<Pieces> {
        self.pieces
    }

    /// Number of CTAs: none if Q has no rows.
    pub fn ctas(&self) -> u32 {
        match &self.kind {
            PlanKind::Dense(dense) => dense.schedule().grid(),
            PlanKind::Varlen(varlen) => varlen.tiles().grid(),
            PlanKind::SplitKv(split_kv) => split_kv.ctas(),
        }
    }

    /// The order of tiles.
    pub fn order(&self) -> Order {
        match &self.kind {
            PlanKind::Dense(dense) => dense.schedule().order(),
            PlanKind::Varlen(varlen) => varlen.tiles().order(),
            PlanKind::SplitKv(_) => Order::Linear,
        }
    }

    /// The tile scheduler.
    pub fn scheduler(&self) -> Scheduler {
        match &self.kind {
            PlanKind::Dense(dense) => dense.schedule().scheduler(),
            PlanKind::Varlen(_) => Scheduler::DynamicPersistent,
            PlanKind::SplitKv(_) => Scheduler::StaticPersistent,
        }
    }

    /// CTAs per cluster: one, or two that compute neighbouring tiles of a KV head at the same time. Each of the two
    /// loads half of K and V for both.
    pub fn cluster(&self) -> u32 {
        self.dense().map_or(1, DensePlan::cluster)
    }

    /// Registers per thread.
    pub fn registers(&self) -> Registers {
        let per_sm = match &self.kind {
            PlanKind::Dense(_) | PlanKind::Varlen(_) => 1,
            PlanKind::SplitKv(split_kv) => split_kv.per_sm(),
        };
        let in_rows = self.pages.is_some_and(|pages| pages.is_gathered() || self.pieces.is_some());
        self.tile.registers_of(per_sm, in_rows || self.problem.seqs_k().list().is_some())
    }
}

/// A problem, the decisions made so far, and the caller's options.
struct Asked<'a> {
    problem: &'a Problem,
    tile: CtaTile,
    tiling: Tiling<u32>,
    sms: NonZeroU32,
    options: &'a PlanOptions,
}

/// Checks that the forward kernels take the element types.
fn check_dtypes(problem: &Problem) -> Result<(), PlanError> {
    let (dtype, output) = (problem.dtype(), problem.o().dtype);
    let writes = match dtype {
        Dtype::F32 => return Err(PlanError::Dtype { dtype }),
        Dtype::F16 | Dtype::Bf16 => output == dtype,
        Dtype::E4m3 => matches!(output, Dtype::F16 | Dtype::Bf16),
        Dtype::Int8 => false,
    };
    if !writes {
        return Err(PlanError::Output { dtype, output });
    }
    if problem.has_max_logits() && dtype == Dtype::E4m3 {
        let feature = Feature::MaxLogits;
        return Err(UnknownFeature { who: "the forward kernels of e4m3", feature }.into());
    }
    Ok(())
}

/// Checks that tiles divide listed blocks.
fn check_blocks(problem: &Problem, tile: CtaTile) -> Result<(), PlanError> {
    match block_side(problem) {
        Some(side) if !divides_blocks(&tile, side) => {
            let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
            Err(PlanError::BlocksTile { head_dim, head_dim_v })
        }
        _ => Ok(()),
    }
}

/// Checks that warps dequantize whole blocks, if tokens have scales: only these warps load scales.
fn check_token_scales(problem: &Problem, tile: CtaTile) -> Result<(), PlanError> {
    let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
    match problem.token_scales() {
        Some(_) if tile.converts_rows() => {
            Err(PlanError::TokenScales { head_dim, head_dim_v, most: MOST_COLUMNS })
        }
        _ => Ok(()),
    }
}

/// The tile, and the reason for it.
fn choose_tile(problem: &Problem, options: &PlanOptions) -> Result<(CtaTile, &'static str), PlanError> {
    let Some(tile) = options.tile else {
        let row = TileRow::find(problem)?;
        return Ok((row.tile, row.why));
    };
    let needed = Precision::of(problem);
    if !tile.precision.takes(needed) {
        return Err(PlanError::Precision { given: tile.precision, needed });
    }
    if tile.qv != problem.qv().is_some() {
        return Err(PlanError::GivenLatent { takes: tile.qv });
    }
    if !tile.takes(problem) {
        let (most, most_v) = (tile.head_dim, tile.head_dim_v);
        let (head_dim, head_dim_v) = (problem.head_dim(), problem.head_dim_v());
        return Err(PlanError::Narrow { most, most_v, head_dim, head_dim_v });
    }
    Ok((tile, "given, not the table's choice"))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Registers { entry, producer, converter, consumer, second } = self.registers();
        let (tile, heads) = (&self.tile, self.problem.heads());
        writeln!(f, "problem    {}", self.problem)?;
        writeln!(f, "tile       {tile}")?;
        writeln!(f, "           {}", self.why)?;
        writeln!(f, "heads      {} of Q, {} of K and V", heads.q(), heads.kv())?;
        writeln!(f, "order      {}", self.order())?;
        match &self.kind {
            PlanKind::Dense(dense) => dense.write_tiles(f, tile.threads())?,
            PlanKind::Varlen(varlen) => varlen.write_tiles(f, tile.threads())?,
            PlanKind::SplitKv(split_kv) => split_kv.write_tiles(f, tile.threads())?,
        }
        match (producer, converter, second) {
            (Some(producer), _, Some(second)) => writeln!(
                f,
                "registers  {entry} at entry, then {producer} a producer, {consumer} a consumer thread, {second} one \
                 without scores"
            )?,
            (Some(producer), None, None) => writeln!(
                f,
                "registers  {entry} at entry, then {producer} a producer and {consumer} a consumer thread"
            )?,
            (Some(producer), Some(converter), None) => writeln!(
                f,
                "registers  {entry} at entry, then {producer} a producer, {converter} a converting and {consumer} a \
                 consumer thread"
            )?,
            (None, ..) => writeln!(f, "registers  {entry} a thread")?,
        }
        writeln!(f, "           {} of them hold S, P and O", tile.accumulators().total())?;
        writeln!(f, "shared     {}", tile.smem())?;
        if let Some(Pieces { keys, running }) = self.pieces {
            writeln!(f, "pieces     of {keys} keys, with the sum in {running}")?;
        }
        match &self.kind {
            PlanKind::Dense(dense) => dense.write_memory(f),
            PlanKind::Varlen(varlen) => varlen.write_memory(f),
            PlanKind::SplitKv(split_kv) => split_kv.write_memory(f, &self.problem, tile),
        }
    }
}

#[cfg(test)]
mod tests;
