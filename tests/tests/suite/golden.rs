//! Replays micro-kernels that an H100 ran: the simulator must give the same bits.

use fa3_sim::Policy;
use fa3_tests::micro::{Golden, Micro, Rule, suites};
use rayon::prelude::*;

/// Checks every micro-kernel. `check` gets its number in its suite, the micro-kernel, and its recorded results.
fn each(check: impl Fn(u64, Micro, &[u8]) -> Result<(), String> + Sync) {
    suites().into_par_iter().for_each(|suite| {
        let golden = Golden::load(&suite).unwrap_or_else(|error| panic!("{error}"));
        for (index, micro) in (0..).zip(suite.tests) {
            let name = format!("{} of {}", micro.name, suite.name);
            let recorded = golden.of(&micro).unwrap_or_else(|error| panic!("{error}"));
            check(index, micro, recorded).unwrap_or_else(|why| panic!("{name}: {why}"));
        }
    });
}

/// Asynchronous operations complete at once, late, or at random moments.
#[test]
fn the_simulator_has_the_bits_of_the_hardware() {
    each(|index, micro, recorded| {
        let policy = [Policy::Eager, Policy::Lazy, Policy::Random(index)][index as usize % 3];
        let compared = micro.compare(&micro.keep(&micro.simulate(policy)?), recorded);
        compared.map_err(|why| format!("{policy:?}: {why}"))
    });
}

#[test]
fn every_recording_has_its_kernel() {
    for suite in suites() {
        let golden = Golden::load(&suite).unwrap_or_else(|error| panic!("{error}"));
        let recorded: Vec<&String> = golden.results.iter().map(|(name, ..)| name).collect();
        assert_eq!(recorded, suite.tests.iter().map(|micro| &micro.name).collect::<Vec<_>>());
    }
}

/// Each distance between model and hardware that the table of approximations states is the true one, and not larger.
#[test]
fn distances_are_as_said() {
    each(|_, micro, recorded| {
        let Rule::Near { ulp, floor } = micro.rule else { return Ok(()) };
        let stricter = Micro { rule: Rule::Near { ulp: ulp - 1, floor }, ..micro };
        let compared = stricter.compare(&stricter.simulate(Policy::Eager)?, recorded);
        compared.err().map(|_| ()).ok_or(format!("not {ulp} ulp"))
    });
}

/// A flipped bit of a recording is noticed.
#[test]
fn differences_are_found() {
    each(|_, micro, recorded| {
        let mut flipped = recorded.to_vec();
        *flipped.last_mut().expect("every kernel writes") ^= 0x40;
        micro.compare(recorded, recorded)?;
        micro.compare(&flipped, recorded).err().map(|_| ()).ok_or("a flipped bit is not noticed".into())
    });
}
