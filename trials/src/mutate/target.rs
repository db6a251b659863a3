//! Runs a mutant until a rule notices it.

use std::collections::BTreeSet;
use std::fmt;

use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation, Rule, SimError};

use super::anatomy::Anatomy;
use super::edges::edges;
use super::{Mutant, Operator};
use crate::Trial;

/// Number of random schedules under which a mutant runs if no rule notices it earlier.
const SEEDS: u64 = 6;

/// Limit of a mutant's steps, as a multiple of the kernel's instructions. A longer run counts as endless.
const SLOWER: u64 = 8;

/// A kernel to mutate, and the problems to run it on.
pub struct Target {
    /// Name in the score table.
    pub name: String,
    problems: Vec<Problem>,
    /// Equivalent mutants of this kernel.
    equivalent: Vec<&'static Equivalent>,
    /// Rules that may kill an operator's mutants of this kernel, in addition to the operator's own rules.
    also: Vec<&'static (&'static str, &'static [Rule])>,
    /// The operators of [`ON_DEMAND`] that are tried, each with suffixes of the files whose lines it may break.
    tried: Vec<(&'static str, &'static [&'static str])>,
}

/// Prefixes of the names of operators that are tried only if a target asks for them.
const ON_DEMAND: [&str; 3] = ["bound", "number", "comparison"];

/// Suffix of every file.
const ANYWHERE: &[&str] = &[""];

/// Reason why mutants of the ping-pong barriers are equivalent.
pub(crate) const TURNS: &str = "a turn orders when warpgroups compute, not what is in memory";
/// Reason why mutants of the last ping-pong barrier are equivalent.
pub(crate) const LAST_TURN: &str = "the turn that is taken back at the end is the first warpgroup's";

/// Equivalent mutants that need an argument about the kernel as a whole: prefix of the operators' names, largest number
/// of mutants per operator, and the reason.
pub(crate) type Equivalent = (&'static str, usize, &'static str);

struct Problem {
    /// A program of one step.
    program: Program<Kernel>,
    /// Initial bytes of its arrays.
    initial: Vec<Vec<u8>>,
    /// Bytes of its arrays after the unmodified kernel, with fast arithmetic. Other tests check that they are right.
    results: Vec<Vec<u8>>,
    /// Limit of a mutant's steps, far above the kernel's number of steps.
    most_steps: u64,
}

/// Outcome of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// A rule of its operator, or the comparison of results, noticed it. The string is the id of the rule, or `result`.
    Killed(String),
    /// It is equivalent to the kernel, for this reason.
    Equivalent(&'static str),
    /// It equals the kernel: the operator changed nothing.
    Unbroken,
    /// Only rules that its operator does not name noticed it.
    Wrong(BTreeSet<String>),
    /// No rule noticed it.
    Survived,
    /// A rule noticed it although it should be equivalent.
    NotEquivalent(BTreeSet<String>),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |by: &BTreeSet<String>| by.iter().cloned().collect::<Vec<_>>().join(", ");
        match self {
            Fate::Killed(by) => write!(f, "killed by {by}"),
            Fate::Equivalent(reason) => write!(f, "equivalent: {reason}"),
            Fate::Unbroken => f.write_str("the kernel itself"),
            Fate::Wrong(by) => write!(f, "noticed only by {}", list(by)),
            Fate::Survived => write!(f, "not noticed"),
            Fate::NotEquivalent(by) => write!(f, "not equivalent, says {}", list(by)),
        }
    }
}

impl Target {
    /// A kernel of the ladder as a target.
    ///
    /// # Panics
    /// If the simulator rejects it.
    pub(crate) fn of_ladder(rung: &Trial) -> Target {
        let first = (rung.program.clone(), rung.before.clone());
        let programs = [first].into_iter().chain(edges(&rung.program.steps[0].kernel.name));
        Target::new(&rung.program.steps[0].kernel.name, programs, 0, &[]).with_bounds()
    }

    /// A trial's kernel on its problem.
    ///
    /// # Panics
    /// If the simulator rejects it.
    pub(crate) fn of_trial(name: &str, trial: &Trial, equivalent: &'static [Equivalent]) -> Target {
        Target::of_step(name, std::slice::from_ref(trial), 0, equivalent)
    }

    /// A target whose mutants replace the kernel of step `step` of each trial. The trials' other steps run unmodified.
    ///
    /// # Panics
    /// If there are no trials, the kernel differs between them, or the simulator rejects one.
    pub(crate) fn of_step(
        name: &str,
        trials: &[Trial],
        step: usize,
        equivalent: &'static [Equivalent],
    ) -> Target {
        let problems = trials.iter().map(|trial| (trial.program.clone(), trial.before.clone()));
        Target::new(name, problems, step, equivalent)
    }

    /// A target whose mutants replace the kernel of one step of these programs, which come with the bytes of their
    /// arrays. The preceding steps run once.
    ///
    /// # Panics
    /// If there are no programs, the kernel differs between them, or the simulator rejects one.
    pub(super) fn new(
        name: &str,
        programs: impl IntoIterator<Item = (Program<Kernel>, Vec<Vec<u8>>)>,
        step: usize,
        equivalent: &'static [Equivalent],
    ) -> Target {
        let problem = |(program, initial): (Program<Kernel>, Vec<Vec<u8>>)| {
            let (program, initial) = alone(program, initial, step);
            let simulated = ProgramSimulation::new(&program).mode(Mode::Fast).run(&initial);
            let simulated = simulated.expect("a sound kernel can be simulated");
            assert_eq!(simulated.findings().next(), None, "{name} is sound");
            let instructions: u64 = simulated.steps.iter().map(|step| step.counters.warp_instructions).sum();
            let most_steps = SLOWER * instructions;
            Problem { program, initial, results: simulated.buffers, most_steps }
        };
        let problems: Vec<Problem> = programs.into_iter().map(problem).collect();
        let first = problems.first().expect("a target is tested on some problem");
        let kernel = &first.program.steps[0].kernel;
        let is_it = |problem: &Problem| problem.program.steps[0].kernel == *kernel;
        assert!(problems.iter().all(is_it), "{name} is one kernel");
        let equivalent = equivalent.iter().collect();
        Target { name: name.to_owned(), problems, equivalent, also: Vec::new(), tried: Vec::new() }
    }

    /// Adds rules that may kill mutants of these operators.
    pub(crate) fn also_noticed(mut self, also: &'static [(&'static str, &'static [Rule])]) -> Target {
        self.also.extend(also);
        self
    }

    /// Adds equivalent mutants.
    pub(crate) fn also_equivalent(mut self, equivalent: &'static [Equivalent]) -> Target {
        self.equivalent.extend(equivalent);
        self
    }

    /// Also tries the operators on bounds and choices.
    pub(crate) fn with_bounds(self) -> Target {
        self.with("bound", ANYWHERE)
    }

    /// Also tries the operators of [`ON_DEMAND`] with this prefix, on lines of these files.
    pub(crate) fn with(mut self, operators: &'static str, files: &'static [&'static str]) -> Target {
        self.tried.push((operators, files));
        self
    }

    /// The rules that may kill an operator's mutants.
    fn rules(&self, operator: &Operator) -> Vec<Rule> {
        let also = self.also.iter().filter(|(name, _)| *name == operator.name);
        operator.rules.iter().chain(also.flat_map(|(_, rules)| *rules)).copied().collect()
    }

    /// Schedules and problems for a mutant: the extreme schedules on all problems, then random schedules on the
    /// problems in turn. If no rule may kill the mutant, one schedule is enough, because its result does not depend on
    /// the schedule. Any problem kills most mutants, so the problems with the fewest steps come first.
    fn runs(&self, rules: &[Rule]) -> Vec<(Policy, &Problem)> {
        let mut problems: Vec<&Problem> = self.problems.iter().collect();
        problems.sort_by_key(|problem| problem.most_steps);
        let on_all = |policy| problems.iter().map(move |&problem| (policy, problem));
        if rules.is_empty() {
            return on_all(Policy::Eager).collect();
        }
        let random = (0..SEEDS).map(Policy::Random).zip(self.problems.iter().cycle());
        on_all(Policy::Eager).chain(on_all(Policy::Lazy)).chain(random).collect()
    }

    /// An operator's mutants of this kernel.
    pub(super) fn mutants(&self, anatomy: &Anatomy<'_>, operator: &Operator) -> Vec<Mutant> {
        if !ON_DEMAND.iter().any(|name| operator.name.starts_with(name)) {
            return operator.mutants(anatomy);
        }
        let tried = self.tried.iter().filter(|(name, _)| operator.name.starts_with(name));
        let files: Vec<&str> = tried.flat_map(|(_, files)| *files).copied().collect();
        if files.is_empty() {
            return Vec::new();
        }
        let mut mutants = operator.mutants(anatomy);
        mutants.retain(|mutant| files.iter().any(|file| mutant.source.file().ends_with(file)));
        mutants
    }

    /// Reason why the next mutant of an operator may survive, if `count` mutants already have.
    pub(super) fn equivalent(&self, operator: &Operator, count: usize) -> Option<&'static str> {
        let mut all = self.equivalent.iter();
        let is_it = |(name, most, _): &&&Equivalent| operator.name.starts_with(name) && count < *most;
        all.find(is_it).map(|(.., reason)| *reason)
    }

    /// The kernel to mutate.
    pub fn kernel(&self) -> &Kernel {
        &self.problems[0].program.steps[0].kernel
    }
}

impl Problem {
    /// Runs the step with `kernel` instead of its own. Returns everything that notices the change: ids of rules,
    /// `result`, or an error. Stops as soon as a rule of `until` notices the change.
    fn notices(
        &self,
        kernel: &Loaded<'_>,
        policy: Policy,
        compare: bool,
        until: &[Rule],
    ) -> BTreeSet<String> {
        let program = self.program.map(|_| kernel.clone());
        let mode = if compare { Mode::Fast } else { Mode::Skeleton };
        let simulation = ProgramSimulation::of(program).policy(policy).mode(mode).until(until.to_vec());
        match simulation.max_steps(self.most_steps).run(&self.initial) {
            // A warp that runs forever counts as a deadlock.
            Err(SimError::Steps { .. }) => BTreeSet::from([Rule::Deadlock.id().to_owned()]),
            Err(error) => BTreeSet::from([error.to_string()]),
            Ok(simulated) => {
                let findings = simulated.findings();
                let mut noticed: BTreeSet<String> =
                    findings.map(|finding| finding.rule.id().to_owned()).collect();
                if compare && simulated.buffers != self.results {
                    noticed.insert("result".to_owned());
                }
                noticed
            }
        }
    }
}

/// One step of a program, and the bytes of its arrays before it.
fn alone(
    mut program: Program<Kernel>,
    mut initial: Vec<Vec<u8>>,
    step: usize,
) -> (Program<Kernel>, Vec<Vec<u8>>) {
    let after = program.steps.split_off(step + 1);
    let only = program.steps.split_off(step);
    if step > 0 {
        let simulated = ProgramSimulation::new(&program).mode(Mode::Fast).run(&initial);
        initial = simulated.expect("the steps before can be simulated").buffers;
    }
    // The step's inputs depend on earlier steps, and the buffers of later steps must stay unchanged.
    let others = program.steps.iter().chain(&after);
    let taken: Vec<BufferId> =
        others.flat_map(|step| &step.args).filter_map(|(_, arg)| arg.buffer()).collect();
    for (number, buffer) in program.buffers.iter_mut().enumerate() {
        let is_output = matches!(buffer.role, BufferRole::Output | BufferRole::OptionalOutput);
        let shared = is_output && taken.contains(&BufferId(number));
        if shared || step > 0 && buffer.role == BufferRole::Scratch {
            buffer.role = BufferRole::InOut;
        }
    }
    program.steps = only;
    (program, initial)
}

/// Tests a mutant of a kernel.
pub fn fate_of(target: &Target, operator: &Operator, mutant: &Mutant) -> Fate {
    let kernel = mutant.of(target.kernel());
    if kernel == *target.kernel() {
        return Fate::Unbroken;
    }
    let kernel = Loaded::new(&kernel);
    match mutant.equivalent {
        Some(reason) => watch(target, &kernel, reason),
        None => kill(target, operator, &kernel),
    }
}

fn kill(target: &Target, operator: &Operator, kernel: &Loaded<'_>) -> Fate {
    if let Err(errors) = kernel.verdict() {
        let broken: BTreeSet<String> = errors.iter().map(|error| error.fault.rule().to_owned()).collect();
        let by = operator.verifier.iter().find(|&&rule| broken.contains(rule));
        return by.map_or(Fate::Wrong(broken), |&by| Fate::Killed(by.to_owned()));
    }
    let mut others = BTreeSet::new();
    let rules = target.rules(operator);
    for (policy, problem) in target.runs(&rules) {
        let noticed = problem.notices(kernel, policy, operator.result, &rules);
        let by = rules.iter().map(|rule| rule.id()).find(|&rule| noticed.contains(rule));
        if let Some(by) = by.or((operator.result && noticed.contains("result")).then_some("result")) {
            return Fate::Killed(by.to_owned());
        }
        others.extend(noticed);
    }
    if others.is_empty() { Fate::Survived } else { Fate::Wrong(others) }
}

/// Runs a mutant that should be equivalent.
fn watch(target: &Target, kernel: &Loaded<'_>, reason: &'static str) -> Fate {
    for (policy, compare) in [(Policy::Eager, true), (Policy::Lazy, false)] {
        for problem in &target.problems {
            let noticed = problem.notices(kernel, policy, compare, &[]);
            if !noticed.is_empty() {
                return Fate::NotEquivalent(noticed);
            }
        }
    }
    Fate::Equivalent(reason)
}
