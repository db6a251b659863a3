//! Tests that concern several crates, in one binary, so that they share the machine's cores. A module's name selects
//! its tests: `cargo test -p fa3-tests --test suite fwd::`.
#![forbid(unsafe_code)]

// Attention by every engine.
mod backward;
mod calls;
mod forward;
mod metamorphic;
mod minilm;
mod properties;
mod score;

// Kernels in the simulator.
mod bwd;
mod cache;
mod families;
mod fixed_splits;
mod fp8;
mod fwd;
mod golden;
mod mutants;
mod quantize;
mod timeline;

// The data and the choices that trials are made of.
mod covering;
mod values;

// Plans, and the repository itself.
mod tidy;

use fa3_ir::{Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation, Rule};
use fa3_tests::memory::Memory;
use fa3_tests::{Trial, simulate};
use rayon::prelude::*;

/// Checks random problems, each built from a seed and a number of kernels, against the error law. `FA3_CASES` sets
/// their number.
fn obey(random: fn(u64, u64) -> Trial) {
    obey_of(6, random);
}

/// Checks `cases` random problems against the error law, unless `FA3_CASES` sets another number.
fn obey_of(cases: u64, random: fn(u64, u64) -> Trial) {
    let cases = std::env::var("FA3_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(cases);
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

/// The bytes of O and LSE after a run. They are only compared with other runs, so any arithmetic will do.
fn o_and_lse(program: &Program<Kernel>, before: &[Vec<u8>], policy: Policy) -> [Vec<u8>; 2] {
    let after = simulate(&program.map(Loaded::new), before, policy, Mode::Fast);
    let after = after.unwrap_or_else(|fault| panic!("{fault}"));
    let after = Memory::new(program, &after);
    ["o", "lse"].map(|name| after.bytes(name).expect("attention has both").to_vec())
}

/// Runs a program on invalid inputs. Results are unspecified, and may be written twice or never. But there is no access
/// out of bounds and no deadlock, and all tile counters are 0 again.
fn does_no_harm(program: &Program<Kernel>, before: &[Vec<u8>], policy: Policy, what: &str) {
    let outcome = ProgramSimulation::new(program).policy(policy).mode(Mode::Fast).run(before).unwrap();
    assert!(outcome.left_over.is_empty(), "{what}: {:?}", outcome.left_over);
    let harm = |rule| !matches!(rule, Rule::Race | Rule::I1);
    if let Some(finding) = outcome.findings().find(|finding| harm(finding.rule)) {
        panic!("{what}: {finding}");
    }
}
