//! Compares the GPU with the simulator. They round the approximations of the exponential, the logarithm and the
//! reciprocal differently. The small differences are reported here, and other groups check their bounds.

use fa3_cuda::host::Device;
use fa3_sched::forward::PlanOptions;
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::{Launch, dense, device as with_sms};
use fa3_tests::{Values, pairs};
use fa3_types::Mask;
use rayon::prelude::*;

use super::groups::valid;
use super::trial::{DTYPES, Inputs, Trial, run};
use crate::Fallible;

const MASKS: [Mask; 3] = [Mask::None, Mask::Causal, Mask::Window { left: Some(40), right: Some(9) }];

/// The largest differences of O and LSE, and the fraction of O that differs.
pub(super) fn compare(device: &Device) -> Fallible<String> {
    let mut problems = Vec::new();
    for (dtype, mask) in pairs(DTYPES, MASKS) {
        problems.extend(
            [64, 96, 128, 192, 256].map(|dim| valid(dense(dtype, 1, (131, 203), (2, 1), dim).mask(mask))),
        );
    }
    let differences: Fallible<Vec<(f32, f32, usize, usize)>> = problems
        .par_iter()
        .map(|problem| {
            let inputs = Inputs::random(problem, 4);
            let gpu = run(device, &Trial::from(problem.clone()), &inputs)?;
            let known = problem.known()?;
            let launch = Launch::new(&known, &with_sms(132), &PlanOptions::default())
                .map_err(|fault| fault.to_string())?;
            let values = Values {
                q: inputs.q.numbers(),
                k: inputs.k.numbers(),
                v: inputs.v.numbers(),
                dout: gpu.o.numbers(),
                qv: None,
                sink: None,
            };
            let simulated = launch
                .simulate(&values, Policy::Random(1), Mode::Exact)
                .map_err(|fault| fault.to_string())?;
            let o: Vec<f32> = values.dout.iter().zip(&simulated.o).map(|(x, y)| (x - y).abs()).collect();
            let lse =
                gpu.lse.iter().zip(&simulated.lse).map(|(x, y)| if x == y { 0.0 } else { (x - y).abs() });
            let differ = o.iter().filter(|&&x| x > 0.0).count();
            let largest = o.iter().copied().fold(0.0, f32::max);
            Ok((largest, lse.fold(0.0, f32::max), differ, o.len()))
        })
        .collect();
    let differences = differences?;
    let o = differences.iter().map(|x| x.0).fold(0.0, f32::max);
    let lse = differences.iter().map(|x| x.1).fold(0.0, f32::max);
    let (differ, all) = differences.iter().fold((0, 0), |sum, x| (sum.0 + x.2, sum.1 + x.3));
    Ok(format!(
        "{} problems, o differs in {differ} of {all} elements by up to {o:.2e}, lse by up to {lse:.2e}",
        differences.len()
    ))
}
