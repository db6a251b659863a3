//! Every family's kernels in the simulator: correct, without findings, and with equal results under every schedule.

use fa3_sim::{Loaded, Mode, Policy};
use fa3_tests::{Bits, Family, Trial};
use rayon::prelude::*;

/// All families, or the one that `FA3_FAMILY` names.
fn wanted() -> Vec<Family> {
    let name = std::env::var("FA3_FAMILY").ok();
    let mut families = Vec::from(fa3_tests::families());
    families.retain(|family| name.as_ref().is_none_or(|name| family.name == *name));
    assert!(!families.is_empty(), "no family is called {name:?}");
    families
}

/// Runs a trial under the first policy, and judges the results. The other policies must give the same bytes.
fn run(trial: &Trial, policies: &[Policy], mode: Mode) -> Result<(), String> {
    let program = trial.program.map(Loaded::new);
    let mut first = None;
    for &policy in policies {
        let after = trial.simulate_loaded(&program, policy, mode)?;
        match &first {
            Some(first) if trial.bits != Bits::Schedule => {
                if *first != after {
                    return Err(format!("{} is another under {policy:?}", trial.name));
                }
            }
            _ => {
                trial.check(&after)?;
                first = Some(after);
            }
        }
    }
    Ok(())
}

/// Runs every trial, and reports all failures together.
fn run_all(trials: &[Trial], check: impl Fn(usize, &Trial) -> Result<(), String> + Sync) {
    let faults: Vec<String> =
        trials.par_iter().enumerate().filter_map(|(index, trial)| check(index, trial).err()).collect();
    assert!(faults.is_empty(), "{} faults of {}\n\n{}", faults.len(), trials.len(), faults.join("\n\n"));
}

/// Every kind of kernel is run on every class of shapes. The trials take different schedules and arithmetics in turn.
#[test]
fn every_trial_is_solved() {
    for family in wanted() {
        let trials = (family.trials)(7);
        println!("{}: {} trials", family.name, trials.len());
        run_all(&trials, |index, trial| {
            let policies = [Policy::Eager, Policy::Lazy, Policy::Random(index as u64)];
            let mode = if index % 2 == 0 { Mode::Exact } else { Mode::Fast };
            run(trial, &policies[index % 3..][..1], mode)
        });
    }
}

/// Small problems run under two schedules, with fast arithmetic: there is no false finding, and no result depends on
/// the schedule. `FA3_SEEDS` sets the number of random schedules. It is small, since clocks find a race under any
/// schedule.
#[test]
fn schedules_do_not_matter() {
    let seeds = std::env::var("FA3_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for family in wanted() {
        let random = (0..seeds.unwrap_or(1)).map(Policy::Random);
        let policies: Vec<Policy> = std::iter::once(Policy::Lazy).chain(random).collect();
        run_all(&(family.small)(), |_, trial| run(trial, &policies, Mode::Fast));
    }
}

/// A trial notices a changed byte of an input, and a changed byte in a gap between the heads of a strided output.
#[test]
fn what_is_no_output_is_watched() {
    let family = fa3_tests::families().into_iter().find(|family| family.name == "combine").unwrap();
    let trial = (family.small)().swap_remove(0);
    let after = trial.simulate(Policy::Eager, Mode::Exact).unwrap();
    trial.check(&after).unwrap();
    for (name, byte) in [("lse_partial", 5), ("o", 2 * 128)] {
        let mut changed = after.clone();
        changed[trial.program.find(name).unwrap().0][byte] ^= 1;
        let fault = trial.check(&changed).unwrap_err();
        assert!(fault.contains(&format!("byte {byte} of {name}")), "{fault}");
    }
}
