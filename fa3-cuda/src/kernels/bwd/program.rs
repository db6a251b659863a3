//! The program that a plan of the backward pass lowers to.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::Schedule;
use fa3_sched::backward::{ADDED_ROWS, DkvTile, DqBy, Listed, Plan, Way};
use fa3_sched::packed::Tiles;
use fa3_types::{BackwardProblem, Intervals};

use super::arguments::{IntervalBuffers, Scratch, SplitTiles, Tables};
use super::params::{DkvParams, DqParams, RoundParams, StatsParams};
use super::summaries::Summaries;
use super::{BwdSpec, sink};
use crate::kernels::packed::{self, TilesOf};
use crate::kernels::params::Fill;
use crate::kernels::parts::intervals::interval_rows;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::{Spec, tensors};

/// The buffers of a backward program: the caller's tensors, then its workspace.
pub mod buffers {
    use fa3_ir::BufferId;

    /// (batch, seqlen_q, heads, head_dim), with strides.
    pub const Q: BufferId = BufferId(0);
    /// (batch, seqlen_k, heads_kv, head_dim), with strides.
    pub const K: BufferId = BufferId(1);
    /// (batch, seqlen_k, heads_kv, head_dim_v), with strides.
    pub const V: BufferId = BufferId(2);
    /// (batch, seqlen_q, heads, head_dim_v), with strides.
    pub const O: BufferId = BufferId(3);
    /// (batch, heads, seqlen_q).
    pub const LSE: BufferId = BufferId(4);
    /// As O, with strides of its own.
    pub const DOUT: BufferId = BufferId(5);
    /// As LSE; optional.
    pub const DLSE: BufferId = BufferId(6);
    /// As Q, with strides of its own. Gradients may lie between each other's rows.
    pub const DQ: BufferId = BufferId(7);
    /// As K, with strides of its own.
    pub const DK: BufferId = BufferId(8);
    /// As V, with strides of its own.
    pub const DV: BufferId = BufferId(9);
    /// How many of them are tensors of the caller's.
    pub const OF_CALLER: usize = 10;
}

/// Pairs of rows of Q of a head that have statistics, at least one, so that there is something to make a tensor map of.
pub(super) fn pairs(plan: &Plan) -> u32 {
    match plan.way() {
        Way::Numbered(tiles) => tiles.lens().q.div_ceil(2).max(1),
        Way::Listed(tiles) => tiles.places() / 2,
    }
}

/// Blocks of [`ADDED_ROWS`] rows of a head that have sums of dQ: of all blocks of the dK/dV kernel, whose last may
/// reach further than the rows.
pub(super) fn sum_blocks(plan: &Plan) -> u32 {
    match plan.way() {
        Way::Numbered(tiles) => tiles.lens().q.next_multiple_of(plan.dkv().tile.tile_m) / ADDED_ROWS,
        Way::Listed(tiles) => tiles.places() / ADDED_ROWS,
    }
}

/// The program of a plan; without the steps that have nothing to compute. Behind the buffers without which there is no
/// program come `sink` and `dsink` (heads) of a problem with sinks.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = of_caller(plan.problem());
    let scratch = scratch(&mut program, plan);
    gradients(&mut program, plan, &scratch);
    sink::step(&mut program, plan, &scratch);
    program
}

/// Adds the steps of dQ, dK and dV.
fn gradients(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch) {
    if let (Way::Listed(tiles), Some(tables)) = (plan.way(), scratch.tables) {
        write_tables(program, tiles, &tables);
    }
    let [stats, dkv, dq] = match plan.way() {
        Way::Numbered(tiles) => {
            [tiles.stats().grid(), tiles.dkv().grid(), tiles.dq().map_or(0, Schedule::grid)]
        }
        Way::Listed(tiles) => {
            let dq = tiles.dq().map_or(tiles.stats_grid(), Tiles::grid);
            [tiles.stats_grid(), tiles.dkv().grid(), dq]
        }
    };
    if stats > 0 {
        let params = StatsParams::of(plan, scratch);
        program.step(BwdSpec::stats(plan).into(), [stats, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    if dkv > 0 {
        dk_and_dv(program, plan, scratch, dkv);
    }
    let Some(spec) = BwdSpec::dq(plan).filter(|_| dq > 0) else { return };
    let ticket = ticket(program, "dq_ticket", &spec);
    let args = Fill::args(|by| match plan.dq() {
        DqBy::Kernel(_) => _ = DqParams::of(plan, scratch, ticket).map(|params| params.pass(by)),
        DqBy::Additions => _ = RoundParams::of(plan, scratch).map(|params| params.pass(by)),
        DqBy::AdditionsInOrder => {}
    });
    program.step(spec.into(), [dq, 1, 1], args);
}

/// Adds the steps of dK and dV, of which the kernel with products has so many CTAs.
fn dk_and_dv(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch, grid: u32) {
    let split = SplitTiles::of(plan, scratch);
    if let (Some(split), Some(spec)) = (&split, BwdSpec::seeing(plan)) {
        let (grid, seeing, list) = (split.seeing_grid(), split.seeing(), split.list());
        program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = seeing.pass(by)));
        program.step(BwdSpec::Splits.into(), [1, 1, 1], Fill::args(|by| _ = list.pass(by)));
    }
    let spec = BwdSpec::dkv(plan);
    let ticket = ticket(program, "dkv_ticket", &spec);
    let params = DkvParams::of(plan, program.tensor(scratch.stats), scratch, ticket);
    program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
    if let (Some(split), Some(spec)) = (&split, BwdSpec::join(plan)) {
        let (grid, params) = (split.join_grid(), split.join());
        program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
}

/// A program with the caller's tensors, but for sinks, and no steps.
fn of_caller(problem: &BackwardProblem) -> Program<Spec> {
    let forward = problem.forward();
    let mut program = Program::new();
    tensors::input(&mut program, "q", forward.q());
    tensors::input(&mut program, "k", forward.k());
    tensors::input(&mut program, "v", forward.v());
    tensors::input(&mut program, "o", forward.o());
    let lse = forward.lse_shape().map(|extent| extent as u32);
    let of_lse = program.buffer("lse", Elem::F32, &lse, BufferRole::Input);
    tensors::input(&mut program, "dout", problem.dout());
    let of_dlse = program.buffer("dlse", Elem::F32, &lse, BufferRole::OptionalInput);
    [of_lse, of_dlse].into_iter().for_each(|buffer| program.align(buffer, 4));
    let gradients = [("dq", problem.dq()), ("dk", problem.dk()), ("dv", problem.dv())];
    for (name, x) in gradients {
        tensors::output(&mut program, name, x);
    }
    program
}

/// Adds what kernels hand each other; of listed sequences the arrays of lengths before it.
fn scratch(program: &mut Program<Spec>, plan: &Plan) -> Scratch {
    let [batch, heads, _] = plan.problem().forward().lse_shape().map(|extent| extent as u32);
    // Places are numbered through all sequences of a table.
    let batch = if plan.numbered().is_some() { batch } else { 1 };
    if let Way::Listed(tiles) = plan.way() {
        packed::arrays(program, tiles.stats().table());
    }
    // Of rows 2i and 2i + 1: -LSE · log₂e of both, then -D of both.
    let stats = program.buffer("stats", Elem::F32, &[batch, heads, pairs(plan), 4], BufferRole::Scratch);
    let tile = plan.dkv().tile;
    let blocks = [batch, heads, sum_blocks(plan)];
    let sums = tile.adds_dq.map(|_| {
        // The only tile of keys is the first and the last to add: it writes dQ, and there is no sum.
        let is_alone =
            tile.adds_in_order() && plan.numbered().is_some_and(|tiles| tiles.lens().k <= tile.tile_n);
        let rows = if is_alone { 0 } else { ADDED_ROWS };
        let numbers = [blocks.as_slice(), &[rows, tile.head_dim]].concat();
        program.buffer("sums", Elem::F32, &numbers, BufferRole::Scratch)
    });
    let last_added =
        tile.adds_in_order().then(|| program.buffer("last_added", Elem::U32, &blocks, BufferRole::Scratch));
    let tables = match plan.way() {
        Way::Numbered(_) => None,
        Way::Listed(tiles) => {
            let [rows, keys] = [tiles.stats(), tiles.dkv()].map(|tiles| tiles.table());
            let mut words = |name, words| program.buffer(name, Elem::U32, &[words], BufferRole::Scratch);
            Some(Tables {
                rows: words("row_table", rows.words()),
                keys: words("key_table", keys.words()),
                firsts: words("first_places", rows.count() + 1),
            })
        }
    };
    let forward = plan.problem().forward();
    let intervals = forward.mask().intervals().map(|form| interval_buffers(program, plan, form));
    Scratch { stats, sums, last_added, tables, intervals }
}

/// Adds the buffers under a mask of intervals.
fn interval_buffers(program: &mut Program<Spec>, plan: &Plan, form: Intervals) -> IntervalBuffers {
    let q = plan.problem().forward().q().shape;
    let rows = interval_rows(program, form, q);
    let numbered = plan.numbered().expect("sequences under intervals are of one length");
    let splits = numbered.splits().expect("tiles under intervals may be split");
    let DkvTile { head_dim, head_dim_v, tile_n, .. } = plan.dkv().tile;
    let mut scratch = |name, elem, dims: &[u32]| program.buffer(name, elem, dims, BufferRole::Scratch);
    let summaries = scratch("summaries", Elem::U32, &Summaries::dims(form, q));
    let [blocks, list] = KeyTiles::dims(numbered.dkv().num_tiles(), &splits);
    let tiles =
        [("blocks_of_keys", blocks), ("splits", list)].map(|(name, dims)| scratch(name, Elem::U32, &dims));
    let parts = [("dk_of_parts", head_dim), ("dv_of_parts", head_dim_v)]
        .map(|(name, cols)| scratch(name, Elem::F32, &[splits.most_parts(), tile_n, cols]));
    IntervalBuffers { rows, summaries, tiles, parts }
}

/// Adds the steps that write the tables.
fn write_tables(program: &mut Program<Spec>, tiles: &Listed, tables: &Tables) {
    packed::step(program, tiles.stats().table(), TilesOf::Rows, (tables.rows, Some(tables.firsts)));
    if tiles.dkv().grid() > 0 {
        packed::step(program, tiles.dkv().table(), TilesOf::Keys, (tables.keys, None));
    }
}

/// A counter from which CTAs fetch their tiles, if that is how they get them.
fn ticket(program: &mut Program<Spec>, name: &'static str, spec: &BwdSpec) -> Option<BufferId> {
    spec.draws_tiles().then(|| program.buffer(name, Elem::U32, &[1], BufferRole::Ticket))
}
