//! Runs every engine that has a backward pass on every chosen case, and judges the gradients by the error law.

use fa3_ref::Precision;
use fa3_ref::law::BackwardLaw;
use fa3_tests::{Ledger, engines, testdata};

#[test]
fn every_engine_obeys_the_error_law() {
    let engines = engines();
    let mut ledger = Ledger::default();
    let cases = testdata::chosen("backward.toml");
    for case in &cases {
        let values = case.values();
        let precision = Precision::of_output(case.problem.dtype());
        let law = BackwardLaw::new(&values.inputs(&case.problem), values.dout.view(), precision).unwrap();
        for engine in &engines {
            ledger.enter(&engine.name(), case, engine.backward(case, &values), |answer| {
                law.check(&answer, &case.replay("backward"))
            });
        }
    }
    println!("{ledger}");
    ledger.close();
    if cases.len() > 1 {
        // These engines have no backward pass. An engine that gets one must be removed from the list.
        let forward_only = ["fp8 emulator 128", "fp8 emulator 64", "kernel, simulated"];
        assert_eq!(ledger.idle(), forward_only, "these engines skipped everything");
    }
}
