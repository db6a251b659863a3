//! Runs mutants until something notices them.

use std::collections::BTreeSet;
use std::fmt;

use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation, Rule, SimError};

use super::edges::edges;
use super::{Mutant, Operator};
use crate::Trial;

/// Random schedules that a mutant runs under, if nothing notices it before.
const SEEDS: u64 = 6;

/// Steps that a mutant may take for each of the kernel's instructions: more are taken for an endless run.
const SLOWER: u64 = 8;

/// A kernel whose mutants are tested, and the problems that it is run on.
pub struct Target {
    /// Name in the table.
    pub name: String,
    problems: Vec<Problem>,
    /// Mutants that nothing can notice.
    equivalent: Vec<&'static Equivalent>,
    /// Rules, beside an operator's own, that may notice its mutants of this kernel.
    also: Vec<&'static (&'static str, &'static [Rule])>,
    /// The operators of [`ON_DEMAND`] that are tried, each with ends of the names of files whose lines they may break.
    tried: Vec<(&'static str, &'static [&'static str])>,
}

/// Beginnings of the names of operators that are tried only if a target asks for them.
const ON_DEMAND: [&str; 3] = ["bound", "number", "comparison"];

/// All files.
const ANYWHERE: &[&str] = &[""];

/// Reason why mutants of the barriers by which warpgroups take turns do what the kernel does.
pub(crate) const TURNS: &str = "a turn orders when warpgroups compute, not what is in memory";
/// Reason why mutants of the last of these barriers do so.
pub(crate) const LAST_TURN: &str = "the turn that is taken back at the end is the first warpgroup's";

/// Mutants that do what the kernel does, which needs an argument about this kernel as a whole: the beginning of their
/// operators' names, how many there are of each operator at most, and the reason.
pub(crate) type Equivalent = (&'static str, usize, &'static str);

struct Problem {
    /// A program of one step.
    program: Program<Kernel>,
    /// The bytes of its arrays before.
    initial: Vec<Vec<u8>>,
    /// The bytes of its arrays after the kernel, with fast arithmetic. That they are right is not to be shown here.
    results: Vec<Vec<u8>>,
    /// Steps that a mutant may take: many more than the kernel.
    most_steps: u64,
}

/// Fate of a mutant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Something that its operator names noticed it: the id of a rule, or `result`.
    Killed(String),
    /// It does what the kernel does, for this reason.
    Equivalent(&'static str),
    /// It is the kernel itself: the operator broke nothing.
    Unbroken,
    /// Only something else noticed it.
    Wrong(BTreeSet<String>),
    /// Nothing noticed it.
    Survived,
    /// It should do what the kernel does, and something noticed it.
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
    /// A kernel of the ladder.
    ///
    /// # Panics
    /// If the simulator does not take it.
    pub(crate) fn of_ladder(rung: &Trial) -> Target {
        let first = (rung.program.clone(), rung.before.clone());
        let programs = [first].into_iter().chain(edges(&rung.program.steps[0].kernel.name));
        Target::new(&rung.program.steps[0].kernel.name, programs, 0, &[]).with_bounds()
    }

    /// A trial's kernel on its problem.
    ///
    /// # Panics
    /// If the simulator does not take it.
    pub(crate) fn of_trial(name: &str, trial: &Trial, equivalent: &'static [Equivalent]) -> Target {
        Target::of_step(name, std::slice::from_ref(trial), 0, equivalent)
    }

    /// The kernel of one step of these trials on their problems; the other steps run as they are.
    ///
    /// # Panics
    /// If there are none, it is not the same kernel in all of them, or the simulator does not take one.
    pub(crate) fn of_step(
        name: &str,
        trials: &[Trial],
        step: usize,
        equivalent: &'static [Equivalent],
    ) -> Target {
        let problems = trials.iter().map(|trial| (trial.program.clone(), trial.before.clone()));
        Target::new(name, problems, step, equivalent)
    }

    /// The kernel of one step of these programs, on all of them, which have the bytes of their arrays with them. The
    /// steps before it run once.
    ///
    /// # Panics
    /// If there are none, it is not the same kernel in all of them, or the simulator does not take one.
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

    /// Adds rules that may notice mutants of these operators as well.
    pub(crate) fn also_noticed(mut self, also: &'static [(&'static str, &'static [Rule])]) -> Target {
        self.also.extend(also);
        self
    }

    /// Adds mutants that nothing can notice.
    pub(crate) fn also_equivalent(mut self, equivalent: &'static [Equivalent]) -> Target {
        self.equivalent.extend(equivalent);
        self
    }

    /// Lets bounds and choices be broken, too.
    pub(crate) fn with_bounds(self) -> Target {
        self.with("bound", ANYWHERE)
    }

    /// Lets operators whose names begin so, of [`ON_DEMAND`], break lines of these files.
    pub(crate) fn with(mut self, operators: &'static str, files: &'static [&'static str]) -> Target {
        self.tried.push((operators, files));
        self
    }

    /// The rules that may notice an operator's mutants.
    fn rules(&self, operator: &Operator) -> Vec<Rule> {
        let also = self.also.iter().filter(|(name, _)| *name == operator.name);
        operator.rules.iter().chain(also.flat_map(|(_, rules)| *rules)).copied().collect()
    }

    /// Under which schedules a mutant runs on which problems: the extreme ones on all, random ones in turns. A result
    /// is the same under all schedules, or a rule is broken: where no rule is to be, one schedule does. What takes the
    /// fewest steps is first, since most mutants are killed by any of them.
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

    /// An operator's mutants of its kernel.
    pub fn mutants(&self, operator: &Operator) -> Vec<Mutant> {
        if !ON_DEMAND.iter().any(|name| operator.name.starts_with(name)) {
            return operator.mutants(self.kernel());
        }
        let tried = self.tried.iter().filter(|(name, _)| operator.name.starts_with(name));
        let files: Vec<&str> = tried.flat_map(|(_, files)| *files).copied().collect();
        if files.is_empty() {
            return Vec::new();
        }
        let mut mutants = operator.mutants(self.kernel());
        mutants.retain(|mutant| files.iter().any(|file| mutant.source.file().ends_with(file)));
        mutants
    }

    /// Why a mutant of an operator may survive, if `count` others have.
    pub(super) fn equivalent(&self, operator: &Operator, count: usize) -> Option<&'static str> {
        let mut all = self.equivalent.iter();
        let is_it = |(name, most, _): &&&Equivalent| operator.name.starts_with(name) && count < *most;
        all.find(is_it).map(|(.., reason)| *reason)
    }

    /// Its kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.problems[0].program.steps[0].kernel
    }
}

impl Problem {
    /// Runs the step with `kernel` in place of its own and lists all that notices the change: ids of rules, `result`,
    /// or an error; nothing else once one of the rules `until` has.
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
            // A warp goes on for ever.
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

/// One step of a program, and the bytes of the arrays before it.
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
    // What the steps before have left there matters, and what others write the step may leave.
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

/// Runs a mutant that should do what the kernel does.
fn watch(target: &Target, kernel: &Loaded<'_>, reason: &'static str) -> Fate {
    for (policy, compare) in [(Policy::Eager, true), (Policy::Lazy, false), (Policy::Random(0), false)] {
        for problem in &target.problems {
            let noticed = problem.notices(kernel, policy, compare, &[]);
            if !noticed.is_empty() {
                return Fate::NotEquivalent(noticed);
            }
        }
    }
    Fate::Equivalent(reason)
}
