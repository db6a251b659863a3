//! The program of a plan of the forward pass.

use fa3_ir::{Buffer, BufferRole, Elem, Program};
use fa3_sched::forward::{DensePlan, Plan, PlanKind, RunningO, SplitKvPlan, VarlenPlan};
use fa3_sched::{ListedRows, Scheduler};
use fa3_types::{Granularity, Problem, ValueLayout};

use super::params::Params;
use super::spec::FwdSpec;
use super::{buffers, combine};
use crate::kernels::packed::{self, TilesOf};
use crate::kernels::params::{Fill, Host};
use crate::kernels::parts::intervals::interval_rows;
use crate::kernels::parts::reduction::Reduction;
use crate::kernels::parts::score::score_tables;
use crate::kernels::parts::table::Table;
use crate::kernels::quantize::transpose_v;
use crate::kernels::{Spec, tensors};

/// Lowers a plan to its program, which has no steps if there are no rows to compute. Buffers extend from a tensor's
/// first element to its last one, gaps included.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = of_caller(plan.problem());
    if plan.scheduler() == Scheduler::DynamicPersistent {
        program.buffer(buffers::TILE_COUNTER, Elem::U32, &[1], BufferRole::TileCounter);
    }
    let sequences = plan.problem().seqs_k();
    if let Some((_, entries)) = sequences.table_entries() {
        let count = plan.problem().batch() as u32;
        let table = program.buffer(buffers::PAGE_TABLE, Elem::U32, &[entries as u32], BufferRole::Input);
        program.align(table, 4);
        if sequences.has_index() {
            let index = program.buffer(buffers::BATCH_IDX, Elem::U32, &[count], BufferRole::Input);
            program.align(index, 4);
        }
    }
    if plan.pieces().is_some_and(|pieces| pieces.running == RunningO::Workspace) {
        let (tile, elem) = (plan.tile(), Elem::F32);
        let dims = [plan.ctas(), tile.tile_m, tile.head_dim_v];
        program.buffer(buffers::RUNNING_O, elem, &dims, BufferRole::Scratch);
    }
    let (grid, params) = match plan.kind() {
        PlanKind::Dense(tiles) => numbered(&mut program, plan, tiles),
        PlanKind::Varlen(tiles) => listed(&mut program, plan, tiles),
        PlanKind::SplitKv(shared) => shares(&mut program, plan, shared),
    };
    if grid > 0 {
        program.step(FwdSpec::of(plan).into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
        if let PlanKind::SplitKv(shared) = plan.kind()
            && shared.needs_reduction()
        {
            combine::step(&mut program, plan, shared);
        }
    }
    program
}

/// Adds the step that transposes V, if the plan has one, for sequences of one length. Gives the number of CTAs and the
/// arguments of attention.
fn numbered(program: &mut Program<Spec>, plan: &Plan, tiles: &DensePlan) -> (u32, Params<Host>) {
    let problem = plan.problem();
    if let Some(tiles) = tiles.v_tiles() {
        let dims = tensors::transposed_dims(problem.v().shape);
        let codes = program.buffer(buffers::V_TRANSPOSED, Elem::E4m3, &dims, BufferRole::Scratch);
        transpose_v::step(program, (buffers::V, problem.v()), codes, tiles);
    }
    (tiles.schedule().grid(), Params::numbered(plan, tiles, program))
}

/// Adds the arrays of lengths, and the step that writes the table of sequences, for varlen. If the caller gives the
/// table, adds only the table. Gives the number of CTAs and the arguments of attention.
fn listed(program: &mut Program<Spec>, plan: &Plan, listed: &VarlenPlan) -> (u32, Params<Host>) {
    let (tiles, words) = (listed.tiles(), [listed.tiles().table().words()]);
    if listed.has_given_table() {
        let address = program.buffer(buffers::TABLE, Elem::U32, &words, BufferRole::Input);
        let table = Table::of(tiles, address, plan.tiling(), None).given(tiles);
        return (tiles.grid(), Params::listed(plan, listed, table, program));
    }
    packed::arrays(program, tiles.table());
    let address = program.buffer(buffers::TABLE, Elem::U32, &words, BufferRole::Scratch);
    if tiles.grid() > 0 {
        packed::step(program, tiles.table(), TilesOf::Rows, (address, None));
    }
    let table = Table::of(tiles, address, plan.tiling(), None);
    (tiles.grid(), Params::listed(plan, listed, table, program))
}

/// Adds the arrays of lengths and the buffers of splits, for split-KV. Gives the CTAs and the arguments of attention.
fn shares(program: &mut Program<Spec>, plan: &Plan, shared: &SplitKvPlan) -> (u32, Params<Host>) {
    packed::arrays(program, shared.sequences());
    lists(program, plan.problem(), shared);
    if plan.pieces().is_none() {
        let [partials, rows] = shared.partial_dims(plan.problem());
        let cols = plan.problem().head_dim_v() as u32;
        program.buffer(buffers::O_PARTIAL, Elem::F32, &[partials, rows, cols], BufferRole::Scratch);
        program.buffer(buffers::LSE_PARTIAL, Elem::F32, &[partials, rows], BufferRole::Scratch);
        if plan.problem().has_max_logits() {
            program.buffer(buffers::MAX_LOGITS_PARTIAL, Elem::F32, &[partials, rows], BufferRole::Scratch);
        }
    }
    if let Some(entries) = shared.reduction_entries() {
        program.buffer(buffers::BEGUN, Elem::U32, &[entries, Reduction::WORDS], BufferRole::Scratch);
    }
    (shared.ctas(), Params::shared(plan, shared, program))
}

/// Adds the lists of keys, if there are lists, and the second cache with its lists.
fn lists(program: &mut Program<Spec>, problem: &Problem, shared: &SplitKvPlan) {
    let Some((first, second)) = shared.lists() else { return };
    let count = shared.sequences().count();
    let array = |program: &mut Program<Spec>, name, entries| {
        let (elem, role) = (Elem::U32, BufferRole::Input);
        program.add(Buffer { name, elem, shape: vec![entries], role, align: 4, tensor: None });
    };
    let entries = |list: ListedRows| match count.checked_sub(1) {
        Some(others) => u64::from(others) * u64::from(list.list_stride) + u64::from(list.keys),
        None => 0,
    };
    array(program, buffers::INDICES, entries(first));
    if let Some(scales) = problem.v_scales() {
        tensors::input(program, buffers::V_SCALES, &scales);
    }
    if let Some((list, extra)) = second.zip(problem.extra()) {
        array(program, buffers::EXTRA_INDICES, entries(list));
        if list.used {
            array(program, buffers::EXTRA_SEQUSED, count.into());
        }
        tensors::input(program, buffers::EXTRA_K, &extra.k);
        tensors::input(program, buffers::EXTRA_V, &extra.v);
    }
}

/// A program with the caller's tensors, and no steps.
fn of_caller(problem: &Problem) -> Program<Spec> {
    let mut program = Program::new();
    tensors::input(&mut program, "q", problem.q());
    tensors::input(&mut program, "k", problem.k());
    match problem.v_layout() {
        ValueLayout::Rows => tensors::input(&mut program, "v", problem.v()),
        ValueLayout::Transposed => {
            let dims = tensors::transposed_dims(problem.v().shape);
            program.buffer("v", Elem::E4m3, &dims, BufferRole::Input)
        }
    };
    tensors::output(&mut program, "o", problem.o());
    let lse = problem.lse_shape().map(|extent| extent as u32);
    program.buffer("lse", Elem::F32, &lse, BufferRole::OptionalOutput);
    let names = ["q_descale", "k_descale", "v_descale"];
    let of_tensors = names.into_iter().zip(problem.scales()).zip(problem.descale_shapes());
    for (((name, scales), shape), buffer) in of_tensors.zip(buffers::descales(problem)) {
        if buffer.is_some() {
            let shape: Vec<u32> = shape.into_iter().map(|extent| extent as u32).collect();
            let is_optional = scales == Granularity::Head;
            let role = if is_optional { BufferRole::OptionalInput } else { BufferRole::Input };
            let descale = program.buffer(name, Elem::F32, &shape, role);
            // Scales of channels are read four at a time, so they keep their alignment; all others are read one by one.
            if scales != Granularity::Channel {
                program.align(descale, 4);
            }
        }
    }
    if let Some(shape) = problem.v_mean_shape() {
        let shape = shape.map(|extent| extent as u32);
        program.buffer("v_mean", Elem::F32, &shape, BufferRole::Input);
    }
    tensors::sink(&mut program, problem);
    if problem.has_max_logits() {
        let buffer = program.buffer(buffers::MAX_LOGITS, Elem::F32, &lse, BufferRole::Output);
        program.align(buffer, 4);
    }
    if let Some(form) = problem.mask().intervals() {
        interval_rows(&mut program, form, problem.q().shape);
    }
    if let Some(qv) = problem.qv() {
        tensors::input(&mut program, buffers::QV, qv);
    }
    if let Some(scales) = problem.token_scales() {
        for (name, tensor) in [(buffers::K_SCALES, &scales.k), (buffers::V_SCALES, &scales.v)] {
            let buffer = tensors::input(&mut program, name, tensor);
            program.align(buffer, 4);
        }
    }
    if let Some(form) = problem.score() {
        score_tables(&mut program, form);
    }
    program
}
