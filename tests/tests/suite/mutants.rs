//! Every operator of [`fa3_tests::mutate`] at every place of every family's kernels. That the kernels themselves are
//! clean under many schedules, `families` shows.

use fa3_tests::families;
use fa3_tests::mutate::{Fate, Mutant, Operator, Prey, Score, hunt, operators};
use rayon::prelude::*;

type Hunted<'o> = (&'o Prey, &'o Operator, Mutant, Fate);

/// Mutants die by the rule that they break, and every operator breaks some kernel. `FA3_PREY` limits the kernels to
/// those whose name has it in it.
#[test]
fn mutants_die_by_the_rule_they_break() {
    let wanted = std::env::var("FA3_PREY").unwrap_or_default();
    let mut preys: Vec<Prey> = families().iter().flat_map(|family| (family.preys)()).collect();
    preys.retain(|prey| prey.name.contains(&wanted));
    assert!(!preys.is_empty(), "no prey has {wanted:?} in its name");
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
    if wanted.is_empty() {
        let idle: Vec<&str> = operators().filter(|operator| !score.has(operator)).map(|x| x.name).collect();
        assert_eq!(idle, [""; 0], "these operators find nothing");
    }
}
