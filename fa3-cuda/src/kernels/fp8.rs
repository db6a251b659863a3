//! FP8 attention over 16-bit tensors: the programs of three quantizations, then that of the forward pass. The workspace
//! holds codes and scales.

use fa3_ir::{BufferId, BufferRole, Elem, Program};
use fa3_sched::fp8::Plan;
use fa3_types::{Positions, Rotary, Sequences, TensorDesc};

use super::fwd::buffers;
use super::{Spec, fwd, quantize, tensors};

/// Lowers a plan to its program, without steps that have nothing to compute. The caller's buffers come first: Q, K, V,
/// O and the optional LSE; then sinks; the cosines and sines of a rotation; the positions of Q and of K, if arrays list
/// them; and cu_seqlens of packed sequences.
pub fn program(plan: &Plan) -> Program<Spec> {
    let (attention, mut program) = (plan.problem().attention(), Program::new());
    let q = tensors::input(&mut program, "q", attention.q());
    let k = tensors::input(&mut program, "k", attention.k());
    let v = tensors::input(&mut program, "v", attention.v());
    let o = tensors::output(&mut program, "o", attention.o());
    let lse = attention.lse_shape().map(|extent| extent as u32);
    let lse = program.buffer("lse", Elem::F32, &lse, BufferRole::OptionalOutput);

    let sink = tensors::sink(&mut program, attention);
    let tables = plan.problem().rotary().map(|rotary| {
        let shape = [rotary.table_rows as u32, rotary.rotary_dim as u32 / 2];
        ["cos", "sin"].map(|name| program.buffer(name, Elem::F32, &shape, BufferRole::Input))
    });
    let mut listed = |name, x: &TensorDesc, rotary: Rotary| {
        let shape = [x.shape.batch as u32, x.shape.seqlen as u32];
        let is_varlen = rotary.positions == Positions::Listed;
        is_varlen.then(|| program.buffer(name, Elem::U32, &shape, BufferRole::Input))
    };
    let rotary = plan.problem().rotary();
    let q_positions = rotary.and_then(|rotary| listed("q_positions", attention.q(), rotary.of_q()));
    let k_positions = rotary.and_then(|rotary| listed("k_positions", attention.k(), rotary.of_k()));

    let mut ends = |name, of: Sequences| {
        let ends = of
            .is_packed()
            .then(|| program.buffer(name, Elem::U32, &[of.count() as u32 + 1], BufferRole::Input));
        ends.inspect(|&ends| program.align(ends, 4))
    };
    let [ends_q, ends_k] = [("cu_seqlens_q", attention.seqs_q()), ("cu_seqlens_k", attention.seqs_k())]
        .map(|(name, of)| ends(name, of));

    let mut bound = vec![(buffers::O, o), (buffers::LSE, lse)];
    let inputs = [
        (q, (q_positions, ends_q), buffers::Q),
        (k, (k_positions, ends_k), buffers::K),
        (v, (None, ends_k), buffers::V),
    ];
    for (((x, (positions, ends), codes), descale), quantization) in
        inputs.into_iter().zip(buffers::DESCALES).zip(plan.quantizations())
    {
        let part = quantize::program(quantization);
        let of_part = program.append(&part, |name| match name {
            "x" => Some(x),
            "cos" => tables.map(|[cos, _]| cos),
            "sin" => tables.map(|[_, sin]| sin),
            "positions" => positions,
            "cu_seqlens" => ends,
            _ => None,
        });
        for (name, to) in [("codes", codes), ("scales", descale), ("mean", buffers::V_MEAN)] {
            bound.extend(part.find(name).map(|BufferId(at)| (to, of_part[at])));
        }
    }
    let part = fwd::program(plan.forward());
    bound.extend(part.find(buffers::SINK).zip(sink));
    bound.extend(part.find("cu_seqlens_q").zip(ends_q));
    bound.extend(part.find("cu_seqlens_k").zip(ends_k));
    let find = |name: &str| part.find(name).and_then(|id| bound.iter().find(|(of, _)| *of == id));
    program.append(&part, |name| find(name).map(|&(_, id)| id));
    program
}
