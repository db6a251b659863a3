//! Everything that is decided before backward kernels are built and launched.

use std::fmt;
use std::num::NonZeroU32;

use fa3_types::{BackwardProblem, Dtype, Mask, Problem};

use super::{ADDED_ROWS, AddOrder, DkvTile, DqTile, PlanError, PlanOptions};
use crate::dense::dense_lens;
use crate::{DeviceLimits, Lens, Longest, Order, Schedule, Scheduler, TileCounts, Tiling, TooManyTiles};

/// Rows of a head for which a CTA computes statistics.
pub const STATS_ROWS: u32 = 64;

/// One of the two kernels with products.
#[derive(Clone, Copy, Debug)]
pub struct Part<T> {
    /// Its tile.
    pub tile: T,
    /// How each head's attention matrix is cut. Of dK and dV it is the transposed matrix: its rows are keys.
    pub tiling: Tiling<u32>,
    /// Rows and columns of that matrix.
    pub lens: Lens<u32>,
    /// The numbering of tiles, and how they reach CTAs.
    pub schedule: Schedule,
}

/// How dQ is computed.
#[derive(Clone, Copy, Debug)]
pub enum DqBy {
    /// By a kernel of its own, in which each row's part of every key is added in order.
    Kernel(Part<DqTile>),
    /// By additions of the dK/dV kernel to sums in memory, in any order. A last kernel rounds these blocks of
    /// [`ADDED_ROWS`] rows.
    Additions(Schedule),
    /// By additions of the dK/dV kernel, from the last keys to the first. Who is the last to add to a row rounds the
    /// sum as well.
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
/// assert_eq!(plan.dkv().schedule.num_tiles(), 1024);
/// println!("{plan}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    problem: BackwardProblem,
    stats: Schedule,
    dkv: Part<DkvTile>,
    dq: DqBy,
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
        let lens = dense_lens(forward)?;
        let dims = [forward.head_dim(), forward.head_dim_v()];
        let choose = |head_dim, head_dim_v, limits: &DeviceLimits| match adds_dq(forward, options, limits) {
            Some(order) => DkvTile::choose_adding([head_dim, head_dim_v], order, limits),
            None => DkvTile::choose(head_dim, head_dim_v, limits),
        };
        // Whoever gives the tile may ask for gradients that are the same bits in every run as well.
        let ordered = |tile: DkvTile| match tile.adds_dq {
            Some(_) if options.deterministic => DkvTile { adds_dq: Some(AddOrder::LastKeysFirst), ..tile },
            _ => tile,
        };
        let dkv =
            given(options.dkv.map(ordered), choose, |tile| [tile.head_dim, tile.head_dim_v], dims, limits)?;
        dkv.check(limits)?;
        if dkv.adds_dq.is_some() && options.dq.is_some() {
            return Err(PlanError::DqTwice);
        }

        let sms = options.sms.map_or(limits.sms, |sms| sms.min(limits.sms));
        // Heads and the batch are below 2³¹ in every problem.
        let counts = |rows: u32, tile: u32, heads: usize| TileCounts {
            m_blocks: rows.div_ceil(tile),
            heads: heads as u32,
            batch: forward.batch() as u32,
        };
        let heads = forward.heads();
        // In one section heads are the fastest, which are neighbours in memory.
        let neighbours = Order::LongestFirst { section: u32::MAX, longest: Longest::First };
        // The first kernel clears sums of dQ: of all blocks of the second, whose last may reach beyond the rows.
        let rows = if dkv.adds_dq.is_some() { lens.q.next_multiple_of(dkv.tile_m) } else { lens.q };
        let stats = counts(rows, STATS_ROWS, heads.q());
        let stats = Schedule::new(stats, neighbours, Scheduler::OneTile, sms)?;
        // Sections, and a counter, even if all tiles are equal: CTAs then work on several heads at a time.
        let schedule = |counts: TileCounts, mask: Mask, group: usize| {
            let order = Order::in_sections(mask, counts, group as u32, sms);
            Schedule::new(counts, order, Scheduler::choose(counts.numbered()?, false, sms), sms)
        };
        let (mask, group) = (forward.mask(), heads.group_size());
        let dq = match dkv.adds_dq {
            Some(AddOrder::LastKeysFirst) => DqBy::AdditionsInOrder,
            Some(AddOrder::Any) => {
                let blocks = counts(lens.q, ADDED_ROWS, heads.q());
                DqBy::Additions(Schedule::new(blocks, neighbours, Scheduler::OneTile, sms)?)
            }
            None => {
                let tile =
                    given(options.dq, DqTile::choose, |tile| [tile.head_dim, tile.head_dim_v], dims, limits)?;
                tile.check(limits)?;
                let tiling = Tiling::new(tile.tile_m, tile.tile_n, group as u32, mask);
                let schedule = schedule(counts(lens.q, tile.tile_m, heads.q()), mask, group)?;
                DqBy::Kernel(Part { tile, tiling, lens, schedule })
            }
        };
        let mask = mask.transposed();
        let of_keys = counts(lens.k, dkv.tile_n, heads.kv());
        let dkv = Part {
            tile: dkv,
            tiling: Tiling::new(dkv.tile_n, dkv.tile_m, 1, mask),
            lens: Lens { q: lens.k, k: lens.q },
            schedule: match dkv.adds_dq {
                Some(AddOrder::LastKeysFirst) => {
                    last_keys_first(of_keys, lens.q.div_ceil(dkv.tile_m).saturating_mul(group as u32), sms)?
                }
                Some(AddOrder::Any) | None => schedule(of_keys, mask, 1)?,
            },
        };
        Ok(Plan { problem: problem.clone(), stats, dkv, dq })
    }

    /// The problem.
    pub fn problem(&self) -> &BackwardProblem {
        &self.problem
    }

    /// The blocks of [`STATS_ROWS`] rows for which the first kernel computes D and LSE in base 2.
    pub fn stats(&self) -> &Schedule {
        &self.stats
    }

    /// The kernel of dK and dV.
    pub fn dkv(&self) -> &Part<DkvTile> {
        &self.dkv
    }

    /// How dQ is computed.
    pub fn dq(&self) -> &DqBy {
        &self.dq
    }

    /// The rows of each sequence that no tile of keys visits: so many, the first ones. They see no key.
    pub fn unvisited_rows(&self) -> u32 {
        let Lens { q: keys, k: rows } = self.dkv.lens;
        let (_, right) = self.problem.forward().mask().reach();
        let unseen = match right {
            _ if keys == 0 => rows,
            None => 0,
            // Row i sees keys up to i + keys - rows + right.
            Some(right) => rows.saturating_sub(keys.saturating_add(right)),
        };
        let tile_m = self.dkv.tile.tile_m;
        if unseen < rows { unseen / tile_m * tile_m } else { rows }
    }
}

/// Blocks of rows by which a tile follows the one after it, if they add in order and have begun so far from each other
/// that neither waits: an addition to memory, and word of it, take about the time of two blocks.
const BLOCKS_BEHIND: u32 = 2;

/// The schedule of tiles of keys that wait for the tiles after them, each with so many blocks of rows. The last keys
/// come first, in sections of so many heads that a tile of the same head begins [`BLOCKS_BEHIND`] blocks later.
fn last_keys_first(counts: TileCounts, blocks: u32, sms: NonZeroU32) -> Result<Schedule, TooManyTiles> {
    let heads = counts.heads.saturating_mul(counts.batch).max(1);
    let section =
        (BLOCKS_BEHIND.saturating_mul(sms.get()).saturating_add(blocks / 2) / blocks.max(1)).clamp(1, heads);
    let order = Order::LongestFirst { section, longest: Longest::Last };
    Schedule::new(counts, order, Scheduler::DynamicPersistent, sms)
}

/// dQ is added up in any order, so that its last bits differ from run to run, where all of this is so:
///
/// - [`PlanOptions::deterministic`] does not ask for gradients that are the same bits in every run,
/// - head_dim and head_dim_v are at most 128: with wider heads dQ has a kernel of its own,
/// - rows see more than so many keys on average, or more than [`MOST_KEYS_IN_ORDER_MASKED`] under a mask.
///
/// With fewer keys additions in order are the faster ones, since sums are neither cleared nor rounded by kernels of
/// their own. With more, tiles wait for each other for longer than that takes (docs/performance-backward.md).
pub const MOST_KEYS_IN_ORDER: usize = 4096;

/// As [`MOST_KEYS_IN_ORDER`], under a mask. Rows of a causal mask see half of the keys on average, and those of a
/// window all keys of the window.
pub const MOST_KEYS_IN_ORDER_MASKED: usize = 1024;

/// How the dK/dV kernel adds to dQ, if a tile can.
fn adds_dq(forward: &Problem, options: &PlanOptions, limits: &DeviceLimits) -> Option<AddOrder> {
    let keys = forward.k().shape.seqlen;
    let (seen, most) = match forward.mask().reach() {
        (None, None) => (keys, MOST_KEYS_IN_ORDER),
        (Some(left), Some(right)) => {
            (keys.min(left as usize + right as usize + 1), MOST_KEYS_IN_ORDER_MASKED)
        }
        (Some(side), None) | (None, Some(side)) => {
            (keys.min(keys / 2 + side as usize), MOST_KEYS_IN_ORDER_MASKED)
        }
    };
    let in_order = options.deterministic || seen <= most;
    let order = if in_order { AddOrder::LastKeysFirst } else { AddOrder::Any };
    let dims =
        [forward.head_dim(), forward.head_dim_v()].map(|dim| u32::try_from(dim).unwrap_or(u32::MAX / 2));
    DkvTile::choose_adding(dims, order, limits)?;
    options.dq.is_none().then_some(order)
}

/// The tile that a caller gave, if it is large enough, or else the one that is chosen.
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
        writeln!(f, "problem    backward of {}", self.problem)?;
        write!(f, "statistics {} CTAs of {STATS_ROWS} rows", self.stats.num_tiles())?;
        let mut part = |name: &str, tile: &dyn fmt::Display, smem: u32, schedule: &Schedule| {
            write!(f, "\n{name:<11}{tile}, {} KiB of shared memory", smem >> 10)?;
            let (tiles, grid) = (schedule.num_tiles(), schedule.grid());
            write!(
                f,
                "\n           {tiles} tiles, {}, {}, {grid} CTAs",
                schedule.order(),
                schedule.scheduler()
            )
        };
        part("dK, dV", &self.dkv.tile, self.dkv.tile.smem_bytes(), &self.dkv.schedule)?;
        match &self.dq {
            DqBy::Kernel(dq) => part("dQ", &dq.tile, dq.tile.smem_bytes(), &dq.schedule),
            DqBy::Additions(blocks) => {
                write!(f, "\ndQ         {} CTAs that round {ADDED_ROWS} rows of sums", blocks.num_tiles())
            }
            DqBy::AdditionsInOrder => write!(f, "\ndQ         rounded by the last to add"),
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{BackwardSpec, ProblemSpec, Sequences, Shape};

    use super::*;
    use crate::NotDense;

    const H100: DeviceLimits = DeviceLimits::h100_sxm();

    fn spec(head_dim: usize) -> ProblemSpec {
        let q = Shape { batch: 2, seqlen: 1000, heads: 8, head_dim };
        ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: 1200, heads: 2, ..q })
    }

    /// With a dQ kernel.
    fn plan(forward: ProblemSpec) -> Result<Plan, PlanError> {
        let dq = DqTile::choose(forward.q.shape.head_dim as u32, forward.v.shape.head_dim as u32, &H100);
        let options = PlanOptions { dq, ..PlanOptions::default() };
        Plan::with(&BackwardSpec::contiguous(forward).validate().unwrap(), &H100, &options)
    }

    fn dq(plan: &Plan) -> &Part<DqTile> {
        match plan.dq() {
            DqBy::Kernel(part) => part,
            DqBy::Additions(_) | DqBy::AdditionsInOrder => panic!("{plan}"),
        }
    }

    #[test]
    fn keys_are_the_rows_of_the_transposed_matrix() {
        let plan = plan(spec(128).causal()).unwrap();
        // 2 sequences with 2 heads of K and 10 tiles of 128 keys; with 8 heads of Q and 8 tiles of 128 rows.
        assert_eq!((plan.dkv().schedule.num_tiles(), dq(&plan).schedule.num_tiles()), (40, 128));
        assert_eq!((plan.dkv().lens, dq(&plan).lens), (Lens { q: 1200, k: 1000 }, Lens { q: 1000, k: 1200 }));
        assert_eq!(plan.stats().num_tiles(), 2 * 8 * 16);
        // The first keys are seen by all rows, the last ones by the last rows.
        let blocks = |tile| plan.dkv().tiling.kv_range(tile, plan.dkv().lens);
        assert_eq!((blocks(0).first, blocks(0).end), (0, 16));
        assert_eq!((blocks(9).first, blocks(9).end), (14, 16));
        assert!(matches!(plan.dkv().schedule.order(), Order::LongestFirst { longest: Longest::First, .. }));
    }

    #[test]
    fn what_no_kernel_computes_is_refused() {
        let error = plan(spec(264)).unwrap_err();
        assert_eq!(error, PlanError::HeadDim { head_dim: 264, head_dim_v: 264 });
        let used = plan(spec(64).seqs_q(Sequences::dense(2, 1000).used())).unwrap_err();
        assert!(matches!(used, PlanError::Dense(NotDense::Used { .. })));
        let text = "the backward kernels take sequences in full, and q has sequences that are used in part";
        assert_eq!(used.to_string(), text);
        let f32 = ProblemSpec::dense(Dtype::F32, spec(64).q.shape, spec(64).k.shape);
        let (dtype, output) = (Dtype::F32, Dtype::F32);
        assert_eq!(plan(f32).unwrap_err(), PlanError::Dtype { dtype, output });
        let narrow = PlanOptions::default().dq(DqTile::choose(64, 64, &H100).unwrap());
        let problem = BackwardSpec::contiguous(spec(128)).validate().unwrap();
        let refused = Plan::with(&problem, &H100, &narrow).unwrap_err();
        assert_eq!(refused, PlanError::Narrow { most: 64, most_v: 64, head_dim: 128, head_dim_v: 128 });
        let refused = plan(spec(33)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "q has head_dim 33, not a multiple of 8 as bf16 needs (16-byte rows)"
        );
        assert!(refused.is_cpu_only());
        let mut odd = BackwardSpec::contiguous(spec(64));
        odd.dout.strides.heads += 1;
        let refused = Plan::new(&odd.validate().unwrap(), &H100).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "dout has stride 65 in heads, not a multiple of 8 elements (16 bytes)"
        );
    }

    /// Two tiles may be given, in either order, but not two that both compute dQ.
    #[test]
    fn a_given_tile_is_taken_or_refused() {
        let problem = BackwardSpec::contiguous(spec(128)).validate().unwrap();
        let dq = DqTile::choose(128, 128, &H100).unwrap();
        let adding = DkvTile::choose_adding([128, 128], AddOrder::Any, &H100).unwrap();
        let alone = DkvTile::choose(128, 128, &H100).unwrap();
        let with = |dkv| Plan::with(&problem, &H100, &PlanOptions::default().dkv(dkv).dq(dq));
        assert_eq!(with(adding).unwrap_err(), PlanError::DqTwice);
        let plan = with(alone).unwrap();
        assert_eq!((plan.dkv().tile, self::dq(&plan).tile), (alone, dq));
    }

    #[test]
    fn it_says_what_it_does() {
        let expected = "\
problem    backward of bf16 batch 2 seqlen 1000 x 1200 heads 8/2 head_dim 128 mask none scale 0.088388
statistics 256 CTAs of 64 rows
dK, dV     128 keys, blocks of 64 rows, 3 stages and 2 of keys, 226 KiB of shared memory
           40 tiles, longest first, heads in sections of 4, one tile a CTA, 40 CTAs
dQ         128 rows, blocks of 112 keys, 2 stages of K and 2 of V, 177 KiB of shared memory
           128 tiles, longest first, heads in sections of 12, one tile a CTA, 128 CTAs";
        assert_eq!(plan(spec(128)).unwrap().to_string(), expected);
    }

    #[test]
    fn dq_is_added_up_where_it_may_be() {
        let problem = |dim| BackwardSpec::contiguous(spec(dim)).validate().unwrap();
        let plan = Plan::new(&problem(128), &H100).unwrap();
        assert_eq!(plan.dkv().tile.adds_dq, Some(AddOrder::LastKeysFirst), "1200 keys");
        assert!(matches!(plan.dq(), DqBy::AdditionsInOrder));
        assert!(plan.to_string().ends_with("dQ         rounded by the last to add"), "{plan}");
        let wide = Plan::new(&problem(256), &H100).unwrap();
        assert!(matches!(wide.dq(), DqBy::Kernel(_)), "dK, dV and dQ are more registers than there are");

        let seen = |keys, mask| {
            let shape = Shape { batch: 1, seqlen: keys, heads: 4, head_dim: 128 };
            let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape).mask(mask);
            BackwardSpec::contiguous(forward).validate().unwrap()
        };
        let order = |keys, mask| Plan::new(&seen(keys, mask), &H100).unwrap().dkv().tile.adds_dq;
        assert_eq!(order(4096, Mask::None), Some(AddOrder::LastKeysFirst));
        assert_eq!(order(4097, Mask::None), Some(AddOrder::Any));
        assert_eq!(order(2049, Mask::Causal), Some(AddOrder::LastKeysFirst));
        assert_eq!(order(2050, Mask::Causal), Some(AddOrder::Any), "rows see 1025 keys");
        let window = Mask::Window { left: Some(1000), right: Some(0) };
        assert_eq!(order(20_000, window), Some(AddOrder::LastKeysFirst));

        let long = seen(4097, Mask::None);
        let in_any_order = Plan::new(&long, &H100).unwrap();
        let text = in_any_order.to_string();
        assert!(text.ends_with("dQ         260 CTAs that round 64 rows of sums"), "{text}");
        let options = PlanOptions::default().deterministic();
        for options in [options, options.dkv(in_any_order.dkv().tile)] {
            let ordered = Plan::with(&long, &H100, &options).unwrap();
            assert_eq!(ordered.dkv().tile.adds_dq, Some(AddOrder::LastKeysFirst));
            let text = ordered.to_string();
            assert!(text.contains("adds to dQ in order"), "{text}");
        }
    }

    #[test]
    fn rows_that_no_tile_visits() {
        let unvisited = |rows, keys, mask| {
            let q = Shape { batch: 1, seqlen: rows, heads: 1, head_dim: 128 };
            let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: keys, ..q }).mask(mask);
            let plan = Plan::new(&BackwardSpec::contiguous(forward).validate().unwrap(), &H100).unwrap();
            let (tile, lens) = (plan.dkv().tile, plan.dkv().lens);
            let visits = |row: u32| {
                let blocks =
                    (0..lens.q.div_ceil(tile.tile_n)).map(|tile| plan.dkv().tiling.kv_range(tile, lens));
                blocks.into_iter().any(|blocks| (blocks.first..blocks.end).contains(&(row / tile.tile_m)))
            };
            let rows = plan.unvisited_rows();
            assert!((0..lens.k).all(|row| visits(row) == (row >= rows)), "{plan}");
            rows
        };
        assert_eq!(unvisited(500, 100, Mask::None), 0);
        assert_eq!(unvisited(500, 0, Mask::None), 500);
        // Row 400 is the first to see a key, in the block of row 384.
        assert_eq!(unvisited(500, 100, Mask::Causal), 384);
        assert_eq!(unvisited(500, 600, Mask::Causal), 0);
        assert_eq!(unvisited(500, 100, Mask::Window { left: Some(3), right: Some(20) }), 320);
        assert_eq!(unvisited(500, 100, Mask::Window { left: Some(3), right: None }), 0);
    }

    #[test]
    fn tiles_that_wait_come_after_those_that_they_wait_for() {
        let shape = Shape { batch: 1, seqlen: 4096, heads: 32, head_dim: 64 };
        let forward = ProblemSpec::dense(Dtype::Bf16, shape, shape);
        let problem = BackwardSpec::contiguous(forward).validate().unwrap();
        let plan = Plan::with(&problem, &H100, &PlanOptions::default().deterministic()).unwrap();
        let schedule = &plan.dkv().schedule;
        // 32 blocks of 128 rows a tile: 264 / 32 heads.
        let order = Order::LongestFirst { section: 8, longest: Longest::Last };
        assert_eq!((schedule.order(), schedule.scheduler()), (order, Scheduler::DynamicPersistent));
        let mut next = [32; 32];
        for tile in schedule.tiles() {
            next[tile.head as usize] -= 1;
            assert_eq!(tile.m_block, next[tile.head as usize]);
        }
    }

    #[test]
    fn nothing_to_do() {
        let mut none = spec(64);
        let empty = Shape { seqlen: 0, ..none.q.shape };
        none = ProblemSpec::dense(Dtype::F16, empty, none.k.shape);
        let plan = plan(none).unwrap();
        assert_eq!((plan.stats().grid(), dq(&plan).schedule.grid()), (0, 0));
        assert_eq!(plan.dkv().schedule.num_tiles(), 40);
    }
}
