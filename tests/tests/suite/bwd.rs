//! Backward kernels in the simulator, beyond the trials of their family.

mod lists;
mod poison;

use fa3_sim::{Mode, Policy};
use fa3_tests::Trial;
use fa3_tests::bwd::BwdCase;
use rayon::prelude::*;

/// Gradients of random problems obey the error law. `FA3_CASES` says how many.
#[test]
fn random_problems_obey_the_error_law() {
    obey(BwdCase::random);
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    obey(BwdCase::random_packed);
}

fn obey(random: fn(u64, u64) -> Trial) {
    let cases = std::env::var("FA3_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(12);
    let faults: Vec<String> = (0..cases)
        .into_par_iter()
        .filter_map(|seed| {
            let trial = random(seed, u64::MAX);
            let after = trial.simulate(Policy::Random(seed), Mode::Exact);
            after.and_then(|after| trial.check(&after)).err()
        })
        .collect();
    assert!(faults.is_empty(), "{} faults of {cases}\n\n{}", faults.len(), faults.join("\n\n"));
}
