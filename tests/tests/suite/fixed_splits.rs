//! Fixed-size splits: a sequence has the same bits in any batch and on any number of SMs.

use fa3_sched::forward::SplitKeys;
use fa3_sim::{Mode, Policy, ProgramSimulation};
use fa3_tests::cache::{Case, Keys, Queries, paged};
use fa3_tests::{Dist, chunks};
use fa3_types::{Dtype, Mask};
use rayon::prelude::*;

fn case() -> Case {
    Case { split_keys: Some(SplitKeys::FixedSize { keys: 128 }), ..paged((64, 64)) }
}

/// Cases with lengths at the ends of splits and of blocks, and with a sequence of many splits beside sequences of one
/// key, no key, and several tiles of rows.
fn cases() -> [Case; 6] {
    let window = Mask::Window { left: Some(150), right: Some(3) };
    [
        Case { lengths: vec![500, 1, 0, 128, 129], ..case() },
        Case { lengths: vec![5, 700], heads: (3, 1), queries: Queries::Packed(20), ..case() },
        Case { lengths: vec![300, 90, 256], queries: Queries::InPart(5), mask: window, ..case() },
        Case {
            lengths: vec![40, 400],
            keys: Keys::Padded,
            mask: chunks(300, None),
            dist: Dist::Increasing,
            ..case()
        },
        Case {
            lengths: vec![260, 70],
            queries: Queries::Packed(70),
            dtype: Dtype::F16,
            sink: false,
            ..case()
        },
        Case { lengths: vec![200, 390], columns: (128, 128), softcap: Some(3.0), mask: Mask::None, ..case() },
    ]
}

#[test]
fn sequences_have_the_bits_that_they_have_alone() {
    cases().into_par_iter().enumerate().for_each(|(index, case)| {
        let checked = case.check_alone(1 + index as u32, |program, before| {
            let simulation = ProgramSimulation::new(program).policy(Policy::Random(index as u64));
            let outcome = simulation.mode(Mode::Fast).run(before).map_err(|error| error.to_string())?;
            let finding = outcome.findings().next().map(ToString::to_string);
            finding.map_or(Ok(outcome.buffers), Err)
        });
        assert_eq!(checked, Ok(()));
    });
}

/// If all CTAs get equal shares instead, the bits differ, and the check notices it.
#[test]
fn other_bits_are_found() {
    // The sequences are so long that work units are split. Short sequences would have the same bits.
    let case = Case { lengths: vec![2000, 700], split_keys: Some(SplitKeys::Even), ..cases()[0].clone() };
    let checked = case.check_alone(3, |program, before| {
        let outcome = ProgramSimulation::new(program).mode(Mode::Fast).run(before);
        Ok(outcome.map_err(|error| error.to_string())?.buffers)
    });
    assert!(checked.is_err_and(|fault| fault.contains("has other bits alone")));
}
