//! Times of both passes over packed sequences on the CPU.

use std::time::{Duration, Instant};

use fa3::{Attention, Device, Output, Scalar};
use fa3_types::{Dtype, KnownProblem, Mask, ProblemSpec, TensorDesc};
use half::{bf16, f16};
use indicatif::ProgressBar;
use ndarray::{Array3, Array4};

use super::gradient_truth::{GradientTruth, SatisfiedGradients};
use super::outcome::{Outcome, Pace, Timing};
use super::truth::{Truth, Wrong};
use super::{Refusal, hash, steps};

/// An element and its bits.
#[derive(Clone, Copy)]
struct Bits<T> {
    of: fn(T) -> u16,
    from: fn(u16) -> T,
}

/// Measures a pass over packed sequences of f16 or bf16 on the CPU, the backward pass if `gradients`, on numbers from
/// N(0, 1). `progress` steps as for one way to compute.
pub(crate) fn race(
    (spec, problem): (&ProblemSpec, &KnownProblem),
    gradients: bool,
    pace: Pace,
    progress: &ProgressBar,
) -> Outcome {
    let end = progress.position() + steps(1, pace) as u64;
    let timing = match problem.dtype() {
        Dtype::F16 => {
            let bits = Bits { of: f16::to_bits, from: f16::from_bits };
            measure((spec, problem), gradients, bits, pace, progress)
        }
        Dtype::Bf16 | Dtype::F32 | Dtype::E4m3 => {
            let bits = Bits { of: bf16::to_bits, from: bf16::from_bits };
            measure((spec, problem), gradients, bits, pace, progress)
        }
    };
    progress.set_position(end);
    timing.map_or_else(Outcome::from, Outcome::Checked)
}

fn measure<T: Scalar<Output = T> + Copy>(
    (spec, problem): (&ProblemSpec, &KnownProblem),
    gradients: bool,
    bits: Bits<T>,
    pace: Pace,
    progress: &ProgressBar,
) -> Result<Timing, Refusal> {
    let (calls, millis, rows, error) = if gradients {
        backward((spec, problem), bits, pace, progress)?
    } else {
        forward((spec, problem), bits, pace, progress)?
    };
    let plan = format!("{} threads of the CPU", rayon::current_num_threads());
    Ok(Timing::new(plan, calls, millis, rows, error))
}

/// Calls of a round, milliseconds of one in each round, rows that were judged, and their largest error.
type Measured = (u32, Vec<f64>, usize, f64);

fn forward<T: Scalar<Output = T> + Copy>(
    (spec, problem): (&ProblemSpec, &KnownProblem),
    bits: Bits<T>,
    pace: Pace,
    progress: &ProgressBar,
) -> Result<Measured, Refusal> {
    let Truth { qkv, check } = Truth::new(problem)?;
    let tensors = [problem.q(), problem.k(), problem.v()];
    let [q, k, v] = std::array::from_fn(|at| array(tensors[at], &qkv[at], bits));
    let [ends_q, ends_k] = [problem.rows_q(), problem.rows_k()].map(|rows| rows.cu_seqlens());
    let attention = of_spec(spec, problem.mask(), [&q, &k, &v]).packed(&ends_q, &ends_k);
    let mut o = Array4::from_elem(problem.o().shape.dims(), (bits.from)(u16::MAX));
    let mut lse = Array3::from_elem(problem.lse_shape(), f32::NAN);
    let mut run = || attention.forward_into(&Device::Cpu, o.view_mut(), lse.view_mut());
    run().map_err(failed)?;
    progress.inc(1);
    let (calls, millis) = time(pace, progress, || run().map_err(failed))?;
    let o: Vec<u16> = o.iter().map(|&x| (bits.of)(x)).collect();
    let lse: Vec<f32> = lse.iter().copied().collect();
    let satisfied = check(&o, &lse)?;
    Ok((calls, millis, satisfied.rows, satisfied.ratio))
}

fn backward<T: Scalar<Output = T> + Copy>(
    (spec, problem): (&ProblemSpec, &KnownProblem),
    bits: Bits<T>,
    pace: Pace,
    progress: &ProgressBar,
) -> Result<Measured, Refusal> {
    let truth = GradientTruth::new(spec, problem).map_err(fa3::cuda::OperationError::from)?;
    let tensors = [problem.q(), problem.k(), problem.v(), problem.o()];
    let [q, k, v, dout] = std::array::from_fn(|at| array(tensors[at], &truth.tensors[at], bits));
    let compute = |attention: &Attention<'_, T>, output: &Output<T>| {
        let gradients = attention.backward(&Device::Cpu, output, dout.view()).map_err(failed)?;
        Ok::<_, Refusal>([gradients.dq, gradients.dk, gradients.dv])
    };
    let of =
        |gradients: [Array4<T>; 3]| gradients.map(|x| x.iter().map(|&x| (bits.of)(x)).collect::<Vec<u16>>());
    let ends = |problem: &KnownProblem| [problem.rows_q(), problem.rows_k()].map(|rows| rows.cu_seqlens());
    let [ends_q, ends_k] = ends(&truth.cut);
    let attention = of_spec(spec, problem.mask(), [&q, &k, &v]).packed(&ends_q, &ends_k);
    let output = attention.forward(&Device::Cpu).map_err(failed)?;
    let SatisfiedGradients { rows, ratio } = truth.check(&of(compute(&attention, &output)?))?;
    let [ends_q, ends_k] = ends(problem);
    let attention = of_spec(spec, problem.mask(), [&q, &k, &v]).packed(&ends_q, &ends_k);
    let output = attention.forward(&Device::Cpu).map_err(failed)?;
    let first = of(compute(&attention, &output)?);
    truth.check_numbers(&first)?;
    progress.inc(1);
    let mut last = None;
    let (calls, millis) = time(pace, progress, || {
        last = Some(compute(&attention, &output)?);
        Ok(())
    })?;
    let hashes = |all: &[Vec<u16>; 3]| all.each_ref().map(|bits| hash(bits, &[]));
    match last.map(of) {
        Some(last) if hashes(&last) != hashes(&first) => Err(Wrong::Changed.into()),
        _ => Ok((calls, millis, rows, ratio)),
    }
}

/// Times rounds of calls that fill a slice, at least one each.
fn time(
    pace: Pace,
    progress: &ProgressBar,
    mut call: impl FnMut() -> Result<(), Refusal>,
) -> Result<(u32, Vec<f64>), Refusal> {
    let mut round = |calls: u32| {
        let start = Instant::now();
        (0..calls).try_for_each(|_| call())?;
        Ok::<Duration, Refusal>(start.elapsed())
    };
    let one = 1e3 * round(1)?.as_secs_f64();
    let calls = ((pace.slice_ms / one.max(1e-3)) as u32).max(1);
    let mut millis = Vec::new();
    for _ in 0..pace.rounds {
        millis.push(1e3 * round(calls)?.as_secs_f64() / f64::from(calls));
        progress.inc(1);
    }
    Ok((calls, millis))
}

/// The call, of dense tensors.
fn of_spec<'a, T: Scalar>(spec: &ProblemSpec, mask: Mask, [q, k, v]: [&'a Array4<T>; 3]) -> Attention<'a, T> {
    let attention = Attention::new(q, k, v).mask(mask);
    match spec.softcap {
        Some(cap) => attention.softcap(cap),
        None => attention,
    }
}

fn array<T: Scalar>(x: &TensorDesc, bits: &[u16], of: Bits<T>) -> Array4<T> {
    let elements = bits.iter().map(|&bits| (of.from)(bits)).collect();
    Array4::from_shape_vec(x.shape.dims(), elements).expect("contiguous tensors have their elements")
}

fn failed(error: fa3::Error) -> Refusal {
    Refusal::Cpu(error)
}

#[cfg(test)]
mod tests {
    use fa3_types::SequenceRows;

    use super::*;

    #[test]
    fn both_passes_are_timed_and_judged() {
        let rows = SequenceRows::packed_lengths(&[40, 0, 3, 90]);
        for dtype in [Dtype::F16, Dtype::Bf16] {
            let spec = ProblemSpec::packed(dtype, (2, 1), 32, &rows, &rows).causal().softcap(20.0);
            let problem = spec.clone().with_rows(rows.clone(), rows.clone()).unwrap();
            for gradients in [false, true] {
                let (pace, bar) = (Pace { rounds: 3, slice_ms: 0.1 }, ProgressBar::hidden());
                let outcome = race((&spec, &problem), gradients, pace, &bar);
                let Outcome::Checked(timing) = outcome else { panic!("{outcome:?}") };
                assert!(timing.millis.len() == 3 && timing.rows > 100 && timing.error < 1.0, "{timing:?}");
                assert_eq!(bar.position(), 4);
            }
        }
    }
}
