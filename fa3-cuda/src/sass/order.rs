//! The order of a round's instructions on few lines, as Appendix B.2 of the paper tells it.

use std::fmt;

use super::{Class, Instruction, Round};

/// So long must a mixture of instructions last for a new kind to be the beginning of another one.
const SETTLED: usize = 12;

/// A round's instructions in order: runs of products, waits and barriers one by one, and arithmetic between them as mixtures of
/// kinds with their numbers. Integers, moves and branches are left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// What follows what.
    pub steps: Vec<Step>,
}

/// Instructions that run together: their short names in order of appearance, with their numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Names and numbers.
    pub counts: Vec<(String, usize)>,
    landmark: bool,
    /// Instructions since a name came in.
    settled: usize,
}

impl Round<'_> {
    /// Its order.
    pub fn order(&self) -> Order {
        let mut steps: Vec<Step> = Vec::new();
        for instruction in self.instructions.iter().filter(|instruction| is_shown(instruction)) {
            match steps.last_mut().filter(|step| step.takes(instruction)) {
                Some(step) => step.add(instruction),
                None => steps.push(Step::begin(instruction)),
            }
        }
        Order { steps }
    }
}

fn is_shown(instruction: &Instruction) -> bool {
    instruction.class() != Class::Other
}

/// Whether an instruction stands for itself: where it is matters, not only how many there are.
fn is_landmark(instruction: &Instruction) -> bool {
    matches!(instruction.class(), Class::Product | Class::Wait | Class::Barrier | Class::Spill)
}

impl Step {
    fn begin(instruction: &Instruction) -> Step {
        let counts = vec![(instruction.name().into_owned(), 1)];
        Step { counts, landmark: is_landmark(instruction), settled: 0 }
    }

    fn has(&self, instruction: &Instruction) -> bool {
        self.counts.iter().any(|(name, _)| *name == instruction.name())
    }

    fn takes(&self, instruction: &Instruction) -> bool {
        let mixes = !self.landmark && !is_landmark(instruction) && self.settled < SETTLED;
        mixes || self.has(instruction)
    }

    fn add(&mut self, instruction: &Instruction) {
        let name = instruction.name();
        match self.counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => {
                *count += 1;
                self.settled += 1;
            }
            None => {
                self.counts.push((name.into_owned(), 1));
                self.settled = 0;
            }
        }
    }
}

/// `HGMMA×8`, `FFMA×40+MUFU.EX2×12`.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (name, count)) in self.counts.iter().enumerate() {
            write!(f, "{}{name}", if index == 0 { "" } else { "+" })?;
            if *count > 1 {
                write!(f, "×{count}")?;
            }
        }
        Ok(())
    }
}

/// The steps, a space between them.
impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.steps.iter().enumerate() {
            write!(f, "{}{step}", if index == 0 { "" } else { " " })?;
        }
        Ok(())
    }
}
