//! Lowers a plan of the backward pass to a program.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::Schedule;
use fa3_sched::backward::{DqBy, Plan, PlanKind, VarlenPlan};
use fa3_sched::packed::Tiles;
use fa3_types::BackwardProblem;

use super::arguments::SplitArguments;
use super::dtable;
use super::params::{DkvParams, DqParams, RoundParams, StatsParams};
use super::scratch::{self, Scratch, Tables};
use super::sink;
use super::spec::BwdSpec;
use crate::kernels::packed::{self, TilesOf};
use crate::kernels::params::Fill;
use crate::kernels::parts::score::score_tables;
use crate::kernels::{Spec, tensors};

/// Lowers a plan to its program, without steps that have nothing to compute. In problems with sinks, the buffers of
/// `sink` and `dsink`, of shape (heads), come behind all other buffers, and the gradients of tables before them.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = of_caller(plan.problem());
    let scratch = scratch::declare(&mut program, plan);
    gradients(&mut program, plan, &scratch);
    dtable::steps(&mut program, plan, &scratch);
    sink::step(&mut program, plan, &scratch);
    program
}

/// Adds the steps of dQ, dK and dV.
fn gradients(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch) {
    if let (PlanKind::Varlen(tiles), Some(tables)) = (plan.kind(), scratch.tables) {
        write_tables(program, tiles, &tables);
    }
    let [stats, dkv, dq] = match plan.kind() {
        PlanKind::Dense(tiles) => {
            [tiles.stats().grid(), tiles.dkv().grid(), tiles.dq().map_or(0, Schedule::grid)]
        }
        PlanKind::Varlen(tiles) => {
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
    let tile_counter = tile_counter(program, "dq_tile_counter", &spec);
    let args = Fill::args(|by| match plan.dq() {
        DqBy::Kernel(_) => {
            _ = DqParams::of(plan, program, scratch, tile_counter).map(|params| params.pass(by))
        }
        DqBy::Additions => _ = RoundParams::of(plan, scratch).map(|params| params.pass(by)),
        DqBy::AdditionsInOrder => {}
    });
    program.step(spec.into(), [dq, 1, 1], args);
}

/// Adds the steps of dK and dV. The dK/dV kernel has `grid` CTAs.
fn dk_and_dv(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch, grid: u32) {
    let split = SplitArguments::of(plan, scratch);
    if let (Some(split), Some(spec)) = (&split, BwdSpec::q_blocks(plan)) {
        let ((grid, q_blocks), list) = (split.q_blocks(), split.list());
        program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = q_blocks.pass(by)));
        program.step(BwdSpec::SplitTiles.into(), [1, 1, 1], Fill::args(|by| _ = list.pass(by)));
    }
    let spec = BwdSpec::dkv(plan);
    let tile_counter = tile_counter(program, "dkv_tile_counter", &spec);
    let params = DkvParams::of(plan, program, program.tensor(scratch.stats), scratch, tile_counter);
    program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
    if let (Some(split), Some(spec)) = (&split, BwdSpec::reduce(plan)) {
        let (grid, params) = split.reduce();
        program.step(spec.into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
}

/// A program with the caller's tensors, except sinks, and without steps.
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
    if let Some(form) = forward.score() {
        score_tables(&mut program, form);
    }
    program
}

/// Adds the steps that write the tables of sequences.
fn write_tables(program: &mut Program<Spec>, tiles: &VarlenPlan, tables: &Tables) {
    packed::step(program, tiles.stats().table(), TilesOf::Rows, (tables.rows, Some(tables.firsts)));
    if tiles.dkv().grid() > 0 {
        packed::step(program, tiles.dkv().table(), TilesOf::Keys, (tables.keys, None));
    }
}

/// Adds a tile counter, if CTAs fetch tiles from one.
fn tile_counter(program: &mut Program<Spec>, name: &'static str, spec: &BwdSpec) -> Option<BufferId> {
    spec.fetches_tiles().then(|| program.buffer(name, Elem::U32, &[1], BufferRole::TileCounter))
}
