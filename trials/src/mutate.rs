//! Mutation tests of kernels: a fault is planted in a kernel, and a rule must notice it.
//!
//! ```text
//! mutant = operator(kernel, site)      a mutant that is not equivalent must be killed by a rule of its operator
//! ```
//!
//! Kernels are data, so that an [`Operator`] is a small function that lists where it can break a kernel, and how. A
//! mutant is killed by a rule of the simulator, by a rule of the verifier, or, if it breaks arithmetic alone, by the
//! comparison of results. An equivalent mutant carries the reason why the change has no effect. It also runs, and must
//! break no rule.

mod anatomy;
mod choice;
mod edges;
mod edit;
mod forward;
mod kinds;
mod operators;
mod score;
mod target;

use fa3_ir::{Inst, Kernel, Source};
use fa3_sim::Rule;

use anatomy::Anatomy;
use edit::{Edit, edited};

pub use choice::{Chosen, all, covering};
pub(crate) use forward::{ASKED, QK_FENCE, UNASKED, forward_targets, interval_targets, wide_targets};
pub use operators::operators;
pub use score::Score;
pub(crate) use target::{Equivalent, LAST_TURN, TURNS};
pub use target::{Fate, Target, fate_of};

/// A mutation operator.
pub struct Operator {
    /// Its name, such as `wgmma.fence: deleted`.
    pub name: &'static str,
    /// Rules of the simulator that may kill its mutants.
    pub rules: &'static [Rule],
    /// Rules of the verifier that may kill its mutants, such as `V-16`.
    pub verifier: &'static [&'static str],
    /// Whether a wrong result may kill its mutants, because it breaks arithmetic.
    pub result: bool,
    /// Lists the sites of a kernel.
    sites: fn(&Anatomy<'_>) -> Vec<Site>,
}

/// One mutation of a kernel.
struct Site {
    /// The mutated statement.
    line: usize,
    edits: Vec<Edit>,
    /// Reason why the mutation has no effect; `None` if it has one.
    equivalent: Option<&'static str>,
}

/// A mutant: a kernel with one fault.
pub struct Mutant {
    edits: Vec<Edit>,
    /// Source location that built the mutated statement.
    pub source: Source,
    /// The source location as text, with the statement's number.
    pub site: String,
    /// Reason why the mutant is equivalent to the kernel; `None` if it is not.
    pub equivalent: Option<&'static str>,
}

impl Operator {
    /// An operator whose mutants these rules of the simulator may kill.
    const fn new(
        name: &'static str,
        rules: &'static [Rule],
        sites: fn(&Anatomy<'_>) -> Vec<Site>,
    ) -> Operator {
        Operator { name, rules, verifier: &[], result: false, sites }
    }

    /// Also lets these rules of the verifier kill its mutants.
    const fn or_verifier(self, verifier: &'static [&'static str]) -> Operator {
        Operator { verifier, ..self }
    }

    /// Also lets wrong results kill its mutants.
    const fn or_result(self) -> Operator {
        Operator { result: true, ..self }
    }

    /// The operator's mutants of a kernel.
    fn mutants(&self, anatomy: &Anatomy<'_>) -> Vec<Mutant> {
        (self.sites)(anatomy).into_iter().map(|site| site.mutant(anatomy)).collect()
    }
}

impl Site {
    fn new(line: usize, edits: Vec<Edit>) -> Site {
        Site { line, edits, equivalent: None }
    }

    /// Deletes the statement.
    fn deleted(line: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line)])
    }

    /// Replaces the instruction.
    fn replaced(line: usize, inst: Inst) -> Site {
        Site::new(line, vec![Edit::Inst(line, inst)])
    }

    /// Moves the statement to before statement `to`.
    fn before(kernel: &Anatomy<'_>, line: usize, to: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line), Edit::Before(to, kernel.stmt(line).clone())])
    }

    /// Moves the statement to after statement `to`.
    fn after(kernel: &Anatomy<'_>, line: usize, to: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line), Edit::After(to, kernel.stmt(line).clone())])
    }

    /// Marks the site as equivalent if there is a reason.
    fn equivalent(self, reason: impl Into<Option<&'static str>>) -> Site {
        Site { equivalent: reason.into(), ..self }
    }

    fn mutant(self, anatomy: &Anatomy<'_>) -> Mutant {
        let source = anatomy.stmt(self.line).source;
        Mutant {
            edits: self.edits,
            source,
            site: format!("{}:{} (statement {})", source.file(), source.line(), self.line),
            equivalent: self.equivalent,
        }
    }
}

impl Mutant {
    /// The mutated kernel.
    fn of(&self, kernel: &Kernel) -> Kernel {
        edited(kernel, &self.edits)
    }
}
