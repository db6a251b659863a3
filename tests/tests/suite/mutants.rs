//! Applies the operators of [`fa3_tests::mutate`] to every family's kernels. The module `families` shows that the
//! unmodified kernels break no rule under many schedules.

use std::collections::BTreeSet;

use fa3_ir::Source;
use fa3_tests::families;
use fa3_tests::mutate::{Chosen, Fate, Mutant, Operator, Score, Target, all, covering, fate_of, operators};
use rayon::prelude::*;

type Tested<'p> = (&'static Operator, &'p Target, Mutant, Fate);

/// Mutants are killed by the rule that they break, and every operator breaks some kernel. `FA3_MUTATE` tests all
/// mutants of the kernels whose name contains its value, instead of a covering selection of all kernels.
#[test]
fn mutants_die_by_the_rule_they_break() {
    let wanted = std::env::var("FA3_MUTATE").ok();
    let mut targets: Vec<Target> = families().iter().flat_map(|family| (family.targets)()).collect();
    targets.retain(|target| wanted.as_ref().is_none_or(|wanted| target.name.contains(wanted)));
    assert!(!targets.is_empty(), "no target has {wanted:?} in its name");
    let mutants = if wanted.is_some() { all(&targets) } else { covering(&targets) };
    let tested: Vec<Tested<'_>> = mutants
        .into_par_iter()
        .map(|(operator, target, mutant)| {
            let fate = fate_of(target, operator, &mutant);
            (operator, target, mutant, fate)
        })
        .collect();
    let mut score = Score::new(&targets);
    tested.iter().for_each(|(operator, target, mutant, fate)| score.note(target, operator, mutant, fate));
    println!("{score}");
    assert!(score.failures.is_empty(), "{}", score.failures.join("\n"));
    if wanted.is_none() {
        let idle: Vec<&str> = operators().filter(|operator| !score.has(operator)).map(|x| x.name).collect();
        assert_eq!(idle, [""; 0], "these operators find nothing");
    }
}

/// The covering selection has every line that an operator can break, and no line twice.
#[test]
fn every_line_is_broken_by_every_operator() {
    let targets: Vec<Target> = families()
        .iter()
        .filter(|family| family.name == "quantize")
        .flat_map(|family| (family.targets)())
        .collect();
    let (all, chosen) = (all(&targets), covering(&targets));
    let lines = |of: &[Chosen<'_>]| -> BTreeSet<(&str, Source)> {
        of.iter().map(|(operator, _, mutant)| (operator.name, mutant.source)).collect()
    };
    assert_eq!(lines(&chosen), lines(&all));
    assert_eq!(lines(&chosen).len(), chosen.len());
    assert!(chosen.len() < all.len() / 2, "{} of {}", chosen.len(), all.len());
}
