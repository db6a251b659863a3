//! The facade on the CPU.

use fa3::{Attention, Device, Scalar};
use fa3_quant::E4m3;
use fa3_ref::{Forward, Gradients};
use fa3_types::{Dtype, KnownProblem};
use half::{bf16, f16};
use ndarray::Array4;

use super::{Answer, Engine, NoAnswer, Skip};
use crate::{Case, Values};

pub(super) struct Cpu;

impl Engine for Cpu {
    fn name(&self) -> String {
        "cpu".to_owned()
    }

    fn forward(&self, case: &Case, values: &Values) -> Answer<Forward<f32>> {
        check(case)?;
        let result = match case.problem.dtype() {
            Dtype::F32 => forward::<f32>(&case.problem, values),
            Dtype::F16 => forward::<f16>(&case.problem, values),
            Dtype::Bf16 => forward::<bf16>(&case.problem, values),
            Dtype::E4m3 => forward::<E4m3>(&case.problem, values),
        };
        result.map_err(|error| NoAnswer::Failed(Box::new(error)))
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        check(case)?;
        let result = match case.problem.dtype() {
            Dtype::F32 => backward::<f32>(&case.problem, values),
            Dtype::F16 => backward::<f16>(&case.problem, values),
            Dtype::Bf16 => backward::<bf16>(&case.problem, values),
            Dtype::E4m3 => return Err(Skip::Dtype(Dtype::E4m3).into()),
        };
        result.map_err(|error| NoAnswer::Failed(Box::new(error)))
    }
}

fn check(case: &Case) -> Result<(), Skip> {
    if case.hides_a_poisoned_value() {
        return Err(Skip::PoisonedValue);
    }
    if case.problem.rows_q().is_packed() != case.problem.rows_k().is_packed() {
        return Err(Skip::PackedAndDense);
    }
    Ok(())
}

fn forward<T: Scalar>(problem: &KnownProblem, values: &Values) -> Result<Forward<f32>, fa3::Error> {
    call(problem, values, |attention: Attention<'_, T>| {
        let output = attention.forward(&Device::Cpu)?;
        Ok(Forward { o: output.o.mapv(Scalar::to_f32), lse: output.lse })
    })
}

fn backward<T: Scalar<Output = T>>(
    problem: &KnownProblem,
    values: &Values,
) -> Result<Gradients<f32>, fa3::Error> {
    let dout = values.dout.mapv(T::from_f32);
    call(problem, values, |attention: Attention<'_, T>| {
        let output = attention.forward(&Device::Cpu)?;
        let gradients = attention.backward(&Device::Cpu, &output, dout.view())?;
        let [dq, dk, dv] = [gradients.dq, gradients.dk, gradients.dv].map(|x| x.mapv(T::to_f32));
        Ok(Gradients { dq, dk, dv, dsink: gradients.dsink })
    })
}

/// The case in the words of the public interface.
fn call<T: Scalar, R>(
    problem: &KnownProblem,
    values: &Values,
    compute: impl FnOnce(Attention<'_, T>) -> Result<R, fa3::Error>,
) -> Result<R, fa3::Error> {
    let [q, k, v] = [&values.q, &values.k, &values.v].map(|x| x.mapv(T::from_f32));
    let qv = values.qv.as_ref().map(|qv| qv.mapv(T::from_f32));
    let (cu_seqlens_q, cu_seqlens_k) = (problem.rows_q().cu_seqlens(), problem.rows_k().cu_seqlens());
    let (used_q, used_k) = (problem.rows_q().seqused(), problem.rows_k().seqused());
    let intervals = problem.mask().intervals().map(|form| form.shape(problem.q().shape));
    let intervals = intervals.zip(problem.intervals()).map(|(dims, of)| {
        Array4::from_shape_vec(dims, of.bounds().to_vec()).expect("a known problem has them all")
    });
    let mut attention = Attention::new(q.view(), k.view(), v.view())
        .softmax_scale(problem.softmax_scale().natural())
        .seqused_q(&used_q)
        .seqused_k(&used_k);
    attention = match &intervals {
        Some(intervals) => attention.intervals(intervals),
        None => attention.mask(problem.mask()),
    };
    if let Some(cap) = problem.softcap() {
        attention = attention.softcap(cap.bound());
    }
    if let Some(qv) = &qv {
        attention = attention.qv(qv);
    }
    if let Some(sink) = &values.sink {
        attention = attention.sink(sink);
    }
    if problem.rows_q().is_packed() {
        attention = attention.packed(&cu_seqlens_q, &cu_seqlens_k);
    }
    compute(attention)
}
