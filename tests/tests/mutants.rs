//! Every operator of [`fa3_tests::mutate`] at every place of every kernel of the ladder. That the kernels themselves are
//! clean under many schedules, `ladder.rs` shows.

use fa3_tests::ladder::small_rungs;
use fa3_tests::mutate::{Fate, Mutant, Operator, Prey, Score, hunt, operators};
use rayon::prelude::*;

type Hunted<'o> = (&'o Operator, Mutant, Fate);

#[test]
fn mutants_die_by_the_rule_they_break() {
    let preys: Vec<Prey> = small_rungs().iter().map(Prey::new).collect();
    let pairs: Vec<(&Operator, &Prey)> =
        operators().flat_map(|operator| preys.iter().map(move |prey| (operator, prey))).collect();
    let hunted: Vec<Hunted<'_>> = pairs
        .into_par_iter()
        .flat_map(|(operator, prey)| {
            let mutants = operator.mutants(prey.kernel()).into_par_iter();
            mutants.map(move |mutant| {
                let fate = hunt(prey, operator, &mutant);
                (operator, mutant, fate)
            })
        })
        .collect();
    let mut score = Score::new(&preys);
    hunted.iter().for_each(|(operator, mutant, fate)| score.note(operator, mutant, fate));
    println!("{score}");
    assert!(score.failures.is_empty(), "{}", score.failures.join("\n"));
}

/// An operator that breaks nothing, or nowhere, would pass unnoticed.
#[test]
fn every_operator_breaks_some_kernel() {
    let rungs = small_rungs();
    for operator in operators() {
        let mut mutants = 0;
        for kernel in rungs.iter().map(|rung| &rung.job.kernel) {
            for mutant in operator.mutants(kernel) {
                assert_ne!(&mutant.kernel, kernel, "{} at {}", operator.name, mutant.site);
                mutants += 1;
            }
        }
        assert!(mutants > 0, "{} finds nothing", operator.name);
    }
}
