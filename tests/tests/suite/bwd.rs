//! Backward kernels in the simulator, beyond the trials of their family.

mod poison;

use fa3_sim::{Mode, Policy};
use fa3_tests::bwd::BwdCase;
use rayon::prelude::*;

/// Gradients of random problems obey the error law. `FA3_CASES` says how many.
#[test]
fn random_problems_obey_the_error_law() {
    let cases = std::env::var("FA3_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(16);
    let faults: Vec<String> = (0..cases)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = BwdCase::random(seed, u64::MAX);
            let after = trial.simulate(Policy::Random(seed), Mode::Exact);
            after.and_then(|after| trial.check(&after)).err()
        })
        .collect();
    assert!(faults.is_empty(), "{} faults of {cases}\n\n{}", faults.len(), faults.join("\n\n"));
}
