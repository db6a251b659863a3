//! Properties in the simulator that only the forward kernels have: extreme numbers, and the reach of NaN. `families`
//! tests the properties of every family.

mod converted;
mod emulated;
mod extremes;
mod functions;
mod given_tables;
mod growth;
mod intervals;
mod poison;
mod random;
mod rows;
mod scales;
mod schedules;
mod stairs;

use fa3_sched::forward::{CtaTile, PlanOptions};
use fa3_sim::{Mode, Policy};
use fa3_tests::fwd::shapes::{PIPELINES, TINY};
use fa3_tests::fwd::{Fault, Launch, device, judged, random_packed, with_tile};
use fa3_tests::{Case, Values, pairs};
use fa3_types::KnownProblem;

/// Two warpgroups with ping-pong.
const TWO: CtaTile = CtaTile { tile_m: 128, consumers: 2, tile_n: 48, ping_pong: true, ..TINY };

/// 16-bit tiles of every form, on blocks of 16 keys or of 48.
fn tiles() -> Vec<CtaTile> {
    pairs(PIPELINES, [TINY, TWO]).into_iter().map(|(pipeline, tile)| CtaTile { pipeline, ..tile }).collect()
}

/// A plan of the problem with these options on a device of three SMs.
fn launch(problem: &KnownProblem, choices: &PlanOptions) -> Result<Launch, Fault> {
    Launch::new(problem, &device(3), choices)
}

/// Checks the results of a tile on these values against the error law.
fn check(case: &Case, values: &Values, tile: CtaTile, policy: Policy, mode: Mode) -> Result<(), String> {
    let launch = launch(&case.problem, &with_tile(tile)).map_err(|fault| fault.to_string())?;
    let answer = launch.simulate(values, policy, mode).map_err(|fault| fault.to_string());
    let judged = answer.and_then(|answer| judged(case, values, &answer));
    judged.map(|_| ()).map_err(|fault| format!("{}: {fault}", launch.plan))
}

#[test]
fn random_packed_problems_obey_the_error_law() {
    crate::obey(random_packed);
}
