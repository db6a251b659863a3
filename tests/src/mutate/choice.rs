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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families;

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
}
