//! The public API on the CPU.

use fa3::{Attention, Device, Scalar};
use fa3_quant::E4m3;
use fa3_ref::{Forward, Gradients};
use fa3_types::{Dtype, KnownProblem};
use half::{bf16, f16};

use super::{Answer, Engine, NoAnswer, Skip};
use crate::facade::call;
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
            dtype @ Dtype::Int8 => return Err(Skip::Dtype(dtype).into()),
        };
        result.map_err(|error| NoAnswer::Failed(Box::new(error)))
    }

    fn backward(&self, case: &Case, values: &Values) -> Answer<Gradients<f32>> {
        check(case)?;
        let result = match case.problem.dtype() {
            Dtype::F32 => backward::<f32>(&case.problem, values),
            Dtype::F16 => backward::<f16>(&case.problem, values),
            Dtype::Bf16 => backward::<bf16>(&case.problem, values),
            dtype @ (Dtype::E4m3 | Dtype::Int8) => return Err(Skip::Dtype(dtype).into()),
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
        Ok(Gradients { dq, dk, dv, dsink: gradients.dsink, dtables: gradients.dtables })
    })
}
