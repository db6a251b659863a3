//! The program of a plan of the forward pass.

use fa3_ir::{BufferRole, Elem, Program};
use fa3_sched::Scheduler;
use fa3_sched::forward::{Listed, Numbered, Plan, Shared, Way};
use fa3_types::{Granularity, Problem, ValueLayout};

use super::FwdSpec;
use super::merge;
use super::params::Params;
use crate::kernels::packed::{self, TilesOf};
use crate::kernels::params::{Fill, Host};
use crate::kernels::parts::intervals::interval_rows;
use crate::kernels::parts::shares::BEGUN_WORDS;
use crate::kernels::parts::table::Table;
use crate::kernels::quantize::transpose_v;
use crate::kernels::{Spec, tensors};

/// The buffers of a forward program.
pub mod buffers {
    use fa3_ir::BufferId;
    use fa3_types::Problem;

    /// (batch, seqlen_q, heads, head_dim), with strides.
    pub const Q: BufferId = BufferId(0);
    /// (batch, seqlen_k, heads_kv, head_dim), with strides.
    pub const K: BufferId = BufferId(1);
    /// (batch, seqlen_k, heads_kv, head_dim_v), with strides; or transposed, see [`fa3_types::ValueLayout`].
    pub const V: BufferId = BufferId(2);
    /// (batch, seqlen_q, heads, head_dim_v), with strides.
    pub const O: BufferId = BufferId(3);
    /// (batch, heads, seqlen_q); optional.
    pub const LSE: BufferId = BufferId(4);
    /// Scales of Q, K and V, see [`fa3_types::Problem::descale_shapes`], optional; of e4m3 only.
    pub const DESCALES: [BufferId; 3] = [BufferId(5), BufferId(6), BufferId(7)];
    /// Scales of K and V beside Q of 16 bits.
    const KEY_DESCALES: [BufferId; 2] = [BufferId(5), BufferId(6)];

    /// The scales of a problem's tensors that have some.
    pub fn descales(problem: &Problem) -> [Option<BufferId>; 3] {
        let [k, v] = KEY_DESCALES;
        match (problem.has_scales(), problem.converts_keys()) {
            (false, _) => [None; 3],
            (true, false) => DESCALES.map(Some),
            (true, true) => [None, Some(k), Some(v)],
        }
    }
    /// Means of V's channels, see [`fa3_types::Problem::v_mean_shape`]; of e4m3 whose channels of V have scales only.
    pub const V_MEAN: BufferId = BufferId(8);
    /// The part of the queries that is multiplied by V (batch, seqlen_q, heads, head_dim_v), with strides; of problems
    /// with [`fa3_types::Problem::qv`] only.
    pub const QV: &str = "qv";
    /// Logits of query heads in the softmax's denominator, (heads); of problems with sinks only.
    pub const SINK: &str = "sink";
    /// V transposed, where a kernel does that before.
    pub const V_TRANSPOSED: &str = "v_transposed";
    /// The pages of each sequence of K and V (sequences, pages of each); of keys in pages only.
    pub const PAGE_TABLE: &str = "page_table";
    /// Which row of the page table is each sequence's (sequences); of tables with other rows only.
    pub const BATCH_IDX: &str = "cache_batch_idx";
    /// Results of parts of units: O in f32 (slot, row of a tile, head_dim_v); where CTAs share keys. Of pieces it is
    /// (piece, row of LSE, head_dim_v).
    pub const O_SLOTS: &str = "o_slots";
    /// Their LSE.
    pub const LSE_SLOTS: &str = "lse_slots";
    /// The parts to be merged of each unit, or of the one that begins in each CTA and goes on.
    pub const BEGUN: &str = "begun";
    /// The table of sequences; a tensor of the caller's where the plan says so.
    pub const TABLE: &str = "table";
    /// 32 bits from which CTAs fetch their tiles; of plans with the dynamic persistent scheduler only.
    pub const TICKET: &str = "ticket";
}

/// The program of a plan; without steps if there are no rows to compute. Buffers are as large as their tensors reach,
/// gaps included.
pub fn program(plan: &Plan) -> Program<Spec> {
    let mut program = of_caller(plan.problem());
    if plan.scheduler() == Scheduler::DynamicPersistent {
        program.buffer(buffers::TICKET, Elem::U32, &[1], BufferRole::Ticket);
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
    let (grid, params) = match plan.way() {
        Way::Numbered(tiles) => numbered(&mut program, plan, tiles),
        Way::Listed(tiles) => listed(&mut program, plan, tiles),
        Way::Shared(shared) => shares(&mut program, plan, shared),
    };
    if grid > 0 {
        program.step(FwdSpec::of(plan).into(), [grid, 1, 1], Fill::args(|by| _ = params.pass(by)));
        if let Way::Shared(shared) = plan.way()
            && shared.merges()
        {
            merge::step(&mut program, plan, shared);
        }
    }
    program
}

/// Sequences of one length: adds the step that transposes V, if there is one. Gives the attention's CTAs and arguments.
fn numbered(program: &mut Program<Spec>, plan: &Plan, tiles: &Numbered) -> (u32, Params<Host>) {
    let problem = plan.problem();
    if let Some(tiles) = tiles.v_tiles() {
        let dims = tensors::transposed_dims(problem.v().shape);
        let codes = program.buffer(buffers::V_TRANSPOSED, Elem::E4m3, &dims, BufferRole::Scratch);
        transpose_v::step(program, (buffers::V, problem.v()), codes, tiles);
    }
    (tiles.schedule().grid(), Params::numbered(plan, tiles, program))
}

/// Sequences whose lengths are data: adds the arrays of lengths by their names, and the step that writes the table; or
/// the table alone, if the caller gives it. Gives the attention's CTAs and arguments.
fn listed(program: &mut Program<Spec>, plan: &Plan, listed: &Listed) -> (u32, Params<Host>) {
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

/// CTAs that share keys: adds the arrays of lengths by their names, and the scratch of results. Gives the attention's
/// CTAs and arguments.
fn shares(program: &mut Program<Spec>, plan: &Plan, shared: &Shared) -> (u32, Params<Host>) {
    packed::arrays(program, shared.sequences());
    let [slots, rows] = shared.part_dims(plan.problem());
    let cols = plan.problem().head_dim_v() as u32;
    program.buffer(buffers::O_SLOTS, Elem::F32, &[slots, rows, cols], BufferRole::Scratch);
    program.buffer(buffers::LSE_SLOTS, Elem::F32, &[slots, rows], BufferRole::Scratch);
    if let Some(sayings) = shared.sayings() {
        program.buffer(buffers::BEGUN, Elem::U32, &[sayings, BEGUN_WORDS], BufferRole::Scratch);
    }
    (shared.ctas(), Params::shared(plan, shared, program))
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
            // Scales of channels are read four at a time, others one by one.
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
    if let Some(form) = problem.mask().intervals() {
        interval_rows(&mut program, form, problem.q().shape);
    }
    if let Some(qv) = problem.qv() {
        tensors::input(&mut program, buffers::QV, qv);
    }
    program
}
