//! Calls of the public API on cases, checked against the error law.

use fa3::{Attention, Device, OutputGradients, Scalar};
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Forward, Gradients, Precision};
use fa3_types::{Dtype, KnownProblem};
use half::{bf16, f16};
use ndarray::{Array3, Array4};

use crate::{Arithmetic, Case, Judge, Values};

/// Checks the results of a call and its gradients, with and without a gradient of LSE, against the error law. Returns
/// the largest ratio of an error to its bound. Latent attention has no gradients.
///
/// # Errors
/// The error of the call, or the violation of the law.
///
/// # Panics
/// If the case has 8 bits.
pub fn check(case: &Case, device: &Device) -> Result<f64, String> {
    let checked = match case.problem.dtype() {
        Dtype::F32 => check_of::<f32>(case, device),
        Dtype::F16 => check_of::<f16>(case, device),
        Dtype::Bf16 => check_of::<bf16>(case, device),
        Dtype::E4m3 | Dtype::Int8 => panic!("{}: calls take 16 bits or f32", case.name),
    };
    checked.map_err(|fault| format!("{} ({}): {fault}", case.name, case.problem))
}

fn check_of<T: Scalar<Output = T>>(case: &Case, device: &Device) -> Result<f64, String> {
    let (values, replay) = (case.values(), "cargo test -p fa3-tests --test suite calls::");
    let problem = &case.problem;
    let wave = |(b, h, s)| ((5 * b + 3 * h + s) as f32).cos();
    let dlse = Array3::from_shape_fn(problem.lse_shape(), wave);
    let dout = values.dout.mapv(T::from_f32);
    let has_gradients = problem.qv().is_none();
    let called = call(problem, &values, |attention: Attention<'_, T>| {
        let output = attention.forward(device)?;
        let mut gradients = Vec::new();
        for dlse in [None, Some(dlse.view())].into_iter().filter(|_| has_gradients) {
            let mut of = OutputGradients::new(&dout);
            of.dlse = dlse;
            gradients.push((dlse, attention.backward(device, &output, of)?));
        }
        Ok((Forward { o: output.o.mapv(T::to_f32), lse: output.lse }, gradients))
    });
    let (forward, gradients) = called.map_err(|error| error.to_string())?;
    let verdict = Judge::new(case, &values).forward(Arithmetic::OfInputs, &forward, replay);
    let mut parts = verdict.map_err(|violation| violation.to_string())?.to_vec();
    for (dlse, gradients) in gradients {
        let [dq, dk, dv] = [gradients.dq, gradients.dk, gradients.dv].map(|x| x.mapv(T::to_f32));
        let of = fa3_ref::OutputGradients { dout: values.dout.view(), dlse };
        let law = BackwardLaw::new(&values.inputs(problem), of, Precision::of_output(T::DTYPE));
        let law = law.map_err(|error| error.to_string())?;
        let gradients = Gradients { dq, dk, dv, dsink: gradients.dsink, dtables: gradients.dtables };
        parts.extend(law.check(&gradients, replay).map_err(|violation| violation.to_string())?);
    }
    Ok(parts.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// A problem as a call of the public API.
pub(crate) fn call<T: Scalar, R>(
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
        .mask(problem.mask().without_intervals())
        .softmax_scale(problem.softmax_scale().natural())
        .seqused_q(&used_q)
        .seqused_k(&used_k);
    if let Some(intervals) = &intervals {
        attention = attention.intervals(intervals);
    }
    if let Some(cap) = problem.softcap() {
        attention = attention.softcap(cap.bound());
    }
    if let Some(function) = problem.score_function() {
        attention = attention.score(function.clone());
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
