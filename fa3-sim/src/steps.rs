//! Runs of programs: all their kernels, one after the other, on one memory.

use fa3_ir::{BufferId, BufferRole, Kernel, Program};

use crate::finding::Finding;
use crate::loaded::Loaded;
use crate::memory::{Buffer, Demand, Memory};
use crate::probe::Probe;
use crate::rule::Rule;
use crate::schedule::Policy;
use crate::simulation::{MOST_STEPS, Mode, Outcome, SimError, Simulation, setters};

/// A run of a program. Its kernels are verified and decoded once, for any number of runs.
///
/// A buffer that the program writes begins as memory that is not initialised. Together, the steps that write an output
/// must write each of its elements once. A kernel that waits for the previous grid (PDL) may start before that grid has
/// ended. Until the wait, the previous grid may still write every buffer, whether or not it belongs to the program
/// ([`crate::Rule::G1`]).
#[derive(Clone, Debug)]
pub struct ProgramSimulation<'p> {
    program: Program<Loaded<'p>>,
    policy: Policy,
    mode: Mode,
    max_steps: u64,
    until: Vec<Rule>,
    trace: bool,
}

/// Outcome of a program's run.
#[derive(Clone, Debug, PartialEq)]
pub struct ProgramOutcome {
    /// Contents of every buffer.
    pub buffers: Vec<Vec<u8>>,
    /// Findings and counts, step by step.
    pub steps: Vec<Outcome>,
    /// Names of tile counters that are not 0 at the end.
    pub left_over: Vec<&'static str>,
}

impl ProgramOutcome {
    /// The rules that were broken, in all steps.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.steps.iter().flat_map(|step| &step.findings)
    }

    /// Probes of all steps.
    pub fn probes(&self) -> impl Iterator<Item = &Probe> {
        self.steps.iter().flat_map(|step| &step.probes)
    }

    /// Whether no rule was broken and every tile counter is 0.
    pub fn is_clean(&self) -> bool {
        self.left_over.is_empty() && self.steps.iter().all(Outcome::is_clean)
    }
}

impl<'p> ProgramSimulation<'p> {
    /// A run under [`Policy::Eager`], in [`Mode::Exact`].
    pub fn new(program: &'p Program<Kernel>) -> ProgramSimulation<'p> {
        ProgramSimulation::of(program.map(Loaded::new))
    }

    /// A run of a program whose kernels are loaded already; otherwise like [`ProgramSimulation::new`].
    pub fn of(program: Program<Loaded<'p>>) -> ProgramSimulation<'p> {
        let (policy, mode) = (Policy::Eager, Mode::Exact);
        ProgramSimulation { program, policy, mode, max_steps: MOST_STEPS, until: Vec::new(), trace: false }
    }

    setters! {
        /// Sets the schedule.
        policy: Policy;
        /// Sets how much of the arithmetic is simulated.
        mode: Mode;
        /// Limits the steps of warps in every launch: see [`Simulation::max_steps`].
        max_steps: u64;
        /// Ends every step where one of these rules is broken: see [`Simulation::until`].
        until: Vec<Rule>;
        /// Records what the first cluster of every step does.
        trace: bool;
    }

    /// Runs every step to its end. `initial` has the bytes of every buffer. Bytes for outputs and scratch memory are
    /// ignored. An optional input without bytes is absent: its address is 0.
    ///
    /// # Errors
    /// If a buffer is given a wrong number of bytes, or if a step does not run to its end.
    pub fn run(&self, initial: &[Vec<u8>]) -> Result<ProgramOutcome, SimError> {
        let (given, expected) = (initial.len(), self.program.buffers.len());
        if given != expected {
            return Err(SimError::Initial { buffer: "buffers", given, expected });
        }
        let mut memory = Memory::new();
        let given = self.program.buffers.iter().zip(initial);
        let buffers = given.map(|(buffer, bytes)| allocate(&mut memory, buffer, bytes));
        let buffers: Vec<Buffer> = buffers.collect::<Result<_, _>>()?;
        let address = |(buffer, memory): (&fa3_ir::Buffer, &Buffer)| {
            let absent = buffer.role == BufferRole::OptionalInput && memory.bytes() == 0;
            if absent { 0 } else { memory.address() }
        };
        let addresses: Vec<u64> = self.program.buffers.iter().zip(&buffers).map(address).collect();
        let mut steps = Vec::new();
        for (index, step) in self.program.steps.iter().enumerate() {
            for (number, &buffer) in buffers.iter().enumerate() {
                memory.demand(buffer, self.demand(index, BufferId(number)));
            }
            let kernel = step.kernel.kernel();
            let early = kernel.waits_for_grid();
            let args = step.bind(&kernel.params, &addresses)?;
            let simulation = Simulation::of(step.kernel.clone()).grid(step.grid).args(args);
            let simulation = simulation.predecessor_writes(if early { buffers.clone() } else { Vec::new() });
            let simulation = simulation.policy(self.policy).mode(self.mode).max_steps(self.max_steps);
            steps.push(simulation.until(self.until.clone()).trace(self.trace).run(&mut memory)?);
        }
        let bytes: Vec<Vec<u8>> = buffers.iter().map(|&buffer| memory.read(buffer)).collect();
        let tickets = self.program.buffers.iter().zip(&bytes);
        let tickets = tickets.filter(|(buffer, _)| buffer.role == BufferRole::TileCounter);
        let left_over = tickets.filter(|(_, bytes)| bytes.iter().any(|&byte| byte != 0));
        let left_over = left_over.map(|(buffer, _)| buffer.name).collect();
        Ok(ProgramOutcome { left_over, buffers: bytes, steps })
    }
}

impl ProgramSimulation<'_> {
    /// The demand on a step's writes to a buffer.
    fn demand(&self, step: usize, buffer: BufferId) -> Demand {
        match self.program.last_step_of_output(buffer) {
            Some(last) if step < last => Demand::Part,
            Some(last) if step == last => Demand::Rest,
            _ => Demand::None,
        }
    }
}

/// The memory of a buffer before the first step.
fn allocate(memory: &mut Memory, buffer: &fa3_ir::Buffer, bytes: &[u8]) -> Result<Buffer, SimError> {
    let (name, expected) = (buffer.name, buffer.bytes());
    match buffer.role {
        BufferRole::OptionalInput if bytes.is_empty() => Ok(memory.alloc(name, 0)),
        BufferRole::Input | BufferRole::OptionalInput | BufferRole::InOut if bytes.len() != expected => {
            Err(SimError::Initial { buffer: name, given: bytes.len(), expected })
        }
        BufferRole::Input | BufferRole::OptionalInput | BufferRole::InOut => {
            Ok(memory.alloc_from(name, bytes))
        }
        BufferRole::TileCounter => Ok(memory.alloc_from(name, &vec![0; expected])),
        BufferRole::Scratch | BufferRole::Output | BufferRole::OptionalOutput => {
            Ok(memory.alloc(name, expected))
        }
    }
}
