//! Backward kernels in the simulator, beyond the trials of their family.

mod lists;
mod poison;

use fa3_sim::{Loaded, Mode, Policy};
use fa3_tests::Trial;
use fa3_tests::bwd::BwdCase;

use crate::obey;

/// The bytes of all buffers after a run on `before`. They are only compared with each other: any arithmetic will do.
fn simulate(trial: &Trial, before: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let after = fa3_tests::simulate(&trial.program.map(Loaded::new), before, Policy::Random(7), Mode::Fast);
    after.unwrap_or_else(|fault| panic!("{}: {fault}", trial.name))
}

/// Gradients of random problems obey the error law. `FA3_CASES` sets their number.
#[test]
fn random_problems_obey_the_error_law() {
    obey(BwdCase::random);
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    obey(BwdCase::random_packed);
}
