//! Quantization kernels in the simulator, beyond the trials of their family.

use fa3_cuda::kernels::quantize;
use fa3_sched::DeviceLimits;
use fa3_sched::quantize::Plan;
use fa3_sim::{Mode, Policy};
use fa3_tests::quantize::Case;
use fa3_types::{Dtype, QuantizeSpec, Shape};
use rayon::prelude::*;

/// Codes and scales of random problems are fa3-quant's, bit for bit. `FA3_CASES` says how many.
#[test]
fn random_problems_have_the_bits_of_the_reference() {
    let cases = std::env::var("FA3_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(48);
    let faults: Vec<String> = (0..cases)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = Case::random(seed, u64::MAX).trial(1 + seed as u32 % 5);
            let after = trial.simulate(Policy::Random(seed), Mode::Exact);
            after.and_then(|after| trial.check(&after)).err()
        })
        .collect();
    assert!(faults.is_empty(), "{} faults of {cases}\n\n{}", faults.len(), faults.join("\n\n"));
}

#[test]
fn without_rows_nothing_is_launched() {
    for (batch, seqlen) in [(0, 100), (3, 0)] {
        let shape = Shape { batch, seqlen, heads: 2, head_dim: 64 };
        let problem = QuantizeSpec::contiguous(Dtype::F16, shape).validate().unwrap();
        let plan = Plan::new(&problem, &DeviceLimits::h100_sxm()).unwrap();
        assert_eq!((plan.grid(), quantize::program(&plan).steps.len()), (0, 0));
    }
}
