//! Covering arrays contain the combinations that they promise.

use std::collections::BTreeSet;

use fa3_tests::{covering, covering_cases};

#[test]
fn levels_meet() {
    let levels = [3, 4, 2, 5, 7];
    let rows = covering(&levels);
    let met = |factors: &[usize]| -> usize {
        let tuples: BTreeSet<Vec<usize>> =
            rows.iter().map(|row| factors.iter().map(|&factor| row[factor]).collect()).collect();
        tuples.len()
    };
    for (f, g) in (0..5).flat_map(|g| (0..g).map(move |f| (f, g))) {
        assert_eq!(met(&[f, g]), levels[f] * levels[g]);
    }
    assert!(rows.len() <= 50, "{} rows; 35 are needed", rows.len());
}

#[test]
fn cases_pick_the_levels_of_rows() {
    let cases = covering_cases(|levels| {
        vec![levels.pick(&[0, 1, 2]), levels.pick(&[0, 1]), levels.pick(&[0, 1, 2, 3])]
    });
    assert_eq!(cases, covering(&[3, 2, 4]));
}
