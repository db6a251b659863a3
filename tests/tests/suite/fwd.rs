//! Properties of the forward kernels alone, in the simulator: numbers at the ends of what there is, and NaN nowhere
//! where it may not be. `families` tests the properties that every family's kernels have.

mod converted;
mod emulated;
mod extremes;
mod given_tables;
mod growth;
mod intervals;
mod poison;
mod random;
mod rows;
mod scales;
mod schedules;
mod stairs;

use fa3_sched::forward::PlanOptions;
use fa3_tests::fwd::{Fault, Launch, device, random_packed};
use fa3_types::KnownProblem;

/// The problem with these choices on a device of three SMs.
fn launch(problem: &KnownProblem, choices: &PlanOptions) -> Result<Launch, Fault> {
    Launch::new(problem, &device(3), choices)
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    crate::obey(random_packed);
}
