//! Attention over a cache to which rows are appended first: the program of the append, then that of the forward pass.
//! The workspace holds the lengths after the append, and the rotated queries.

use fa3_ir::{BufferId, Program};
use fa3_sched::cached::Plan;

use super::{Spec, append, fwd};

/// Buffers that the append writes and the attention reads, by their names in the two programs.
const PASSED: [(&str, &str); 2] = [("q_rotated", "q"), ("seqused_after", "seqused_k")];

/// Lowers a plan to its program. The caller gives the buffers of the attention: `k` and `v` are written in part, and
/// `q` and `seqused_k` hold the state before the append. `k_new`, `v_new`, `cu_seqlens_k_new`, `rotary_cos`,
/// `rotary_sin` and `rotary_seqlens` are added if the append has them.
pub fn program(plan: &Plan) -> Program<Spec> {
    let (append, attention) = (append::program(plan.append()), fwd::program(plan.forward()));
    let mut program = Program::new();
    for buffer in append.buffers.iter().chain(&attention.buffers) {
        let mut buffer = buffer.clone();
        buffer.name = name(buffer.name);
        let is_passed = PASSED.iter().any(|&(of_append, _)| of_append == buffer.name);
        // A buffer of both programs is declared as the append does: Q is not rotated yet, and the cache is written.
        if !is_passed && !buffer.role.is_workspace() && program.find(buffer.name).is_none() {
            program.add(buffer);
        }
    }
    let callers: Vec<&str> = program.buffers.iter().map(|buffer| buffer.name).collect();
    let find = |name: &str| callers.iter().position(|of| *of == name).map(BufferId);
    let of_append = program.append(&append, |given| find(name(given)));
    let passed = |given: &str| {
        let (of_part, _) = PASSED.iter().find(|&&(_, of_attention)| of_attention == given)?;
        append.find(of_part).map(|BufferId(at)| of_append[at])
    };
    program.append(&attention, |given| passed(given).or_else(|| find(given)));
    program
}

/// The name, in this program, of a buffer of the append. Cache tensors get the names that the attention gives them.
fn name(of_append: &str) -> &str {
    match of_append {
        "k_cache" => "k",
        "v_cache" => "v",
        other => other,
    }
}
