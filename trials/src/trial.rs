//! A program on one problem: the memory before the run, and the checks of the memory after it.
//!
//! ```text
//! (operation: program, inputs, judge) → memory, poisoned → simulator or GPU → memory → other bytes unchanged, judge
//! ```

use fa3_ir::{Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation};

use crate::memory::Memory;

/// A program with the memory of one problem and the checks of its results.
pub struct Trial {
    /// Name of the plan and of the problem.
    pub name: String,
    /// The kernels, their buffers and arguments.
    pub program: Program<Kernel>,
    /// Initial bytes of every buffer.
    pub before: Vec<Vec<u8>>,
    /// The factors on which the bits of the results depend.
    pub bits: Bits,
    /// Checks the results.
    judge: Box<Check>,
}

/// A check of the memory after a run. Its error says what is wrong.
type Check = dyn Fn(Memory<'_>) -> Result<(), String> + Send + Sync;

/// The factors on which the bits of the results depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// The inputs alone: GPU and simulator give the same bits.
    Inputs,
    /// The inputs and the approximations: exponentials and reciprocals of a GPU differ from the simulator's.
    Approximations,
    /// The schedule as well: the order of additions is not fixed.
    Schedule,
}

impl Trial {
    /// A trial of a program on this memory. `judge` gets the memory after the run, once a check has shown that all
    /// bytes outside of the outputs are unchanged.
    pub(crate) fn new(
        name: String,
        bits: Bits,
        program: Program<Kernel>,
        before: Vec<Vec<u8>>,
        judge: impl Fn(Memory<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) -> Trial {
        Trial { name, program, before, bits, judge: Box::new(judge) }
    }

    /// Initial bytes of a buffer.
    ///
    /// # Panics
    /// If the program has no buffer of this name.
    pub fn buffer_mut(&mut self, name: &str) -> &mut Vec<u8> {
        let at = self.program.find(name).unwrap_or_else(|| panic!("{} has no {name}", self.name));
        &mut self.before[at.0]
    }

    /// Runs the program in the simulator, and returns the bytes of every buffer.
    ///
    /// # Errors
    /// The simulator's finding, in words.
    pub fn simulate(&self, policy: Policy, mode: Mode) -> Result<Vec<Vec<u8>>, String> {
        self.simulate_loaded(&self.program.map(Loaded::new), policy, mode)
    }

    /// Runs the program with kernels that are loaded already, which saves time over many runs.
    ///
    /// # Errors
    /// The simulator's finding, in words.
    pub fn simulate_loaded(
        &self,
        program: &Program<Loaded<'_>>,
        policy: Policy,
        mode: Mode,
    ) -> Result<Vec<Vec<u8>>, String> {
        let after = simulate(program, &self.before, policy, mode);
        after.map_err(|fault| format!("{} under {policy:?}: {fault}", self.name))
    }

    /// Checks the bytes of every buffer after a run.
    ///
    /// # Errors
    /// The fault in the bytes.
    pub fn check(&self, after: &[Vec<u8>]) -> Result<(), String> {
        let memory = Memory::new(&self.program, after);
        let checked = memory.check_rest(&self.before).and_then(|()| (self.judge)(memory));
        checked.map_err(|fault| format!("{}: {fault}", self.name))
    }
}

/// Runs a program in the simulator, and returns the bytes of every buffer.
///
/// # Errors
/// The simulator's finding, in words.
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
