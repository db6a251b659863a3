//! A launch of a kernel on the CPU.

use fa3_ir::{ArgError, ArgValue, Kernel, VerifyErrors, check_args, check_grid};

use crate::counters::Counters;
use crate::finding::{Finding, ordered};
use crate::loaded::Loaded;
use crate::machine::{Machine, Setup};
use crate::memory::{Buffer, Memory};
use crate::probe::Probe;
use crate::rule::Rule;
use crate::schedule::{Policy, Scheduler};
use crate::trace::{Recorder, Trace};

/// The default limit of steps, of all warps together.
pub(crate) const MOST_STEPS: u64 = 1 << 28;

/// How much of the arithmetic is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// All arithmetic, bit by bit.
    Exact,
    /// Products in plain binary32, everything else as in [`Mode::Exact`].
    Fast,
    /// No floating point, and copies move no bytes: only synchronisation and addresses are simulated. Probes and
    /// assertions are left out, because they concern values.
    Skeleton,
}

/// A number of rules, as text.
fn rules(count: usize) -> String {
    format!("{count} rule{}", if count == 1 { "" } else { "s" })
}

/// Reasons why a kernel was not run to its end.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum SimError {
    #[error("kernel {kernel} breaks {}, the first: {}", rules(errors.len()), errors[0])]
    Verify { kernel: String, errors: VerifyErrors },
    #[error(transparent)]
    Launch(#[from] ArgError),
    #[error("a grid of {ctas} ctas, more than 2^24")]
    Grid { ctas: u64 },
    #[error("a buffer of {bytes} bytes at address {address:#x} belongs to another memory")]
    Buffer { address: u64, bytes: usize },
    #[error("{buffer}: {given} were given to begin with, not {expected}")]
    Initial { buffer: &'static str, given: usize, expected: usize },
    #[error("a cluster with more than {limit} warps, mbarriers and copying threads")]
    Agents { limit: u32 },
    #[error("no end after {limit} steps, the most that are simulated: smaller sizes take fewer")]
    Steps { limit: u64 },
}

/// Outcome of a run. The results are in the [`Memory`].
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The broken rules, each once for each place.
    pub findings: Vec<Finding>,
    /// Probes, in the order in which warps reached them.
    pub probes: Vec<Probe>,
    /// Counts of the run.
    pub counters: Counters,
    /// Trace of the first cluster, if [`Simulation::trace`] requested it.
    pub trace: Option<Trace>,
}

impl Outcome {
    /// Whether no rule was broken.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Setters, one for each field.
macro_rules! setters {
    ($($(#[$doc:meta])+ $field:ident: $ty:ty;)+) => {$(
        $(#[$doc])+
        #[must_use]
        pub fn $field(self, $field: $ty) -> Self {
            Self { $field, ..self }
        }
    )+};
}
pub(crate) use setters;

/// A launch of a kernel.
#[derive(Clone, Debug)]
pub struct Simulation<'k> {
    kernel: Loaded<'k>,
    grid: [u32; 3],
    args: Vec<ArgValue>,
    policy: Policy,
    mode: Mode,
    max_steps: u64,
    predecessor_writes: Vec<Buffer>,
    until: Vec<Rule>,
    trace: bool,
}

impl<'k> Simulation<'k> {
    /// A launch of one CTA without arguments, under [`Policy::Eager`], in [`Mode::Exact`].
    pub fn new(kernel: &'k Kernel) -> Simulation<'k> {
        Simulation::of(Loaded::new(kernel))
    }

    /// A launch of a kernel that is loaded already; otherwise like [`Simulation::new`].
    pub fn of(kernel: Loaded<'k>) -> Simulation<'k> {
        let (policy, mode) = (Policy::Eager, Mode::Exact);
        Simulation {
            kernel,
            grid: [1; 3],
            args: Vec::new(),
            policy,
            mode,
            max_steps: MOST_STEPS,
            predecessor_writes: Vec::new(),
            until: Vec::new(),
            trace: false,
        }
    }

    setters! {
        /// Sets the number of CTAs.
        grid: [u32; 3];
        /// Sets the arguments, one for each parameter.
        args: Vec<ArgValue>;
        /// Sets the schedule.
        policy: Policy;
        /// Sets how much of the arithmetic is simulated.
        mode: Mode;
        /// Limits the steps of all warps together; 2^28 by default.
        max_steps: u64;
        /// Declares the buffers that the previous grid writes. It may still run until `griddepcontrol.wait`
        /// ([`crate::Rule::G1`]).
        predecessor_writes: Vec<Buffer>;
        /// Ends the run where one of these rules is broken. Later violations are not found, and the results are
        /// incomplete.
        until: Vec<Rule>;
        /// Records what the first cluster does, for a [`crate::Timeline`].
        trace: bool;
    }

    /// Runs the kernel to its end, or until no warp can go on, or until a rule of [`Simulation::until`] is broken.
    ///
    /// # Errors
    /// If the kernel is not sound, if the launch or a buffer does not fit, or if it takes too many steps.
    pub fn run(&self, memory: &mut Memory) -> Result<Outcome, SimError> {
        let program = self.kernel.decoded()?;
        let kernel = self.kernel.kernel();
        check_args(&kernel.params, &self.args)?;
        check_grid(self.grid, kernel.launch.cluster)?;
        let ctas = self.grid.iter().map(|&ctas| u128::from(ctas)).product::<u128>();
        if ctas > 1 << 24 {
            return Err(SimError::Grid { ctas: u64::try_from(ctas).unwrap_or(u64::MAX) });
        }
        if let Some(other) = self.predecessor_writes.iter().find(|buffer| !memory.owns(**buffer)) {
            return Err(SimError::Buffer { address: other.address(), bytes: other.bytes() });
        }
        let setup = Setup {
            program,
            args: &self.args,
            grid: self.grid,
            mode: self.mode,
            schedule: Scheduler::new(self.policy),
            max_steps: self.max_steps,
            predecessor: &self.predecessor_writes,
            until: &self.until,
            trace: self.trace,
        };
        let mut machine = Machine::new(setup, memory);
        machine.run()?;
        let counters = machine.counters();
        let trace = machine.recorder.map(Recorder::finish);
        let Machine { findings, probes, .. } = machine;
        Ok(Outcome { findings: ordered(findings), probes, counters, trace })
    }
}
