//! Every operator of [`fa3_tests::mutate`] at every place of every kernel of the ladder and of forward kernels of every
//! form. That the kernels themselves are clean under many schedules, `ladder.rs` and `fwd` show.

use fa3_tests::ladder::small_rungs;
use fa3_tests::mutate::{Fate, Mutant, Operator, Prey, Score, forward_preys, hunt, operators};
use rayon::prelude::*;

type Hunted<'o> = (&'o Prey, &'o Operator, Mutant, Fate);

/// The ladder's kernels and the forward ones; those whose name has `FA3_PREY` in it.
fn preys() -> Vec<Prey> {
    let wanted = std::env::var("FA3_PREY").unwrap_or_default();
    let preys = small_rungs().iter().map(Prey::of_ladder).chain(forward_preys()).collect::<Vec<_>>();
    preys.into_iter().filter(|prey| prey.name.contains(&wanted)).collect()
}

#[test]
fn mutants_die_by_the_rule_they_break() {
    let preys: Vec<Prey> = preys();
    let pairs: Vec<(&Operator, &Prey)> =
        operators().flat_map(|operator| preys.iter().map(move |prey| (operator, prey))).collect();
    let hunted: Vec<Hunted<'_>> = pairs
        .into_par_iter()
        .flat_map(|(operator, prey)| {
            let mutants = prey.mutants(operator).into_par_iter();
            mutants.map(move |mutant| {
                let fate = hunt(prey, operator, &mutant);
                (prey, operator, mutant, fate)
            })
        })
        .collect();
    let mut score = Score::new(&preys);
    hunted.iter().for_each(|(prey, operator, mutant, fate)| score.note(prey, operator, mutant, fate));
    println!("{score}");
    assert!(score.failures.is_empty(), "{}", score.failures.join("\n"));
}

/// An operator that breaks nothing, or nowhere, would pass unnoticed.
#[test]
fn every_operator_breaks_some_kernel() {
    let preys = preys();
    for operator in operators() {
        let mut mutants = 0;
        for prey in &preys {
            for mutant in prey.mutants(operator) {
                assert_ne!(&mutant.kernel, prey.kernel(), "{} at {}", operator.name, mutant.site);
                mutants += 1;
            }
        }
        assert!(mutants > 0, "{} finds nothing", operator.name);
    }
}
