//! Operators of [`fa3_tests::mutate`] at places of every family's kernels. That the kernels themselves are clean under
//! many schedules, `families` shows.

use std::collections::BTreeSet;

use fa3_ir::Source;
use fa3_tests::families;
use fa3_tests::mutate::{Chosen, Fate, Mutant, Operator, Prey, Score, all, covering, hunt, operators};
use rayon::prelude::*;

type Hunted<'p> = (&'static Operator, &'p Prey, Mutant, Fate);

/// Mutants die by the rule that they break, and every operator breaks some kernel. `FA3_PREY` has all mutants hunted,
/// of the kernels whose name has it in it, instead of a covering choice of all kernels'.
#[test]
fn mutants_die_by_the_rule_they_break() {
    let wanted = std::env::var("FA3_PREY").ok();
    let mut preys: Vec<Prey> = families().iter().flat_map(|family| (family.preys)()).collect();
    preys.retain(|prey| wanted.as_ref().is_none_or(|wanted| prey.name.contains(wanted)));
    assert!(!preys.is_empty(), "no prey has {wanted:?} in its name");
    let mutants = if wanted.is_some() { all(&preys) } else { covering(&preys) };
    let hunted: Vec<Hunted<'_>> = mutants
        .into_par_iter()
        .map(|(operator, prey, mutant)| {
            let fate = hunt(prey, operator, &mutant);
            (operator, prey, mutant, fate)
        })
        .collect();
    let mut score = Score::new(&preys);
    hunted.iter().for_each(|(operator, prey, mutant, fate)| score.note(prey, operator, mutant, fate));
    println!("{score}");
    assert!(score.failures.is_empty(), "{}", score.failures.join("\n"));
    if wanted.is_none() {
        let idle: Vec<&str> = operators().filter(|operator| !score.has(operator)).map(|x| x.name).collect();
        assert_eq!(idle, [""; 0], "these operators find nothing");
    }
}

/// Nothing that an operator can break is left out, and each mutant is hunted once.
#[test]
fn every_line_and_every_kernel_is_broken_by_every_operator() {
    let preys: Vec<Prey> = families()
        .iter()
        .filter(|family| family.name == "quantize")
        .flat_map(|family| (family.preys)())
        .collect();
    let (all, chosen) = (all(&preys), covering(&preys));
    let lines = |of: &[Chosen<'_>]| -> BTreeSet<(&str, Source)> {
        of.iter().map(|(operator, _, mutant)| (operator.name, mutant.source)).collect()
    };
    let kernels = |of: &[Chosen<'_>]| -> BTreeSet<(&str, String)> {
        of.iter().map(|(operator, prey, _)| (operator.name, prey.name.clone())).collect()
    };
    let sites: BTreeSet<(&str, &str, &str)> = chosen
        .iter()
        .map(|(operator, prey, mutant)| (operator.name, prey.name.as_str(), mutant.site.as_str()))
        .collect();
    assert_eq!(lines(&chosen), lines(&all));
    assert_eq!(kernels(&chosen), kernels(&all));
    assert_eq!(sites.len(), chosen.len());
    assert!(chosen.len() < all.len() / 2, "{} of {}", chosen.len(), all.len());
}
