//! Replay of an H100's results for the micro-kernels: the simulator must give the same bits.

use fa3_sim::Policy;
use fa3_tests::micro::{Golden, Micro, Rule, suites};

/// Runs a suite with asynchronous results that complete eagerly, late, and at random times.
fn replay(name: &str) {
    let suite = suites().into_iter().find(|suite| suite.name == name).expect("the suite exists");
    let golden = Golden::load(&suite).unwrap_or_else(|error| panic!("{error}"));
    let mut failures = Vec::new();
    for (seed, micro) in (0..).zip(&suite.tests) {
        let policies = [Policy::Eager, Policy::Lazy, Policy::Random(seed)];
        let policy = policies[seed as usize % policies.len()];
        let compare = || {
            let hardware = golden.of(micro).map_err(|error| error.to_string())?;
            let model = micro.simulate(policy)?;
            micro.compare(&micro.keep(&model), hardware)
        };
        if let Err(why) = compare() {
            failures.push(format!("{} ({policy:?}): {why}", micro.name));
        }
    }
    let known: Vec<&str> = suite.tests.iter().map(|micro| micro.name.as_str()).collect();
    let unknown = golden.results.iter().filter(|(name, ..)| !known.contains(&name.as_str()));
    failures.extend(unknown.map(|(name, ..)| format!("{name} is recorded, but no kernel")));
    assert!(failures.is_empty(), "{} of {}:\n{}", failures.len(), known.len(), failures.join("\n"));
}

macro_rules! suites {
    ($($name:ident)+) => {$(
        #[test]
        fn $name() {
            replay(stringify!($name));
        }
    )+

        #[test]
        fn every_suite_is_replayed() {
            let names: Vec<&str> = suites().iter().map(|suite| suite.name).collect();
            assert_eq!(names, [$(stringify!($name)),+]);
        }
    };
}

suites!(lane approximate wgmma warp copy reduce memory sync);

/// The model's distance from the hardware is the distance in the table of approximations, and not smaller.
#[test]
fn distances_are_as_said() {
    for suite in suites() {
        let golden = Golden::load(&suite).unwrap_or_else(|error| panic!("{error}"));
        for micro in suite.tests {
            let Rule::Near { ulp, floor } = micro.rule else { continue };
            let model = micro.simulate(Policy::Eager).unwrap_or_else(|why| panic!("{why}"));
            let stricter = Micro { rule: Rule::Near { ulp: ulp - 1, floor }, ..micro };
            let hardware = golden.of(&stricter).unwrap_or_else(|error| panic!("{error}"));
            assert!(stricter.compare(&model, hardware).is_err(), "{}: not {ulp} ulp", stricter.name);
        }
    }
}

/// A flipped bit of a recording is noticed.
#[test]
fn differences_are_found() {
    for suite in suites() {
        let golden = Golden::load(&suite).unwrap_or_else(|error| panic!("{error}"));
        for micro in &suite.tests {
            let recorded = golden.of(micro).unwrap_or_else(|error| panic!("{error}"));
            let mut flipped = recorded.to_vec();
            let last = flipped.len() - 1;
            flipped[last] ^= 0x40;
            assert!(micro.compare(recorded, recorded).is_ok());
            assert!(micro.compare(&flipped, recorded).is_err(), "{} {}", suite.name, micro.name);
        }
    }
}
