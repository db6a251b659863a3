//! The program that a plan of the backward pass lowers to.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::backward::{ADDED_ROWS, DqBy, Plan};
use fa3_sched::{Schedule, Scheduler};
use fa3_types::BackwardProblem;

use super::params::{DkvParams, DqParams, RoundParams, StatsParams, sum_blocks};
use super::{BwdSpec, sink};
use crate::kernels::params::Fill;
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
    /// As Q, with strides of its own.
    pub const DQ: BufferId = BufferId(7);
    /// As K, with strides of its own.
    pub const DK: BufferId = BufferId(8);
    /// As V, with strides of its own.
    pub const DV: BufferId = BufferId(9);
    /// How many of them are tensors of the caller's.
    pub const OF_CALLER: usize = 10;
}

/// Pairs of rows of Q of a head, at least one, so that there is something to make a tensor map of.
pub(super) fn pairs(problem: &BackwardProblem) -> u32 {
    (problem.forward().q().shape.seqlen as u32).div_ceil(2).max(1)
}

/// The program of a plan; without the steps that have nothing to compute. Behind the buffers without which there is no
/// program come `sink` and `dsink` (heads) of a problem with sinks.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = without_sinks(plan);
    sink::step(&mut program, plan);
    program
}

fn without_sinks(plan: &Plan) -> Program<Spec> {
    let (problem, forward) = (plan.problem(), plan.problem().forward());
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
    tensors::output(&mut program, "dq", problem.dq());
    tensors::output(&mut program, "dk", problem.dk());
    tensors::output(&mut program, "dv", problem.dv());

    // Of rows 2i and 2i + 1: -LSE · log₂e of both, then -D of both.
    let [batch, heads, _] = lse;
    let stats = program.buffer("stats", Elem::F32, &[batch, heads, pairs(problem), 4], BufferRole::Scratch);
    let tile = plan.dkv().tile;
    let sums = tile.adds_dq.map(|_| {
        let blocks = [batch, heads, sum_blocks(plan)];
        // The only tile of keys is the first and the last to add: it writes dQ, and there is no sum.
        let is_alone = tile.adds_in_order() && plan.dkv().lens.q <= tile.tile_n;
        let rows = if is_alone { 0 } else { ADDED_ROWS };
        let numbers = [blocks.as_slice(), &[rows, tile.head_dim]].concat();
        let sums = program.buffer("sums", Elem::F32, &numbers, BufferRole::Scratch);
        let last_added = || program.buffer("last_added", Elem::U32, &blocks, BufferRole::Scratch);
        (sums, tile.adds_in_order().then(last_added))
    });
    if plan.stats().grid() > 0 {
        let params = StatsParams::of(plan, stats, sums);
        let args = Fill::args(|by| _ = params.pass(by));
        program.step(BwdSpec::stats(plan).into(), [plan.stats().grid(), 1, 1], args);
    }
    if plan.dkv().schedule.grid() > 0 {
        let ticket = ticket(&mut program, "dkv_ticket", &plan.dkv().schedule);
        let params = DkvParams::of(plan, program.tensor(stats), sums, ticket);
        let args = Fill::args(|by| _ = params.pass(by));
        program.step(BwdSpec::dkv(plan).into(), [plan.dkv().schedule.grid(), 1, 1], args);
    }
    let Some(dq_spec) = BwdSpec::dq(plan) else { return program };
    let (grid, args) = match (plan.dq(), sums) {
        (DqBy::Kernel(part), _) if part.schedule.grid() > 0 => {
            let ticket = ticket(&mut program, "dq_ticket", &part.schedule);
            let params = DqParams::of(plan, part, stats, ticket);
            (part.schedule.grid(), Fill::args(|by| _ = params.pass(by)))
        }
        (DqBy::Additions(blocks), Some(sums)) if blocks.grid() > 0 => {
            let params = RoundParams::of(plan, blocks, sums);
            (blocks.grid(), Fill::args(|by| _ = params.pass(by)))
        }
        (DqBy::Kernel(_) | DqBy::Additions(_) | DqBy::AdditionsInOrder, _) => return program,
    };
    program.step(dq_spec.into(), [grid, 1, 1], args);
    program
}

/// A counter from which CTAs fetch their tiles, if that is how they get them.
fn ticket(program: &mut Program<Spec>, name: &'static str, schedule: &Schedule) -> Option<BufferId> {
    let draws = schedule.scheduler() == Scheduler::DynamicPersistent;
    draws.then(|| program.buffer(name, Elem::U32, &[1], BufferRole::Ticket))
}

#[cfg(test)]
mod tests {
    use fa3_sched::DeviceLimits;
    use fa3_types::{BackwardSpec, Dtype, ProblemSpec, Shape};

    use super::*;

    #[test]
    fn one_tile_of_keys_has_no_sums() {
        let bytes = |keys| {
            let q = Shape { batch: 2, seqlen: 4096, heads: 8, head_dim: 64 };
            let forward = ProblemSpec::dense(Dtype::Bf16, q, Shape { seqlen: keys, ..q });
            let problem = BackwardSpec::contiguous(forward).validate().expect("shapes agree");
            let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).expect("there is a tile");
            let program = program(&plan);
            let BufferId(sums) = program.find("sums").expect("dQ is added up");
            program.buffers[sums].bytes()
        };
        assert_eq!([77, 128, 129].map(bytes), [0, 0, 2 * 8 * 4096 * 64 * 4]);
    }
}
