//! Lowers a plan of the backward pass to a program.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::Schedule;
use fa3_sched::backward::{DqBy, Listed, Plan, Way};
use fa3_sched::packed::Tiles;
use fa3_types::BackwardProblem;

use super::arguments::SplitTiles;
use super::params::{DkvParams, DqParams, RoundParams, StatsParams};
use super::scratch::{self, Scratch, Tables};
use super::sink;
use super::spec::BwdSpec;
use crate::kernels::packed::{self, TilesOf};
use crate::kernels::params::Fill;
use crate::kernels::{Spec, tensors};

/// Lowers a plan to its program, without steps that have nothing to compute. `sink` and `dsink` (heads), in problems
/// with sinks, come behind all other buffers.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = of_caller(plan.problem());
    let scratch = scratch::declare(&mut program, plan);
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

/// Adds the steps of dK and dV. The dK/dV kernel has `grid` CTAs.
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
    program
}

/// Adds the steps that write the tables of sequences.
fn write_tables(program: &mut Program<Spec>, tiles: &Listed, tables: &Tables) {
    packed::step(program, tiles.stats().table(), TilesOf::Rows, (tables.rows, Some(tables.firsts)));
    if tiles.dkv().grid() > 0 {
        packed::step(program, tiles.dkv().table(), TilesOf::Keys, (tables.keys, None));
    }
}

/// Adds a tile counter, if CTAs draw tiles from one.
fn ticket(program: &mut Program<Spec>, name: &'static str, spec: &BwdSpec) -> Option<BufferId> {
    spec.draws_tiles().then(|| program.buffer(name, Elem::U32, &[1], BufferRole::Ticket))
}
