//! The step that appends rows, and the program of it alone.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::append::Plan;
use fa3_types::SequenceBase;

use super::Spec;
use super::params::Params;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// The buffers of the step, as far as its problem has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub(crate) new: Option<NewBuffers>,
    pub(crate) queries: Option<QueryBuffers>,
    pub(crate) rotation: Option<RotationBuffers>,
    /// i32 (sequences): rows of each sequence of the cache before.
    pub(crate) seqused_k: Option<BufferId>,
}

/// The buffers of new rows and of their cache.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBuffers {
    pub(crate) k_new: BufferId,
    pub(crate) v_new: BufferId,
    /// Written in part.
    pub(crate) k_cache: BufferId,
    /// Written in part.
    pub(crate) v_cache: BufferId,
    /// Scales of keys and of values (sequences, heads_kv), optional, if new rows become e4m3.
    pub(crate) descales: Option<[BufferId; 2]>,
    /// i32 (sequences + 1), if new rows are packed.
    pub(crate) cu_seqlens_k_new: Option<BufferId>,
    /// i32 (sequences, pages), from its first entry to its last, if the cache is in pages; with an index it may have
    /// other rows.
    pub(crate) page_table: Option<BufferId>,
    /// i32 (sequences), if an index says which row of the page table is each sequence's.
    pub(crate) cache_batch_idx: Option<BufferId>,
    /// i32 (sequences), written: rows of each sequence after.
    pub(crate) seqused_after: BufferId,
}

/// The buffers of queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueryBuffers {
    pub(crate) q: BufferId,
    /// Written, contiguous.
    pub(crate) q_rotated: BufferId,
    /// i32 (sequences + 1), if queries are packed.
    pub(crate) cu_seqlens_q: Option<BufferId>,
}

/// The buffers of a rotation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RotationBuffers {
    /// (table_rows, rotary_dim / 2).
    pub(crate) cos: BufferId,
    /// Like the cosines.
    pub(crate) sin: BufferId,
    /// i32 (sequences), if positions are listed.
    pub(crate) rotary_seqlens: Option<BufferId>,
}

/// The program of a plan, without its step if there is nothing to do. Its buffers are, as far as the problem has them,
/// `k_new`, `v_new`, `k_cache`, `v_cache`, `seqused_after`, `k_descale`, `v_descale`, `cu_seqlens_k_new`, `page_table`
/// and `cache_batch_idx`; `q`, `q_rotated` and `cu_seqlens_q`; `rotary_cos`, `rotary_sin` and `rotary_seqlens`;
/// `seqused_k`.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let mut program = Program::new();
    let buffers = declare(&mut program, plan);
    step(&mut program, plan, &buffers);
    program
}

/// Adds the step, if there is something to do.
pub(crate) fn step(program: &mut Program<kernels::Spec>, plan: &Plan, buffers: &Buffers) {
    if plan.grid() > 0 {
        let params = Params::of(plan, buffers);
        program.step(Spec::of(plan).into(), [plan.grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
}

/// Declares all buffers of a plan.
fn declare(program: &mut Program<kernels::Spec>, plan: &Plan) -> Buffers {
    let (problem, count) = (plan.problem(), plan.count());
    let new = problem.rows().map(|rows| NewBuffers {
        k_new: tensors::input(program, "k_new", &rows.k_new),
        v_new: tensors::input(program, "v_new", &rows.v_new),
        k_cache: tensors::in_out(program, "k_cache", &rows.k_cache),
        v_cache: tensors::in_out(program, "v_cache", &rows.v_cache),
        seqused_after: array(program, "seqused_after", &[count], BufferRole::Output),
        descales: problem.descale_shape().map(|shape| {
            let shape = shape.map(|extent| extent as u32);
            ["k_descale", "v_descale"].map(|name| {
                let scales = program.buffer(name, Elem::F32, &shape, BufferRole::OptionalInput);
                program.align(scales, 4);
                scales
            })
        }),
        cu_seqlens_k_new: rows
            .new
            .is_packed()
            .then(|| array(program, "cu_seqlens_k_new", &[count + 1], BufferRole::Input)),
        page_table: rows
            .cache
            .table_entries()
            .map(|(_, entries)| array(program, "page_table", &[entries as u32], BufferRole::Input)),
        cache_batch_idx: rows
            .cache
            .has_index()
            .then(|| array(program, "cache_batch_idx", &[count], BufferRole::Input)),
    });
    let queries = problem.queries().zip(problem.q_rotated()).map(|(queries, q_rotated)| QueryBuffers {
        q: tensors::input(program, "q", &queries.q),
        q_rotated: tensors::output(program, "q_rotated", &q_rotated),
        cu_seqlens_q: queries
            .sequences
            .is_packed()
            .then(|| array(program, "cu_seqlens_q", &[count + 1], BufferRole::Input)),
    });
    let rotation = problem.rotary().map(|rotary| {
        let shape = [rotary.table_rows, rotary.rotary_dim / 2].map(|dim| dim as u32);
        let mut table = |name| program.buffer(name, tensors::elem(rotary.table), &shape, BufferRole::Input);
        RotationBuffers {
            cos: table("rotary_cos"),
            sin: table("rotary_sin"),
            rotary_seqlens: (rotary.base == SequenceBase::Listed)
                .then(|| array(program, "rotary_seqlens", &[count], BufferRole::Input)),
        }
    });
    let seqused_k = problem.reads_used().then(|| array(program, "seqused_k", &[count], BufferRole::Input));
    Buffers { new, queries, rotation, seqused_k }
}

/// An array of 32-bit integers, which are read and written one by one.
fn array(
    program: &mut Program<kernels::Spec>,
    name: &'static str,
    shape: &[u32],
    role: BufferRole,
) -> BufferId {
    let array = program.buffer(name, Elem::U32, shape, role);
    program.align(array, 4);
    array
}

#[cfg(test)]
mod tests {
    use fa3_ir::Kernel;
    use fa3_ir::lang::Swizzle;
    use fa3_sim::ProgramSimulation;
    use fa3_types::{AppendSpec, AppendedRows, Dtype, Sequences, Shape, TensorDesc};

    use super::*;
    use crate::kernels::{KernelSpec, ladder};

    #[derive(Debug, PartialEq, Eq, Hash)]
    struct TileCopy;

    impl KernelSpec for TileCopy {
        fn kernel(&self) -> Kernel {
            ladder::tile_copy::kernel(Swizzle::None)
        }
    }

    /// A step behind it, with buffers of other names, copies the cache by TMA and finds the new row there.
    #[test]
    fn the_step_may_stand_before_others() {
        let new = TensorDesc::contiguous(Dtype::Bf16, Shape { batch: 1, seqlen: 1, heads: 1, head_dim: 64 });
        let cache = TensorDesc::contiguous(Dtype::Bf16, Shape { seqlen: 64, ..new.shape });
        let rows = AppendedRows {
            k_new: new,
            v_new: new,
            new: Sequences::dense(1, 1),
            k_cache: cache,
            v_cache: cache,
            cache: Sequences::dense(1, 64).used(),
        };
        let plan = Plan::new(&AppendSpec::new(rows).validate().unwrap()).unwrap();
        let mut program = Program::new();
        let mut matrix = |name, rows, role| program.buffer(name, Elem::Bf16, &[rows, 64], role);
        let [k_new, v_new] = ["of k", "of v"].map(|name| matrix(name, 1, BufferRole::Input));
        let [k_cache, v_cache] = ["k", "v"].map(|name| matrix(name, 64, BufferRole::InOut));
        let copy = matrix("copy", 64, BufferRole::Output);
        let [before, after] = [("before", BufferRole::Input), ("after", BufferRole::Output)]
            .map(|(name, role)| array(&mut program, name, &[1], role));
        let new = NewBuffers {
            k_new,
            v_new,
            k_cache,
            v_cache,
            descales: None,
            cu_seqlens_k_new: None,
            page_table: None,
            cache_batch_idx: None,
            seqused_after: after,
        };
        let buffers = Buffers { new: Some(new), queries: None, rotation: None, seqused_k: Some(before) };
        step(&mut program, &plan, &buffers);
        let args = [("x", k_cache), ("y", copy)];
        let args = args.map(|(name, buffer)| (name, program.tensor(buffer)));
        program.step(TileCopy.into(), [1, 1, 1], args);

        let row = |x: u16| x.to_le_bytes().repeat(64);
        let cache = |x| row(x).repeat(64);
        let used = 5_u32.to_le_bytes().to_vec();
        let initial = [row(7), row(8), cache(1), cache(2), cache(0), used, vec![0; 4]];
        let outcome = ProgramSimulation::new(&program.map(kernels::Spec::kernel)).run(&initial).unwrap();
        assert_eq!(outcome.findings().next(), None);
        let rows: Vec<&[u8]> = outcome.buffers[copy.0].chunks(128).collect();
        for (number, &given) in rows.iter().enumerate() {
            assert_eq!(given, row(if number == 5 { 7 } else { 1 }), "row {number}");
        }
        assert_eq!(outcome.buffers[after.0], [6, 0, 0, 0]);
    }
}
