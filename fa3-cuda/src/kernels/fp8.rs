//! Attention in 8 bits of 16-bit tensors: the programs of three quantizations and of the forward pass, one after the
//! other. What one writes for the next lies in the workspace.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::fp8::Plan;

use super::fwd::buffers;
use super::{Spec, fwd, quantize, tensors};

/// The program of a plan, without the steps that have nothing to compute. The caller's buffers come first: Q, K, V, O
/// and LSE, which is optional, and of a rotation cosines and sines.
pub fn program(plan: &Plan) -> Program<Spec> {
    let (attention, mut program) = (plan.problem().attention(), Program::new());
    let q = tensors::input(&mut program, "q", attention.q());
    let k = tensors::input(&mut program, "k", attention.k());
    let v = tensors::input(&mut program, "v", attention.v());
    let o = tensors::output(&mut program, "o", attention.o());
    let lse = attention.lse_shape().map(|extent| extent as u32);
    let lse = program.buffer("lse", Elem::F32, &lse, BufferRole::OptionalOutput);

    let tables = plan.problem().rotary().map(|rotary| {
        let shape = [rotary.table_rows as u32, rotary.rotary_dim as u32 / 2];
        ["cos", "sin"].map(|name| program.buffer(name, Elem::F32, &shape, BufferRole::Input))
    });
    let of_caller = |name: &str| match (name, tables) {
        ("cos", Some([cos, _])) => Some(cos),
        ("sin", Some([_, sin])) => Some(sin),
        _ => None,
    };

    let mut bound = vec![(buffers::O, o), (buffers::LSE, lse)];
    let inputs = [(q, buffers::Q), (k, buffers::K), (v, buffers::V)];
    for (((x, codes), descale), quantization) in
        inputs.into_iter().zip(buffers::DESCALES).zip(plan.quantizations())
    {
        let part = quantize::program(quantization);
        let of_part = program.append(&part, |name| if name == "x" { Some(x) } else { of_caller(name) });
        for (name, to) in [("codes", codes), ("scales", descale), ("mean", buffers::V_MEAN)] {
            bound.extend(part.find(name).map(|BufferId(at)| (to, of_part[at])));
        }
    }
    let part = fwd::program(plan.forward());
    let find = |name: &str| part.find(name).and_then(|id| bound.iter().find(|(of, _)| *of == id));
    program.append(&part, |name| find(name).map(|&(_, id)| id));
    program
}
