//! Observations, which only a simulator executes. PTX has no observations, and no values that only observations read.

use crate::inst::Access;
use crate::lang::{Arg, Builder, Class, Frag, Rows};
use crate::names::Names;
use crate::{Condition, Inst, Operand, Ty};

/// Observations of a simulator's run. They change nothing that the kernel computes.
#[derive(Clone, Debug, PartialEq)]
pub enum ObserveInst {
    /// Records the contents of registers in the lanes that execute it.
    Probe {
        /// Name of the probe in the report.
        name: String,
        /// The registers.
        registers: Vec<Operand>,
        /// Their class.
        ty: Ty,
        /// Whether they are the registers of a fragment, in its order.
        is_fragment: bool,
    },
    /// Claims that a condition holds in every lane that executes it.
    Assert {
        /// The condition.
        condition: Condition,
        /// The claim in words, for the report.
        claim: String,
    },
}

impl ObserveInst {
    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        match self {
            ObserveInst::Probe { registers, ty, .. } => {
                registers.iter().for_each(|&register| see(Access::Read(register, *ty)));
            }
            ObserveInst::Assert { condition, .. } => {
                see(Access::Read(Operand::Value(condition.pred), Ty::Pred));
            }
        }
    }

    pub(crate) fn text(&self, names: &Names) -> String {
        match self {
            ObserveInst::Probe { name, registers, .. } => match &registers[..] {
                [first, .., last] if registers.len() > 4 => {
                    format!("probe {name:?} {{{} .. {}}}", names.operand(*first), names.operand(*last))
                }
                _ => format!("probe {name:?} {}", names.vector(registers)),
            },
            ObserveInst::Assert { condition, claim } => {
                format!("assert {claim:?} {}", names.condition(*condition))
            }
        }
    }
}

/// Numbers that a probe can show: a [`crate::lang::V`], a [`crate::lang::Var`], [`Rows`], or a reference to a [`Frag`].
pub trait Observed {
    /// The probe of this name.
    fn probe(self, name: &str) -> ObserveInst;
}

impl<A: Arg> Observed for A {
    fn probe(self, name: &str) -> ObserveInst {
        probe(name, vec![self.operand()], A::Ty::TY, false)
    }
}

impl<T: Class> Observed for Rows<'_, T> {
    fn probe(self, name: &str) -> ObserveInst {
        probe(name, self.0.map(Arg::operand).to_vec(), T::TY, false)
    }
}

impl Observed for &Frag<'_> {
    fn probe(self, name: &str) -> ObserveInst {
        probe(name, self.elements().map(|(_, register)| register.operand()).collect(), Ty::F32, true)
    }
}

fn probe(name: &str, registers: Vec<Operand>, ty: Ty, is_fragment: bool) -> ObserveInst {
    ObserveInst::Probe { name: name.to_owned(), registers, ty, is_fragment }
}

/// Observations, which only a simulator executes. A kernel's PTX is the same without them.
impl Builder {
    /// Records `x` under this name whenever a warp gets here in a simulation.
    #[track_caller]
    pub fn probe(&self, name: &str, x: impl Observed) {
        self.push(Inst::Observe(x.probe(name)));
    }

    /// Claims that `condition` holds in every lane that gets here; `claim` says what it means. In a simulation, a lane
    /// where the condition does not hold is a finding.
    #[track_caller]
    pub fn assert(&self, condition: impl Into<Condition>, claim: &str) {
        self.push(Inst::Observe(ObserveInst::Assert {
            condition: condition.into(),
            claim: claim.to_owned(),
        }));
    }
}
