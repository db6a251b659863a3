//! Every kernel of the ladder in the simulator: right, clean, and the same under every schedule.

use fa3_sim::{Mode, Policy};
use fa3_tests::ladder::{Rung, rungs, simulate, small_rungs};
use rayon::prelude::*;

/// Runs a rung under a policy and checks everything that can be checked of one run.
fn run(rung: &Rung, seed: u64, policy: Policy, mode: Mode) -> Vec<Vec<u8>> {
    let before = rung.initial(seed);
    let simulated = simulate(&rung.job, &before, policy, mode);
    let simulated = simulated.unwrap_or_else(|error| panic!("{}: {error}", rung.name));
    let findings: Vec<String> = simulated.outcome.findings.iter().map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{} under {policy:?}:\n{}", rung.name, findings.join("\n"));
    if let Err(mismatch) = rung.check(&before, &simulated.arrays) {
        panic!("{} under {policy:?}: {mismatch}", rung.name);
    }
    simulated.arrays
}

/// All shape classes.
#[test]
fn every_problem_is_solved() {
    rungs().par_iter().for_each(|rung| {
        let arrays =
            [Policy::Eager, Policy::Lazy, Policy::Random(1)].map(|policy| run(rung, 7, policy, Mode::Exact));
        if rung.exact {
            assert!(arrays.iter().all(|other| *other == arrays[0]), "{} depends on the schedule", rung.name);
        }
    });
}

/// Small problems under many schedules, with fast arithmetic: no false alarm, no result that depends on one.
/// `FA3_SEEDS` says how many.
#[test]
fn schedules_do_not_matter() {
    let seeds = std::env::var("FA3_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(50);
    let rungs = small_rungs();
    rungs.par_iter().for_each(|rung| {
        let first = run(rung, 3, Policy::Eager, Mode::Fast);
        (0..seeds).into_par_iter().for_each(|seed| {
            let arrays = run(rung, 3, Policy::Random(seed), Mode::Fast);
            assert!(!rung.exact || arrays == first, "{} differs with seed {seed}", rung.name);
        });
    });
}
