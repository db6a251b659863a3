//! Operations' kernels, and how each is tested. A new operation is one more entry of [`families`]: the tests of every
//! family's trials, schedules and mutants are loops over them.

use fa3_ir::{Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation};

use crate::mutate::Target;
use crate::{append, bwd, cache, combine, fwd, intervals, ladder, packed, quantize};

/// The kernels of an operation.
pub struct Family {
    /// Name in reports.
    pub name: &'static str,
    /// Every kind of kernel with problems of every shape class; the seed is for the inputs.
    pub trials: fn(seed: u64) -> Vec<Trial>,
    /// Small problems, of several tiles a CTA and more blocks than a ring has slots, to run under many schedules.
    pub small: fn() -> Vec<Trial>,
    /// Number of random schedules for each of `small`.
    pub schedules: u64,
    /// Kernels to mutate.
    pub targets: fn() -> Vec<Target>,
}

/// Every family there is.
pub fn families() -> [Family; 10] {
    [
        ladder::FAMILY,
        fwd::FAMILY,
        fwd::wide::FAMILY,
        intervals::FAMILY,
        bwd::FAMILY,
        quantize::FAMILY,
        packed::FAMILY,
        cache::FAMILY,
        combine::FAMILY,
        append::FAMILY,
    ]
}

/// A kernel on one problem.
pub struct Trial {
    /// Kernel and problem.
    pub name: String,
    /// The kernels, their buffers and arguments.
    pub program: Program<Kernel>,
    /// The bytes of every buffer before.
    pub before: Vec<Vec<u8>>,
    /// Everything that the bits of the results depend on.
    pub bits: Bits,
    /// Judges the bytes of every buffer after: what is wrong with them.
    pub judge: Judgement,
}

/// Judges buffers, given what they were before and are after.
pub type Judgement = Box<dyn Fn(&[Vec<u8>], &[Vec<u8>]) -> Result<(), String> + Send + Sync>;

/// Everything that the bits of results depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// On the inputs alone: a GPU gives those that the simulator gives.
    Inputs,
    /// On the inputs, and on who approximates: a GPU has other exponentials and reciprocals than the simulator.
    Approximations,
    /// On the schedule, too: the order of additions is left open.
    Schedule,
}

impl Trial {
    /// Runs it in the simulator, and returns the bytes of every buffer.
    ///
    /// # Errors
    /// What the simulator finds wrong, in words.
    pub fn simulate(&self, policy: Policy, mode: Mode) -> Result<Vec<Vec<u8>>, String> {
        self.simulate_loaded(&self.program.map(Loaded::new), policy, mode)
    }

    /// Runs its program with kernels that are loaded already, for many runs.
    ///
    /// # Errors
    /// What the simulator finds wrong, in words.
    pub fn simulate_loaded(
        &self,
        program: &Program<Loaded<'_>>,
        policy: Policy,
        mode: Mode,
    ) -> Result<Vec<Vec<u8>>, String> {
        let fault = |what: String| format!("{} under {policy:?}: {what}", self.name);
        let run = ProgramSimulation::of(program.clone()).policy(policy).mode(mode).run(&self.before);
        let outcome = run.map_err(|error| fault(error.to_string()))?;
        let findings: Vec<String> = outcome.findings().map(ToString::to_string).collect();
        match (findings.is_empty(), &outcome.left_over[..]) {
            (true, []) => Ok(outcome.buffers),
            (true, tickets) => Err(fault(format!("not 0 again: {}", tickets.join(", ")))),
            (false, _) => Err(fault(findings.join("\n"))),
        }
    }

    /// Judges the bytes of every buffer after a run.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn check(&self, after: &[Vec<u8>]) -> Result<(), String> {
        (self.judge)(&self.before, after).map_err(|fault| format!("{}: {fault}", self.name))
    }
}
