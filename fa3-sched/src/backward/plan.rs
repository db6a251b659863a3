//! Everything that is decided before backward kernels are built and launched.

mod dense;
mod varlen;

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{BackwardProblem, BlockSide, Dtype, Intervals, Problem, ReadBy};

use super::bias::check_tables;
use super::{ADDED_ROWS, AddOrder, BiasTile, DkvTile, DqTile, PlanError, PlanOptions};
use crate::dense::{dense_lens, lengths_are_data};
use crate::{DeviceLimits, Tiling};

pub use dense::DensePlan;
pub use varlen::VarlenPlan;

/// Number of rows of a head for which a CTA computes statistics.
pub const STATS_ROWS: u32 = 64;

/// The dK/dV kernel or the dQ kernel.
#[derive(Clone, Copy, Debug)]
pub struct Part<T> {
    /// The tile of the kernel.
    pub tile: T,
    /// The cut of each head's attention matrix. For dK and dV it is the cut of the transposed matrix, whose rows are
    /// keys.
    pub tiling: Tiling<u32>,
}

/// How dQ is computed.
#[derive(Clone, Copy, Debug)]
pub enum DqBy {
    /// A kernel of its own adds up the contributions of all keys to a row, in order.
    Kernel(Part<DqTile>),
    /// Tiles of the dK/dV kernel add to sums in memory in any order. A last kernel rounds the sums in blocks of
    /// [`ADDED_ROWS`] rows.
    Additions,
    /// Tiles of the dK/dV kernel add from the last keys to the first. The last tile that adds to a row also rounds its
    /// sum.
    AdditionsInOrder,
}

/// How gradients are computed on a device. A plan exists only if kernels run it.
///
/// ```
/// use fa3_sched::{DeviceLimits, backward::Plan};
/// use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};
///
/// let shape = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
/// let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
/// let plan = Plan::new(&BackwardSpec::contiguous(forward).validate()?, &DeviceLimits::h100_sxm())?;
/// let tiles = plan.dense().ok_or("sequences of one length have a dense plan")?;
/// assert_eq!(tiles.dkv().num_tiles(), 1024);
/// println!("{plan}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: BackwardProblem,
    dkv: Part<DkvTile>,
    dq: DqBy,
    bias: Option<Part<BiasTile>>,
    kind: PlanKind,
}

/// How launches find their tiles.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has one of them")]
pub enum PlanKind {
    /// Tiles are found by their index: all sequences have one length, which the host knows.
    Dense(DensePlan),
    /// Tiles are found through tables in device memory: lengths are data (varlen).
    Varlen(VarlenPlan),
}

impl Plan {
    /// Decides everything.
    ///
    /// # Errors
    /// [`PlanError`] if no backward kernels compute the problem, or not on this device.
    pub fn new(problem: &BackwardProblem, limits: &DeviceLimits) -> Result<Plan, PlanError> {
        Plan::with(problem, limits, &PlanOptions::default())
    }

    /// Decides what `options` leave open.
    ///
    /// # Errors
    /// [`PlanError`] if no backward kernels compute the problem, or not on this device or with these options.
    pub fn with(
        problem: &BackwardProblem,
        limits: &DeviceLimits,
        options: &PlanOptions,
    ) -> Result<Plan, PlanError> {
        let forward = problem.forward();
        let (dtype, output) = (forward.dtype(), forward.o().dtype);
        if !matches!(dtype, Dtype::F16 | Dtype::Bf16) || output != dtype {
            return Err(PlanError::Dtype { dtype, output });
        }
        problem.check_rows().map_err(Box::new)?;
        check_tables(forward)?;
        let (mask, group) = (forward.mask(), forward.heads().group_size() as u32);
        let tile = choose_dkv(forward, options, limits)?;
        check_blocks(forward, tile.tile_m)?;
        if tile.adds_dq.is_some() && sums_tables(forward) {
            return Err(PlanError::TablesWhereAdded);
        }
        if mask.intervals().is_some() && tile.adds_in_order() {
            return Err(PlanError::IntervalsInOrder);
        }
        let tiling = Tiling::new(tile.tile_n, tile.tile_m, 1, mask.transposed());
        let dkv = Part { tile, tiling };
        let dq = match tile.adds_dq {
            Some(AddOrder::LastKeysFirst) => DqBy::AdditionsInOrder,
            Some(AddOrder::Any) => DqBy::Additions,
            None => {
                let tile = choose_dq(forward, options, limits)?;
                check_blocks(forward, tile.tile_n)?;
                check_lines(forward, &tile)?;
                DqBy::Kernel(Part { tile, tiling: Tiling::new(tile.tile_m, tile.tile_n, group, mask) })
            }
        };
        let bias = choose_bias(forward, limits)?;
        let bias =
            bias.map(|tile| Part { tile, tiling: Tiling::new(BiasTile::ROWS, tile.tile_n, group, mask) });
        let asked = Asked {
            problem,
            dkv: &dkv,
            dq: &dq,
            sms: options.sms.map_or(limits.sms, |sms| sms.min(limits.sms)),
        };
        let kind = match dense_lens(forward) {
            None => PlanKind::Varlen(VarlenPlan::new(&asked)?),
            Some(lens) => PlanKind::Dense(DensePlan::new(&asked, lens)?),
        };
        Ok(Plan { problem: problem.clone(), dkv, dq, bias, kind })
    }

    /// The problem.
    pub fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// The kernel of dK and dV.
    pub fn dkv(&self) -> &Part<DkvTile> {
        &self.dkv
    }

    /// How dQ is computed.
    pub fn dq(&self) -> &DqBy {
        &self.dq
    }

    /// The kernel of the gradients of tables that are read by query and key, if there are such tables, and rows.
    pub fn bias(&self) -> Option<&Part<BiasTile>> {
        self.bias.as_ref()
    }

    /// How launches find their tiles.
    pub fn kind(&self) -> &PlanKind {
        &self.kind
    }

    /// The dense plan, if it is one.
    pub fn dense(&self) -> Option<&DensePlan> {
        match &self.kind {
            PlanKind::Dense(dense) => Some(dense),
            PlanKind::Varlen(_) => None,
        }
    }
}

/// A problem, and the decisions made so far.
struct Asked<'a> {
    problem: &'a BackwardProblem,
    dkv: &'a Part<DkvTile>,
    dq: &'a DqBy,
    sms: NonZeroU32,
}

/// The number of row blocks by which a tile trails the tile after it, where tiles add in order and neither of the two
/// waits. An addition to memory and its signal take about as long as two blocks.
const BLOCKS_BEHIND: u32 = 2;

/// Number of heads per section where each tile of keys visits `blocks` row blocks and waits for the tile after it. With
/// this number, a tile of a head begins [`BLOCKS_BEHIND`] blocks later than the tile that it waits for.
fn heads_between(blocks: u32, sms: NonZeroU32) -> u32 {
    (BLOCKS_BEHIND.saturating_mul(sms.get()).saturating_add(blocks / 2) / blocks.max(1)).max(1)
}

/// dQ is added up in any order, so that its last bits differ from run to run, if all of these conditions hold:
///
/// - [`PlanOptions::deterministic`] does not ask for bitwise reproducible gradients,
/// - head_dim and head_dim_v are at most 128 (wider heads have a dQ kernel),
/// - rows see more than this many keys on average, or more than [`MOST_KEYS_IN_ORDER_MASKED`] under a mask, or more
///   than [`MOST_KEYS_IN_ORDER_GROUPED`] under a causal mask with GQA; or the mask is one of intervals.
///
/// With fewer keys, adding in order is faster, since no kernels clear and round sums. With more, tiles wait for each
/// other for longer than these kernels take (docs/performance-backward.md).
pub const MOST_KEYS_IN_ORDER: usize = 4096;

/// [`MOST_KEYS_IN_ORDER`] under a mask. On average, a row of a causal mask sees half of the keys, and a row of a window
/// sees all keys of the window.
pub const MOST_KEYS_IN_ORDER_MASKED: usize = 1024;

/// [`MOST_KEYS_IN_ORDER_MASKED`] with GQA, under a mask that is bounded on one side only, such as a causal one. With
/// GQA the lengths of tiles differ group-size times as much, and in order the longest tiles come last. With groups of 4
/// and 1024 visible keys, adding in any order was measured to be faster (docs/decisions.md). 512 visible keys were not
/// measured; there, tiles add in order as they do without GQA.
pub const MOST_KEYS_IN_ORDER_GROUPED: usize = 768;

/// The order in which the dK/dV kernel adds to dQ; `None` if it does not add.
fn adds_dq(forward: &Problem, options: &PlanOptions, limits: &DeviceLimits) -> Option<AddOrder> {
    let keys = forward.longest().k;
    let (seen, most) = match forward.mask().reach() {
        (None, None) => (keys, MOST_KEYS_IN_ORDER),
        (Some(left), Some(right)) => {
            (keys.min(left as usize + right as usize + 1), MOST_KEYS_IN_ORDER_MASKED)
        }
        (Some(side), None) | (None, Some(side)) => {
            let grouped = forward.heads().group_size() > 1;
            let most = if grouped { MOST_KEYS_IN_ORDER_GROUPED } else { MOST_KEYS_IN_ORDER_MASKED };
            (keys.min(keys / 2 + side as usize), most)
        }
    };
    if forward.mask().intervals().is_some() && options.deterministic {
        // The tiles that add to a row, and their order, depend on data.
        return None;
    }
    let in_order = forward.mask().intervals().is_none() && (options.deterministic || seen <= most);
    let order = if in_order { AddOrder::LastKeysFirst } else { AddOrder::Any };
    if sums_tables(forward) {
        // The dQ kernel has whole rows, so that sums over rows have one order.
        return None;
    }
    let dims =
        [forward.head_dim(), forward.head_dim_v()].map(|dim| u32::try_from(dim).unwrap_or(u32::MAX / 2));
    DkvTile::choose_adding(dims, order, limits)?;
    options.dq.is_none().then_some(order)
}

/// The tile of the dK/dV kernel.
fn choose_dkv(forward: &Problem, options: &PlanOptions, limits: &DeviceLimits) -> Result<DkvTile, PlanError> {
    // A function that takes registers would spill them in the larger blocks.
    let takes_registers = forward.score().is_some_and(|form| form.expr().takes_registers());
    let small = takes_registers || block_side(forward) == Some(BlockSide::Of64);
    let rows = if small { &[ADDED_ROWS][..] } else { &[2 * ADDED_ROWS, ADDED_ROWS] };
    let choose = |head_dim, head_dim_v, limits: &DeviceLimits| match adds_dq(forward, options, limits) {
        Some(order) => DkvTile::choose_adding_among([head_dim, head_dim_v], rows, order, limits),
        None if lengths_are_data(forward) || block_side(forward).is_some() => {
            DkvTile::choose_even(head_dim, head_dim_v, limits)
        }
        None => DkvTile::choose(head_dim, head_dim_v, limits),
    };
    // A caller who gives the tile may ask for reproducible gradients as well.
    let ordered = |tile: DkvTile| match tile.adds_dq {
        Some(_) if options.deterministic => DkvTile { adds_dq: Some(AddOrder::LastKeysFirst), ..tile },
        _ => tile,
    };
    let dims = [forward.head_dim(), forward.head_dim_v()];
    let tile =
        given(options.dkv.map(ordered), choose, |tile| [tile.head_dim, tile.head_dim_v], dims, limits)?;
    tile.check(limits)?;
    if tile.adds_dq.is_some() && options.dq.is_some() {
        return Err(PlanError::DqTwice);
    }
    Ok(tile)
}

/// Whether the dQ kernel sums gradients of tables of the function of scores.
fn sums_tables(forward: &Problem) -> bool {
    forward.score().is_some_and(|form| !form.summed_gradients().is_empty())
}

/// Number of rows over which a warp of the dQ kernel sums gradients of elements of tables.
pub const SUMMED_ROWS: u32 = 16;

/// The largest number of bytes of sums of keys and diagonals.
const MOST_LINE_SUMS: u64 = 8 << 30;

/// Number of sums of [`SUMMED_ROWS`] rows and `keys` keys, of keys or of diagonals, for a read of a table.
pub fn lines_of_block(by: ReadBy, keys: u32) -> u32 {
    match by {
        ReadBy::Head | ReadBy::Row | ReadBy::QueryAndKey { .. } | ReadBy::Score => 0,
        ReadBy::Key => keys,
        ReadBy::Distance => keys + SUMMED_ROWS,
    }
}

/// Checks that sums of keys and of diagonals have room.
fn check_lines(forward: &Problem, tile: &DqTile) -> Result<(), PlanError> {
    let Some(form) = forward.score() else { return Ok(()) };
    let reads = form.expr().table_reads(form.summed_gradients());
    let sums: u32 = reads.iter().map(|read| lines_of_block(read.by, tile.tile_n)).sum();
    let rows = forward.q().shape.batch * forward.q().shape.seqlen + forward.batch() * tile.tile_m as usize;
    let groups = forward.heads().q() as u64 * rows as u64 / u64::from(SUMMED_ROWS);
    // A packed sequence may have all rows: a hint about the longest one may be wrong.
    let [rows, keys] = [forward.q(), forward.k()].map(|x| x.shape.seqlen as u64);
    let of_groups = groups.saturating_mul(keys.div_ceil(tile.tile_n.into())).saturating_mul(sums.into());
    let lines = reads.iter().filter(|read| lines_of_block(read.by, tile.tile_n) > 0).count();
    let of_heads = (lines * forward.batch() * forward.heads().q()) as u64 * (rows + keys);
    let bytes = of_groups.saturating_add(of_heads).saturating_mul(4);
    if bytes > MOST_LINE_SUMS {
        return Err(PlanError::LineSums { bytes, most: MOST_LINE_SUMS });
    }
    Ok(())
}

/// The tile of the dQ kernel.
fn choose_dq(forward: &Problem, options: &PlanOptions, limits: &DeviceLimits) -> Result<DqTile, PlanError> {
    let dims = [forward.head_dim(), forward.head_dim_v()];
    let choose = match block_side(forward) {
        None => DqTile::choose,
        Some(BlockSide::Of128) => DqTile::choose_even,
        Some(BlockSide::Of64) => DqTile::choose_own_lists,
    };
    let tile = given(options.dq, choose, |tile| [tile.head_dim, tile.head_dim_v], dims, limits)?;
    tile.check(limits)?;
    Ok(tile)
}

/// The tile of the kernel of gradients of tables that are read by query and key. `None` without such tables, and
/// without any rows, where there is nothing to load.
fn choose_bias(forward: &Problem, limits: &DeviceLimits) -> Result<Option<BiasTile>, PlanError> {
    let has_no_rows = [forward.q(), forward.k()].map(|x| x.extent().0) == [0; 2];
    if has_no_rows || forward.score().is_none_or(|form| form.bias_gradients().is_empty()) {
        return Ok(None);
    }
    let [head_dim, head_dim_v] = [forward.head_dim(), forward.head_dim_v()];
    // The tiles of dK and dV, which are chosen before, have refused wider heads.
    let tile = BiasTile::choose(head_dim as u32, head_dim_v as u32, limits);
    tile.map(Some).ok_or(PlanError::HeadDim { head_dim, head_dim_v })
}

/// The side of a block, if bits say which blocks of keys a block of rows sees.
fn block_side(forward: &Problem) -> Option<BlockSide> {
    forward.mask().intervals().and_then(Intervals::block_side)
}

/// Checks that a tile's blocks, of `given` rows or keys, divide the listed ones, if there are any. The tile itself has
/// 64 keys or rows for each warpgroup, which are in one listed block.
fn check_blocks(forward: &Problem, given: u32) -> Result<(), PlanError> {
    match block_side(forward).map(BlockSide::rows) {
        Some(side) if !side.is_multiple_of(given as usize) => Err(PlanError::BlocksTile { given, side }),
        Some(_) | None => Ok(()),
    }
}

/// The caller's tile if it is large enough; without one, the tile that `choose` returns.
fn given<T: Copy>(
    given: Option<T>,
    choose: impl Fn(u32, u32, &DeviceLimits) -> Option<T>,
    most: impl Fn(&T) -> [u32; 2],
    [head_dim, head_dim_v]: [usize; 2],
    limits: &DeviceLimits,
) -> Result<T, PlanError> {
    let Some(tile) = given else {
        let dims = [head_dim, head_dim_v].map(|dim| u32::try_from(dim).unwrap_or(u32::MAX / 2));
        return choose(dims[0], dims[1], limits).ok_or(PlanError::HeadDim { head_dim, head_dim_v });
    };
    let [most, most_v] = most(&tile);
    if head_dim > most as usize || head_dim_v > most_v as usize {
        return Err(PlanError::Narrow { most, most_v, head_dim, head_dim_v });
    }
    Ok(tile)
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (stats, dkv, dq) = match &self.kind {
            PlanKind::Dense(tiles) => {
                let dq = tiles.dq().map(|dq| (dq.grid(), dense::text(dq)));
                (tiles.stats().grid(), tiles.dkv_text(), dq)
            }
            PlanKind::Varlen(tiles) => {
                let dq = tiles.dq().map(varlen::text).unwrap_or_default();
                (tiles.stats_grid(), varlen::text(tiles.dkv()), Some((tiles.stats_grid(), dq)))
            }
        };
        let (dq_grid, dq_tiles) = dq.unwrap_or_default();
        writeln!(f, "problem    backward of {}", self.problem)?;
        write!(f, "statistics {stats} CTAs of {STATS_ROWS} rows")?;
        let mut part = |name: &str, tile: &dyn fmt::Display, smem: u32, tiles: &str| {
            write!(f, "\n{name:<11}{tile}, {} KiB of shared memory", smem >> 10)?;
            write!(f, "\n           {tiles}")
        };
        part("dK, dV", &self.dkv.tile, self.dkv.tile.smem_bytes(), &dkv)?;
        match &self.dq {
            DqBy::Kernel(dq) => part("dQ", &dq.tile, dq.tile.smem_bytes(), &dq_tiles)?,
            DqBy::Additions => write!(f, "\ndQ         {dq_grid} CTAs that round {ADDED_ROWS} rows of sums")?,
            DqBy::AdditionsInOrder => write!(f, "\ndQ         rounded by the last to add")?,
        }
        if let Some(Part { tile, .. }) = &self.bias {
            write!(f, "\ntables     {tile}, {} KiB of shared memory", tile.smem_bytes() >> 10)?;
        }
        match &self.kind {
            PlanKind::Dense(_) => Ok(()),
            PlanKind::Varlen(varlen) => varlen.write_tables(f),
        }
    }
}

#[cfg(test)]
mod tests;
