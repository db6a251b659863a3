//! Selection of the mutants to test.

use std::collections::{BTreeMap, BTreeSet};

use fa3_ir::Source;

use super::anatomy::Anatomy;
use super::{Mutant, Operator, Target, operators};

/// A mutant of a kernel, and the operator that made it.
pub type Chosen<'p> = (&'static Operator, &'p Target, Mutant);

/// Every mutant of these kernels.
pub fn all(targets: &[Target]) -> Vec<Chosen<'_>> {
    let (mut chosen, kernels) = (Vec::new(), taken_apart(targets));
    for operator in operators() {
        for (target, anatomy) in &kernels {
            let mutants = target.mutants(anatomy, operator).into_iter();
            chosen.extend(mutants.map(|mutant| (operator, *target, mutant)));
        }
    }
    chosen
}

fn taken_apart(targets: &[Target]) -> Vec<(&Target, Anatomy<'_>)> {
    targets.iter().map(|target| (target, Anatomy::new(target.kernel()))).collect()
}

/// A covering selection: every operator breaks every source line that it can break, in the first kernel that has it.
/// Kernels share most of their lines. A kernel may also repeat a line, in prologues, loops and roles: the first and the
/// last repetition are taken in turns.
pub fn covering(targets: &[Target]) -> Vec<Chosen<'_>> {
    let (mut chosen, kernels) = (Vec::new(), taken_apart(targets));
    for operator in operators() {
        let mut broken = BTreeSet::new();
        for (target, anatomy) in &kernels {
            let mut places: BTreeMap<Source, Vec<Mutant>> = BTreeMap::new();
            for mutant in target.mutants(anatomy, operator) {
                places.entry(mutant.source).or_default().push(mutant);
            }
            for (_, mut mutants) in places.into_iter().filter(|(source, _)| broken.insert(*source)) {
                let place = if chosen.len().is_multiple_of(2) { 0 } else { mutants.len() - 1 };
                chosen.push((operator, *target, mutants.swap_remove(place)));
            }
        }
    }
    chosen
}
