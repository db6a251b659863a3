//! A program on one problem: the memory before it runs, and the judge of the memory after.
//!
//! ```text
//! (operation: program, inputs, judge) → memory, poisoned → simulator or GPU → memory → rest untouched, judge
//! ```

use fa3_ir::{Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation};

use crate::memory::Memory;

/// A program on one problem.
pub struct Trial {
    /// Plan and problem.
    pub name: String,
    /// The kernels, their buffers and arguments.
    pub program: Program<Kernel>,
    /// The bytes of every buffer before.
    pub before: Vec<Vec<u8>>,
    /// Everything that the bits of the results depend on.
    pub bits: Bits,
    /// Says what is wrong with the results.
    judge: Box<Check>,
}

/// Says what is wrong with the memory after a run.
type Check = dyn Fn(Memory<'_>) -> Result<(), String> + Send + Sync;

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
    /// A trial of a program on this memory. `judge` gets the memory after, in which all is as before that is no output.
    pub(crate) fn new(
        name: String,
        bits: Bits,
        program: Program<Kernel>,
        before: Vec<Vec<u8>>,
        judge: impl Fn(Memory<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Trial {
        Trial { name, program, before, bits, judge: Box::new(judge) }
    }

    /// The bytes of a buffer before.
    ///
    /// # Panics
    /// If the program does not have it.
    pub fn buffer_mut(&mut self, name: &str) -> &mut Vec<u8> {
        let at = self.program.find(name).unwrap_or_else(|| panic!("{} has no {name}", self.name));
        &mut self.before[at.0]
    }

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
        let after = simulate(program, &self.before, policy, mode);
        after.map_err(|fault| format!("{} under {policy:?}: {fault}", self.name))
    }

    /// Judges the bytes of every buffer after a run.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn check(&self, after: &[Vec<u8>]) -> Result<(), String> {
        let memory = Memory::new(&self.program, after);
        let checked = memory.check_rest(&self.before).and_then(|()| (self.judge)(memory));
        checked.map_err(|fault| format!("{}: {fault}", self.name))
    }
}

/// Runs a program in the simulator, and returns the bytes of every buffer.
///
/// # Errors
/// What the simulator finds wrong, in words.
pub fn simulate(
    program: &Program<Loaded<'_>>,
    before: &[Vec<u8>],
    policy: Policy,
    mode: Mode,
) -> Result<Vec<Vec<u8>>, String> {
    let run = ProgramSimulation::of(program.clone()).policy(policy).mode(mode).run(before);
    let outcome = run.map_err(|error| error.to_string())?;
    let findings: Vec<String> = outcome.findings().map(ToString::to_string).collect();
    match (findings.is_empty(), &outcome.left_over[..]) {
        (true, []) => Ok(outcome.buffers),
        (true, tickets) => Err(format!("not 0 again: {}", tickets.join(", "))),
        (false, _) => Err(findings.join("\n")),
    }
}
