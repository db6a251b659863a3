//! Every engine on every chosen case, judged by the error law.

use fa3_tests::{Judge, Ledger, engines, testdata};

#[test]
fn every_engine_obeys_the_error_law() {
    let engines = engines();
    let mut ledger = Ledger::default();
    let cases = testdata::chosen("forward.toml");
    for case in &cases {
        let values = case.values();
        let judge = Judge::new(case, &values);
        for engine in &engines {
            ledger.enter(&engine.name(), case, engine.forward(case, &values), |answer| {
                judge.forward(engine.arithmetic(case), &answer, &case.replay("forward"))
            });
        }
    }
    println!("{ledger}");
    ledger.close();
    if cases.len() > 1 {
        assert_eq!(ledger.idle(), [""; 0], "these engines skipped everything");
    }
}
