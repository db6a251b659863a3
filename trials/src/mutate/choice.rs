//! Which mutants are hunted.

use std::collections::{BTreeMap, BTreeSet};

use fa3_ir::Source;

use super::{Mutant, Operator, Prey, operators};

/// A mutant of a kernel, and the operator that made it.
pub type Chosen<'p> = (&'static Operator, &'p Prey, Mutant);

/// Every mutant of these kernels.
pub fn all(preys: &[Prey]) -> Vec<Chosen<'_>> {
    let of = |operator, prey: &Prey| prey.mutants(operator).into_iter();
    let of = |operator, prey| of(operator, prey).map(move |mutant| (operator, prey, mutant));
    operators().flat_map(|operator| preys.iter().flat_map(move |prey| of(operator, prey))).collect()
}

/// Mutants of these kernels in which every operator breaks every line of the source that it can break, and every kernel
/// that it can break. Kernels share most of their lines, and the compiler of kernels repeats a line in prologues, loops
/// and roles: the first of these places and the last take turns.
pub fn covering(preys: &[Prey]) -> Vec<Chosen<'_>> {
    let mut chosen = Vec::new();
    for operator in operators() {
        let mut broken = BTreeSet::new();
        for prey in preys {
            let mut places: BTreeMap<Source, Vec<Mutant>> = BTreeMap::new();
            for mutant in prey.mutants(operator) {
                places.entry(mutant.source).or_default().push(mutant);
            }
            let any_new = places.keys().any(|source| !broken.contains(source));
            for (index, (source, mut mutants)) in places.into_iter().enumerate() {
                if !broken.insert(source) && (any_new || index > 0) {
                    continue;
                }
                let place = if chosen.len().is_multiple_of(2) { 0 } else { mutants.len() - 1 };
                chosen.push((operator, prey, mutants.swap_remove(place)));
            }
        }
    }
    chosen
}
