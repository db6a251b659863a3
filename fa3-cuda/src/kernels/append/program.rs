//! The program that appends rows.

use fa3_ir::{BufferRole, Elem, Program};
use fa3_sched::append::Plan;
use fa3_types::SequenceBase;

use super::params::Params;
use super::spec::Spec;
use crate::kernels::params::Fill;
use crate::kernels::{self, tensors};

/// Lowers a plan to a program of one launch, or of none if there is nothing to do. The program declares the buffers
/// that the problem has among these: `k_new`, `v_new`, `k_cache`, `v_cache`, `seqused_after`, `k_descale`, `v_descale`,
/// `cu_seqlens_k_new`, `page_table` and `cache_batch_idx`; `q`, `q_rotated` and `cu_seqlens_q`; `rotary_cos`,
/// `rotary_sin` and `rotary_seqlens`; `seqused_k`.
pub fn program(plan: &Plan) -> Program<kernels::Spec> {
    let mut program = Program::new();
    new_rows(&mut program, plan);
    queries(&mut program, plan);
    if plan.problem().reads_used() {
        array(&mut program, "seqused_k", plan.count(), BufferRole::Input);
    }
    if plan.grid() > 0 {
        let params = Params::of(plan, &program);
        program.step(Spec::of(plan).into(), [plan.grid(), 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
    program
}

/// Adds the buffers of new rows and of the cache.
fn new_rows(program: &mut Program<kernels::Spec>, plan: &Plan) {
    let (problem, count) = (plan.problem(), plan.count());
    let Some(rows) = problem.rows() else { return };
    tensors::input(program, "k_new", &rows.k_new);
    tensors::input(program, "v_new", &rows.v_new);
    tensors::in_out(program, "k_cache", &rows.k_cache);
    tensors::in_out(program, "v_cache", &rows.v_cache);
    array(program, "seqused_after", count, BufferRole::Output);
    if let Some(shape) = problem.descale_shape() {
        let shape = shape.map(|extent| extent as u32);
        for name in ["k_descale", "v_descale"] {
            let scales = program.buffer(name, Elem::F32, &shape, BufferRole::OptionalInput);
            program.align(scales, 4);
        }
    }
    if rows.new.is_packed() {
        array(program, "cu_seqlens_k_new", count + 1, BufferRole::Input);
    }
    if let Some((_, entries)) = rows.cache.table_entries() {
        array(program, "page_table", entries as u32, BufferRole::Input);
    }
    if rows.cache.has_index() {
        array(program, "cache_batch_idx", count, BufferRole::Input);
    }
}

/// Adds the buffers of queries, and of the tables by which queries and new keys are rotated.
fn queries(program: &mut Program<kernels::Spec>, plan: &Plan) {
    let (problem, count) = (plan.problem(), plan.count());
    if let Some((queries, q_rotated)) = problem.queries().zip(problem.q_rotated()) {
        tensors::input(program, "q", &queries.q);
        tensors::output(program, "q_rotated", &q_rotated);
        if queries.sequences.is_packed() {
            array(program, "cu_seqlens_q", count + 1, BufferRole::Input);
        }
    }
    if let Some(rotary) = problem.rotary() {
        let shape = [rotary.table_rows, rotary.rotary_dim / 2].map(|dim| dim as u32);
        for name in ["rotary_cos", "rotary_sin"] {
            program.buffer(name, tensors::elem(rotary.table), &shape, BufferRole::Input);
        }
        if rotary.base == SequenceBase::Listed {
            array(program, "rotary_seqlens", count, BufferRole::Input);
        }
    }
}

/// Adds an array of 32-bit integers. Kernels access its elements one by one, so it needs no more alignment than one.
fn array(program: &mut Program<kernels::Spec>, name: &'static str, count: u32, role: BufferRole) {
    let array = program.buffer(name, Elem::U32, &[count], role);
    program.align(array, 4);
}

#[cfg(test)]
mod tests {
    use fa3_ir::lang::Swizzle;
    use fa3_ir::{BufferId, Kernel};
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

    /// A later step, whose buffers have other names, copies the cache by TMA. It must find the new row there.
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
        let append = program(&plan);
        let mut program = Program::new();
        let mut matrix = |name, rows, role| program.buffer(name, Elem::Bf16, &[rows, 64], role);
        _ = ["k_new", "v_new"].map(|name| matrix(name, 1, BufferRole::Input));
        let [k_cache, _] = ["k", "v"].map(|name| matrix(name, 64, BufferRole::InOut));
        let copy = matrix("copy", 64, BufferRole::Output);
        array(&mut program, "before", 1, BufferRole::Input);
        array(&mut program, "after", 1, BufferRole::Output);
        // The names of these buffers in the append's program.
        let of_append = ["k_new", "v_new", "k_cache", "v_cache", "copy", "seqused_k", "seqused_after"];
        program.append(&append, |given| of_append.iter().position(|of| *of == given).map(BufferId));
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
        assert_eq!(outcome.buffers[6], [6, 0, 0, 0]);
    }
}
