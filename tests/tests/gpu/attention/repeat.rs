//! Calls that must give equal bits.

use fa3_cuda::host::Device;
use fa3_tests::pairs;
use std::num::NonZeroU32;

use fa3_sched::forward::PlanOptions;
use fa3_sched::{Longest, Order, Scheduler};
use fa3_tests::fwd::dense;
use fa3_types::{Dtype, Mask, Problem};
use rayon::prelude::*;

use super::groups::valid;
use super::tensor::{UNWRITTEN, rows};
use super::trial::{Bench, Inputs, Outputs, Trial, run};
use crate::Fallible;

const SCHEDULERS: [Scheduler; 3] =
    [Scheduler::OneTile, Scheduler::StaticPersistent, Scheduler::DynamicPersistent];
const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(100), right: Some(30) }];
const REPETITIONS: usize = 1000;

/// Problems with more tiles than the GPU has SMs, of several head dimensions.
fn problems() -> Vec<Problem> {
    let dims = [64, 96, 128, 192, 256];
    let problem = |mask, head_dim| valid(dense(Dtype::Bf16, 3, (1111, 999), (12, 4), head_dim).mask(mask));
    MASKS.into_iter().flat_map(|mask| dims.map(|head_dim| problem(mask, head_dim))).collect()
}

/// Results depend neither on which CTA computes a tile nor on the time at which it does.
pub(super) fn schedulers(device: &Device) -> Fallible<String> {
    let orders = [
        Order::Linear,
        Order::LongestFirst { section: 1, longest: Longest::Last },
        Order::LongestFirst { section: 5, longest: Longest::First },
        Order::LongestFirst { section: 100, longest: Longest::Last },
    ];
    let counts: Fallible<Vec<usize>> = problems()
        .par_iter()
        .map(|problem| {
            let inputs = Inputs::random(problem, 1);
            let (mut first, mut count): (Option<Outputs>, usize) = (None, 0);
            for (scheduler, order) in pairs(SCHEDULERS, orders) {
                for sms in [None, Some(1), Some(7)] {
                    let mut options = PlanOptions::default().scheduler(scheduler).order(order);
                    options.sms = sms.and_then(NonZeroU32::new);
                    let outputs = run(device, &Trial { problem: problem.clone(), options }, &inputs)?;
                    if !first.get_or_insert_with(|| outputs.clone()).same(&outputs) {
                        return Err(format!("{problem} differs: {scheduler}, {order}, {sms:?} sms").into());
                    }
                    count += 1;
                }
            }
            Ok(count)
        })
        .collect();
    Ok(format!("{} launches", counts?.iter().sum::<usize>()))
}

/// If all inputs outside of one sequence are NaN, the results of this sequence do not change.
pub(super) fn neighbours(device: &Device) -> Fallible<String> {
    let problems = problems();
    problems.par_iter().try_for_each(|problem| -> Fallible<()> {
        let trial = Trial::from(problem.clone());
        let mut inputs = Inputs::random(problem, 2);
        let clean = run(device, &trial, &inputs)?;
        for x in [&mut inputs.q, &mut inputs.k, &mut inputs.v] {
            for (batch, row, head) in rows(x.desc.shape).filter(|(batch, ..)| *batch != 1) {
                x.row_mut(batch, row, head).fill(UNWRITTEN);
            }
        }
        let dirty = run(device, &trial, &inputs)?;
        for (batch, row, head) in rows(problem.o().shape) {
            let (o, lse) = (dirty.o.row(batch, row, head), dirty.lse(problem, batch, row, head));
            let nan = lse.is_nan() && o.iter().all(|&x| dirty.o.number(x).is_nan());
            let same = o == clean.o.row(batch, row, head)
                && lse.to_bits() == clean.lse(problem, batch, row, head).to_bits();
            // A fully masked row has no result, whatever its inputs are.
            let empty = clean.lse(problem, batch, row, head) == f32::NEG_INFINITY;
            if !(if batch == 1 || empty { same } else { nan }) {
                return Err(
                    format!("row {row} of head {head} of sequence {batch} of {problem}: {lse}").into()
                );
            }
        }
        Ok(())
    })?;
    Ok(format!("{} problems", problems.len()))
}

/// Runs one plan many times, on one stream and on other streams at the same time.
pub(super) fn repetitions(device: &Device) -> Fallible<String> {
    let problems = problems();
    problems.par_iter().try_for_each(|problem| -> Fallible<()> {
        let inputs = Inputs::random(problem, 3);
        let mut bench = Bench::new(device, &Trial::from(problem.clone()), &inputs)?;
        let first = bench.run()?;
        for repetition in 1..REPETITIONS {
            if !bench.run()?.same(&first) {
                return Err(format!("{problem} differs in repetition {repetition}").into());
            }
        }
        Ok(())
    })?;
    Ok(format!("{} problems {REPETITIONS} times each", problems.len()))
}
