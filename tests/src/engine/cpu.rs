//! The facade on the CPU.

use fa3::{Attention, Device, Scalar};
use fa3_quant::E4m3;
use fa3_ref::Forward;
use fa3_types::{Dtype, Problem, Sequences};
use half::{bf16, f16};

use super::{Answer, Engine, NoAnswer, Skip};
use crate::testdata::extent;
use crate::{Case, Values};

pub(super) struct Cpu;

impl Engine for Cpu {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        if case.hides_a_poisoned_value() {
            return Err(Skip::PoisonedValue.into());
        }
        if case.problem.seqs_q().is_packed() != case.problem.seqs_k().is_packed() {
            return Err(Skip::PackedAndDense.into());
        }
        let result = match case.problem.dtype() {
            Dtype::F32 => call::<f32>(&case.problem, values),
            Dtype::F16 => call::<f16>(&case.problem, values),
            Dtype::Bf16 => call::<bf16>(&case.problem, values),
            Dtype::E4m3 => call::<E4m3>(&case.problem, values),
        };
        result.map_err(|error| NoAnswer::Failed(Box::new(error)))
    }
}

/// The case in the words of the public interface.
fn call<T: Scalar>(problem: &Problem, values: &Values) -> Result<Forward<f32>, fa3::Error> {
    let [q, k, v] = [&values.q, &values.k, &values.v].map(|x| x.mapv(T::from_f32));
    let (cu_seqlens_q, cu_seqlens_k) = (cu_seqlens(problem.seqs_q()), cu_seqlens(problem.seqs_k()));
    let (used_q, used_k) = (seqused(problem.seqs_q()), seqused(problem.seqs_k()));
    let mut attention = Attention::new(q.view(), k.view(), v.view())
        .mask(problem.mask())
        .softmax_scale(problem.softmax_scale().natural())
        .seqused_q(&used_q)
        .seqused_k(&used_k);
    if let Some(cap) = problem.softcap() {
        attention = attention.softcap(cap.bound());
    }
    if problem.seqs_q().is_packed() {
        attention = attention.packed(&cu_seqlens_q, &cu_seqlens_k);
    }
    let output = attention.forward(&Device::Cpu)?;
    Ok(Forward { o: output.o.mapv(Scalar::to_f32), lse: output.lse })
}

fn cu_seqlens(sequences: &Sequences) -> Vec<i32> {
    let starts = (0..sequences.count()).map(|index| sequences.start(index).1);
    starts.chain([extent(sequences).1]).map(|row| row as i32).collect()
}

fn seqused(sequences: &Sequences) -> Vec<i32> {
    (0..sequences.count()).map(|index| sequences.len(index) as i32).collect()
}
