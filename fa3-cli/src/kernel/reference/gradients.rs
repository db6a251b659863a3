//! The backward pass: its inputs, and the expected results.

use fa3_cuda::kernels::bwd::buffers;
use fa3_ir::{BufferId, Elem, Kernel, Program};
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Gradients, Inputs, OutputGradients, Precision, oracle};
use fa3_sim::trace::Factors;
use fa3_types::{BackwardProblem, KnownProblem};
use half::{bf16, f16};

use super::{Contents, Wrong};

/// Sets O and LSE to the forward results of Q, K and V. With random ones, P would not be a softmax.
pub(super) fn prepare(forward: &KnownProblem, program: &Program<Kernel>, before: &mut [Vec<u8>]) {
    let contents = Contents { program, bytes: before };
    let [q, k, v] = [(buffers::Q, forward.q()), (buffers::K, forward.k()), (buffers::V, forward.v())]
        .map(|(buffer, desc)| contents.tensor(buffer, desc.shape));
    let inputs = Inputs::new(forward, q.view(), k.view(), v.view()).expect("the arrays have their shapes");
    let results = oracle::forward(&inputs);
    let (BufferId(o), BufferId(lse)) = (buffers::O, buffers::LSE);
    before[o] = results.o.iter().flat_map(|&x| half(program.buffers[o].elem, x).to_le_bytes()).collect();
    before[lse] = results.lse.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
}

/// The bits of the 16-bit number nearest to `x`.
fn half(elem: Elem, x: f64) -> u16 {
    if elem == Elem::F16 { f16::from_f64(x).to_bits() } else { bf16::from_f64(x).to_bits() }
}

/// Checks dQ, dK and dV by the error law.
pub(super) fn judge(
    problem: &BackwardProblem,
    forward: &KnownProblem,
    before: &Contents<'_>,
    after: &Contents<'_>,
) -> Result<f64, Wrong> {
    let [q, k, v, dout] = [
        (buffers::Q, forward.q()),
        (buffers::K, forward.k()),
        (buffers::V, forward.v()),
        (buffers::DOUT, problem.dout()),
    ]
    .map(|(buffer, desc)| before.tensor(buffer, desc.shape));
    let dlse = before.floats(buffers::DLSE, forward.lse_shape());
    let inputs = Inputs::new(forward, q.view(), k.view(), v.view()).expect("the arrays have their shapes");
    let output = OutputGradients { dout: dout.view(), dlse: Some(dlse.view()) };
    let law = BackwardLaw::new(&inputs, output, Precision::of_output(forward.dtype()));
    let [dq, dk, dv] =
        [(buffers::DQ, problem.dq()), (buffers::DK, problem.dk()), (buffers::DV, problem.dv())]
            .map(|(buffer, desc)| after.tensor(buffer, desc.shape).mapv(|x| x as f32));
    let satisfied = law
        .expect("dout and dlse have their shapes")
        .check(&Gradients { dq, dk, dv, dsink: None, dtables: vec![] }, "")?;
    Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// Renames the factors of the backward pass's products as in the paper. A factor in registers is identified by the
/// other factor. dS is stored transposed.
pub(super) fn name_factors(Factors { a, b }: &mut Factors) {
    let in_registers = match b.as_str() {
        "dout" => "Pᵀ",
        "Q" => "dSᵀ",
        _ => "dS",
    };
    let left = a.take().map_or_else(|| in_registers.to_owned(), |a| a.replace("dsᵀ", "dS"));
    *a = Some(left.replace("dout", "dO"));
    *b = b.replace("dout", "dO");
}
