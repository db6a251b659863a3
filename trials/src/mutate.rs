//! Mutation tests of kernels: one thing broken, and the rule that must notice.
//!
//! ```text
//! mutant = operator(kernel, site)      a mutant that changes what the kernel does must die by a rule of its operator
//! ```
//!
//! Kernels are data, so that an [`Operator`] is a small function: where it can break a kernel, and how. Who must notice
//! is a rule of the simulator, a rule of the verifier, or, where arithmetic alone is broken, the comparison of the
//! results. A site where the change means nothing has a sentence that says why; such mutants are run too, and must stay
//! clean.

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
pub(crate) use forward::{QK_FENCE, forward_targets, interval_targets, wide_targets};
pub use operators::operators;
pub use score::Score;
pub(crate) use target::{Equivalent, LAST_TURN, TURNS};
pub use target::{Fate, Target, fate_of};

/// A way to break kernels.
pub struct Operator {
    /// Its name, as `wgmma.fence: deleted`.
    pub name: &'static str,
    /// The simulator's rules that may catch its mutants.
    pub rules: &'static [Rule],
    /// The verifier's, as `V-16`.
    pub verifier: &'static [&'static str],
    /// Whether a wrong result may: what it breaks is arithmetic.
    pub result: bool,
    /// Where it can break a kernel, and how.
    sites: fn(&Anatomy<'_>) -> Vec<Site>,
}

/// A way to break one kernel.
struct Site {
    /// The broken statement.
    line: usize,
    edits: Vec<Edit>,
    /// Why that changes nothing, if it does not.
    equivalent: Option<&'static str>,
}

/// One thing broken in a kernel.
pub struct Mutant {
    edits: Vec<Edit>,
    /// The place in the kernel's source that built the broken statement.
    pub source: Source,
    /// The place as text, with the statement's number.
    pub site: String,
    /// Why it does what the kernel does, if it does.
    pub equivalent: Option<&'static str>,
}

impl Operator {
    /// An operator whose mutants these rules may catch.
    const fn new(
        name: &'static str,
        rules: &'static [Rule],
        sites: fn(&Anatomy<'_>) -> Vec<Site>,
    ) -> Operator {
        Operator { name, rules, verifier: &[], result: false, sites }
    }

    /// Lets rules of the verifier catch its mutants.
    const fn or_verifier(self, verifier: &'static [&'static str]) -> Operator {
        Operator { verifier, ..self }
    }

    /// Lets wrong results show its mutants.
    const fn or_result(self) -> Operator {
        Operator { result: true, ..self }
    }

    /// Its mutants of a kernel.
    pub fn mutants(&self, kernel: &Kernel) -> Vec<Mutant> {
        let anatomy = Anatomy::new(kernel);
        (self.sites)(&anatomy).into_iter().map(|site| site.mutant(&anatomy)).collect()
    }
}

impl Site {
    fn new(line: usize, edits: Vec<Edit>) -> Site {
        Site { line, edits, equivalent: None }
    }

    /// Without the statement.
    fn deleted(line: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line)])
    }

    /// With the instruction replaced.
    fn replaced(line: usize, inst: Inst) -> Site {
        Site::new(line, vec![Edit::Inst(line, inst)])
    }

    /// With the statement moved to before statement `to`.
    fn before(kernel: &Anatomy<'_>, line: usize, to: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line), Edit::Before(to, kernel.stmt(line).clone())])
    }

    /// With the statement moved to after statement `to`.
    fn after(kernel: &Anatomy<'_>, line: usize, to: usize) -> Site {
        Site::new(line, vec![Edit::Delete(line), Edit::After(to, kernel.stmt(line).clone())])
    }

    /// Changes nothing, if there is a reason.
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
    /// The kernel, broken.
    fn of(&self, kernel: &Kernel) -> Kernel {
        edited(kernel, &self.edits)
    }
}
