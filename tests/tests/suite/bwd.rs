//! Backward kernels in the simulator, beyond the trials of their family.

mod lists;
mod poison;

use fa3_tests::bwd::BwdCase;

use crate::obey;

/// Gradients of random problems obey the error law. `FA3_CASES` sets their number.
#[test]
fn random_problems_obey_the_error_law() {
    obey(BwdCase::random);
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    obey(BwdCase::random_packed);
}
