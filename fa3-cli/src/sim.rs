//! `fa3 sim`: runs a kernel on the CPU under schedules that provoke races.

pub(crate) mod buffers;
mod report;

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use fa3_cuda::kernels::fwd::buffers::BEGUN;
use fa3_ir::{Kernel, Program};
use fa3_sim::{Costs, Loaded, Mode, Policy, ProgramSimulation, SimError, Timeline};
use rayon::prelude::*;

use crate::args::json::JsonArgs;
use crate::console;
use crate::kernel::{KernelArgs, Reference};
use crate::progress;
use crate::threads;
use crate::write;
use buffers::BufferError;
use report::{Report, Run};

pub(crate) const ABOUT: &str = "\
Runs a kernel on the CPU and checks the rules of the machine: races between warps and between proxies, missing \
fences and waits, phases of mbarriers, uninitialised data, deadlocks. Prints violations and counters. If no rule is \
broken, the results are checked against f64 arithmetic: attention against the oracle, by the error law.

With --trace or --svg, a model estimates how many cycles the first cluster of the first run takes on an H100, and \
how busy the engines of its SM are; this is not a measurement. If there are several launches, the timeline shows the \
one with the most products, or the one that --step names.

If a kernel has probes, prints what they show in the first run.

Inputs are standard normal numbers. A seed determines a run's inputs and, with --policy random, its schedule.";

const EXAMPLES: &str = "\
Examples:
  fa3 sim vector_add
  fa3 sim forward --causal --seqlen 300 --heads 4 --heads-kv 2
  fa3 sim forward --causal --score 's+slope[h]*(k-q)' --table slope=0.5,0.25
  fa3 sim forward --causal --heads 8 --heads-kv 2 --cache-seqlens 300,40,5 --page-size 16 --split-keys --sms 4
  fa3 sim forward --causal --cache-seqlens 70,9 --page-size 8 --seqlen-new 2 --seqlen-q 2 --rotary-dim 64
  fa3 sim backward --causal --seqlen 150 --head-dim 64
  fa3 sim gemm --m 256 --n 256 --k 128 --ctas 1 --policy lazy
  fa3 sim gemm_cluster --seeds 20 --mode skeleton
  fa3 sim gemm --m 128 --n 256 --k 4096 --ctas 1 --mode skeleton --svg gemm.svg
  fa3 sim backward --seqlen 512 --head-dim 256 --mode skeleton --svg dq.svg --step bwd_dq

Exit code: 0, or 1 if a rule is broken or a result is wrong, or 2 if there was no run.";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, next_help_heading = "Runs")]
pub(crate) struct Options {
    #[command(subcommand)]
    kernel: KernelArgs,
    /// The order of warps, and when asynchronous operations complete
    #[arg(long, global = true, value_enum, default_value_t = Schedule::Random)]
    policy: Schedule,
    /// The seed of the first run
    #[arg(long, global = true, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Number of runs; each uses the next seed
    #[arg(long, global = true, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    seeds: u64,
    /// How exactly arithmetic is simulated
    #[arg(long, global = true, value_enum, default_value_t = Depth::Exact)]
    mode: Depth,
    /// Writes a timeline in the model's cycles, for chrome://tracing or Perfetto
    #[arg(long, global = true, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Draws a timeline in the model's cycles
    #[arg(long, global = true, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The kernel that --trace and --svg show, by its name, if there are several
    #[arg(long, global = true, value_name = "NAME")]
    step: Option<String>,
    /// Runs even if that takes more than an hour
    #[arg(long, global = true)]
    long: bool,
    #[command(flatten)]
    json: JsonArgs,
}

/// FLOP of attention per second that a core simulates bit by bit, to within a small factor on other machines.
pub(crate) const FLOP_PER_SECOND: f64 = 1e9;
/// Seconds of runs above which an estimate is printed before the runs.
const LONG: f64 = 30.0;
/// Seconds after which runs need `--long`.
const TOO_LONG: f64 = 3600.0;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Schedule {
    /// As early as possible; warps in order
    Eager,
    /// As late as the rules allow; warps in reverse order
    Lazy,
    /// At random, from the seed
    Random,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Depth {
    /// Exact, bit by bit
    Exact,
    /// Matrix products in plain binary32
    Fast,
    /// No arithmetic, only waits and addresses; there are no results to check
    Skeleton,
}

impl Depth {
    /// The simulator's mode, and the FLOP of attention per second that a core simulates in it, to within a small factor
    /// on other machines.
    fn of_the_simulator(self) -> (Mode, f64) {
        match self {
            Depth::Exact => (Mode::Exact, FLOP_PER_SECOND),
            Depth::Fast => (Mode::Fast, 2e9),
            Depth::Skeleton => (Mode::Skeleton, 3e9),
        }
    }
}

/// Why the simulation did not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NoRun {
    #[error(transparent)]
    Buffers(#[from] BufferError),
    #[error("--step {step} says what is drawn: it takes --svg or --trace")]
    NotDrawn { step: String },
    #[error(
        "--mode skeleton has no floating point, by which CTAs find their shares of keys; --mode fast has it"
    )]
    SplitKv,
    #[error(
        "this takes about {hours:.0} hours: shorter sequences, fewer heads, fewer --seeds or --mode skeleton take less, \
         and --long runs it"
    )]
    Long { hours: f64 },
    #[error("there is no step {step}: the kernels are {kernels}")]
    Step { step: String, kernels: String },
    #[error("seed {seed}: {source}")]
    Sim { seed: u64, source: SimError },
}

/// Runs the simulation and prints. False if a rule is broken or a result is wrong.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let program = check(options)?;
    let (trace, svg) = (options.trace.as_deref(), options.svg.as_deref());
    let json = options.json.file(trace.is_some() || svg.is_some())?;
    let [trace, svg, json] = write::open([trace, svg, json], &[])?;
    threads::start()?;
    let (report, timeline) = options.simulate(&program)?;
    let value = report.json(timeline.as_ref());
    options.json.print(&report, &value);
    let mut files = Vec::new();
    if let Some(timeline) = timeline {
        console::print(&format_args!("\n{timeline}"));
        files.extend(trace.map(|file| (file, timeline.to_chrome_trace().into_bytes())));
        files.extend(svg.map(|file| (file, timeline.to_svg().into_bytes())));
    }
    files.extend(json.map(|file| (file, write::json(&value))));
    write::write(files)?;
    Ok(report.is_clean())
}

/// The program, if the options are consistent.
pub(crate) fn check(options: &Options) -> Result<Program<Kernel>, Box<dyn Error>> {
    let program = options.kernel.program()?;
    options.check_step(&program)?;
    if matches!(options.mode, Depth::Skeleton) && program.find(BEGUN).is_some() {
        return Err(NoRun::SplitKv.into());
    }
    Ok(program)
}

impl Options {
    /// Checks that --step names a kernel of the program, and that a kernel is drawn.
    fn check_step(&self, program: &Program<Kernel>) -> Result<(), NoRun> {
        let Some(step) = self.step.clone() else { return Ok(()) };
        if self.trace.is_none() && self.svg.is_none() {
            return Err(NoRun::NotDrawn { step });
        }
        let kernels: Vec<&str> = program.steps.iter().map(|step| step.kernel.name.as_str()).collect();
        if kernels.contains(&step.as_str()) {
            return Ok(());
        }
        Err(NoRun::Step { step, kernels: kernels.join(", ") })
    }

    /// Runs all seeds. If files are written, the timeline shows one kernel of the first run: the one that --step names,
    /// or the one with the most products.
    fn simulate(&self, program: &Program<Kernel>) -> Result<(Report, Option<Timeline>), Box<dyn Error>> {
        let start = Instant::now();
        let reference = self.kernel.reference()?;
        let seconds = self.seconds(reference.flops(), rayon::current_num_threads());
        if seconds > TOO_LONG && !self.long {
            return Err(NoRun::Long { hours: (seconds / 3600.0).ceil() }.into());
        }
        if seconds > LONG {
            console::print_note(&format_args!(
                "this takes about {:.0} minutes: shorter sequences, fewer heads, fewer --seeds or --mode skeleton take less",
                (seconds / 60.0).ceil()
            ));
        }
        let progress = progress::late_bar(self.seeds).with_message(self.kernel.to_string());
        let seeds = (0..self.seeds).into_par_iter().map(|index| self.seed.wrapping_add(index));
        let loaded = program.map(Loaded::new);
        let runs = seeds.map(|seed| {
            let run = self.run(program, &loaded, &reference, seed);
            progress.inc(1);
            run
        });
        let runs: Result<Vec<Run>, NoRun> = runs.collect();
        progress.finish_and_clear();
        let runs = runs?;
        let steps = runs.first().into_iter().flat_map(|run| &run.outcome.steps);
        let traces = steps.filter_map(|step| Some((step.trace.as_ref()?, step.counters.product_flops)));
        let asked = traces.filter(|(trace, _)| self.step.as_ref().is_none_or(|step| *step == trace.kernel));
        let timeline = asked.max_by_key(|(_, flops)| *flops).map(|(trace, _)| {
            Timeline::new(trace, &Costs::HOPPER).name_factors(|factors| reference.name_factors(factors))
        });
        let allowed = reference.allowed();
        Ok((Report::new(program, runs, allowed, start.elapsed(), |seed| self.again(seed)), timeline))
    }

    /// Estimates the seconds of all runs of attention with `flops` FLOP. Each run uses one thread.
    fn seconds(&self, flops: f64, threads: usize) -> f64 {
        flops / self.mode.of_the_simulator().1 * self.seeds.div_ceil(threads.max(1) as u64) as f64
    }

    fn run(
        &self,
        program: &Program<Kernel>,
        loaded: &Program<Loaded<'_>>,
        reference: &Reference,
        seed: u64,
    ) -> Result<Run, NoRun> {
        let policy = match self.policy {
            Schedule::Eager => Policy::Eager,
            Schedule::Lazy => Policy::Lazy,
            Schedule::Random => Policy::Random(seed),
        };
        let (mode, _) = self.mode.of_the_simulator();
        let trace = seed == self.seed && (self.trace.is_some() || self.svg.is_some());
        let simulation = ProgramSimulation::of(loaded.clone()).policy(policy).mode(mode).trace(trace);
        let mut before = buffers::initial(program, seed)?;
        reference.place(program, &mut before, seed)?;
        if mode != Mode::Skeleton {
            reference.prepare(program, &mut before);
        }
        let mut outcome = simulation.run(&before).map_err(|source| NoRun::Sim { seed, source })?;
        // Only the first run's probes are shown.
        if seed != self.seed {
            outcome.steps.iter_mut().for_each(|step| step.probes.clear());
        }
        // Results are checked only if no rule is broken. They are dropped afterwards, since there may be thousands of
        // runs.
        let after = std::mem::take(&mut outcome.buffers);
        let has_results = outcome.is_clean() && mode != Mode::Skeleton;
        let verdict = has_results.then(|| reference.judge(program, &before, &after));
        Ok(Run { seed, outcome, verdict })
    }

    /// The command that repeats the run with this seed.
    fn again(&self, seed: u64) -> String {
        let (policy, mode) = (name(self.policy), name(self.mode));
        format!("fa3 sim {} --policy {policy} --seed {seed} --mode {mode}", self.kernel)
    }
}

/// The command-line name of a value.
fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use fa3_ir::lang::{Elem, F32, Launch};

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn options(words: &str) -> Options {
        Command::parse_from(format!("sim {words}").split_whitespace()).options
    }

    /// The kernel is correct, but its output buffer is too small for the last element.
    #[test]
    fn what_is_broken_is_reported_with_the_command_that_shows_it() {
        let options = options("vector_add --n 999 --seed 5 --seeds 3 --mode fast");
        let mut program = options.kernel.program().unwrap();
        program.buffers[2].shape = vec![998];
        let (report, timeline) = options.simulate(&program).unwrap();
        assert_eq!(timeline, None, "no option asks for one");
        assert!(!report.is_clean());
        let text = report.to_string();
        assert!(
            text.starts_with("vector_add, 4 x 1 x 1 ctas of 256 threads\n\nCounted with seed 5:\n"),
            "{text}"
        );
        let again =
            "in 3 of 3 runs, first by fa3 sim vector_add --n 999 --policy random --seed 5 --mode fast\n";
        for part in ["\nBOUNDS: ", "vector_add.rs:", again, "\n3 runs in ", " s, findings: 1, in 3 runs"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    /// Probes are printed for one run only, and not more of them than a reader can use.
    #[test]
    fn probes_of_the_first_run_are_printed() {
        let options = options("vector_add --n 40000 --seed 5 --seeds 2");
        let mut program = options.kernel.program().unwrap();
        let kernel = Kernel::build("probed", Launch::threads(256), |b| {
            let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
            let i = b.cta_x().mad(256, b.tid());
            b.probe("n", b.param_u32("n"));
            b.if_lanes(i.lt(40000), || {
                let [x, y, z] = [x, y, z].map(|array| i.mad_wide(4, array));
                b.store(z, b.load::<F32>(x) + b.load::<F32>(y));
            });
        });
        program.steps[0].kernel = kernel;
        let (report, _) = options.simulate(&program).unwrap();
        let text = report.to_string();
        assert_eq!(text.matches("\nn: ").count(), 100, "{text}");
        assert!(text.contains(" probe by probed.w") && text.contains("\n  40000\n"), "{text}");
        let warps = 40000_usize.div_ceil(256) * 8;
        assert!(text.contains(&format!("\n... and {} more\n\n2 runs in ", warps - 100)), "{text}");
        assert_eq!(report.json(None)["probes"].as_array().unwrap().len(), warps);
    }

    #[test]
    fn long_runs_are_told_from_short_ones() {
        let seconds = |words: &str| {
            let options = options(words);
            options.seconds(options.kernel.reference().unwrap().flops(), 2)
        };
        assert!(seconds("forward") < LONG && seconds("vector_add --n 1000000") == 0.0);
        let long = seconds("forward --seqlen 20k --mode skeleton");
        assert!((60.0..600.0).contains(&long), "{long}");
        assert!(seconds("forward --seqlen 20k --mode skeleton --seeds 5") == 3.0 * long);
        assert!(seconds("backward --seqlen 20k --mode skeleton") == 2.5 * long);
    }

    /// The kernel breaks no rule, but its results are wrong.
    #[test]
    fn wrong_results_are_reported() {
        let transpose = options("transpose --rows 64 --cols 64 --seeds 2");
        let copy = options("tile_copy --rows 64 --cols 64").kernel.program().unwrap();
        let (report, _) = transpose.simulate(&copy).unwrap();
        assert!(!report.is_clean());
        let text = report.to_string();
        for part in ["\nRESULT: y: element 1 is ", "in 2 of 2 runs, first by fa3 sim transpose --rows 64"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let unseen = options("transpose --rows 64 --cols 64 --mode skeleton");
        assert!(
            unseen.simulate(&copy).unwrap().0.to_string().ends_with("no rule broken, results not computed")
        );
    }

    /// The program has another mask than the reference, or rotates new rows in another way.
    #[test]
    fn wrong_results_over_a_cache_are_reported() {
        let base = "forward --head-dim 64 --cache-seqlens 30,9 --page-size 8 --seqlen-q 2 --sms 2";
        let said = |own: &str, other: &str| {
            let other = options(&format!("{base} {other}")).kernel.program().unwrap();
            let (report, _) = options(&format!("{base} {own}")).simulate(&other).unwrap();
            report.to_string()
        };
        let text = said("--split-keys", "--split-keys --causal");
        assert!(text.contains("\nRESULT: o is "), "{text}");
        let new = "--causal --seqlen-new 2 --rotary-dim 64";
        let text = said(new, new);
        assert!(text.contains("no rule broken, results right"), "{text}");
        let text = said(new, &format!("{new} --rotary-interleaved"));
        assert!(text.contains("\nRESULT: k: element "), "{text}");
    }
}
