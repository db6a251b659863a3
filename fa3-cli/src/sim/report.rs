//! The report of `fa3 sim`.

use std::fmt;
use std::time::Duration;

use fa3_ir::{Kernel, Program, Step};
use fa3_sim::{Count, Counters, EngineTrack, Finding, Probe, ProgramOutcome, Site, Timeline};
use serde_json::{Value, json};

use crate::kernel::Wrong;

/// The most probes that are printed.
const PRINTED_PROBES: usize = 100;

/// The distinct faults in all runs of a program, and the counters and probes of the first run.
#[derive(Debug)]
pub(super) struct Report {
    title: String,
    /// The seed of the first run.
    seed: u64,
    /// The kernels, and the counters of their launches in the first run.
    counted: Vec<(String, Counters)>,
    probes: Vec<Probe>,
    faults: Vec<Seen>,
    runs: usize,
    /// The number of runs with a fault.
    broken: usize,
    /// The largest error of the right results, as a fraction of what is allowed. `None` if no run has results.
    error: Option<f64>,
    /// The tolerance of results, in words.
    allowed: &'static str,
    time: Duration,
}

/// A run and its outcome.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) seed: u64,
    pub(super) outcome: ProgramOutcome,
    /// The largest error of its results, as a fraction of what is allowed. `None` if there are no results to check.
    pub(super) verdict: Option<Result<f64, Wrong>>,
}

/// A fault of a run.
#[derive(Debug)]
enum Fault {
    /// A rule is broken.
    Rule(Box<Finding>),
    /// The counter with this name is not reset to 0 for the next launch.
    Ticket(&'static str),
    Result(Wrong),
}

/// A fault, as the first run with it reports it.
#[derive(Debug)]
struct Seen {
    fault: Fault,
    /// The command that repeats the first run with this fault.
    again: String,
    /// The seeds of the runs with this fault.
    seeds: Vec<u64>,
}

impl Report {
    /// The report on runs that took `time`. `allowed` says in words what error is allowed; `again` is the command that
    /// repeats the run with a seed.
    pub(super) fn new(
        program: &Program<Kernel>,
        runs: Vec<Run>,
        allowed: &'static str,
        time: Duration,
        again: impl Fn(u64) -> String,
    ) -> Report {
        let titles: Vec<String> = program.steps.iter().map(title).collect();
        let (first, seed) = (runs.first().into_iter(), runs.first().map_or(0, |run| run.seed));
        let counted = first.clone().flat_map(|run| run.outcome.steps.iter().zip(&program.steps));
        let counted = counted.map(|(step, Step { kernel, .. })| (kernel.name.clone(), step.counters.clone()));
        let counted = counted.collect();
        let probes = first.flat_map(|run| run.outcome.probes().cloned()).collect();
        let errors = runs.iter().filter_map(|run| run.verdict.as_ref()?.as_ref().ok());
        let error = errors.copied().reduce(f64::max);
        let (count, broken) = (runs.len(), runs.iter().filter(|run| !run.is_right()).count());
        let mut all: Vec<Seen> = Vec::new();
        for Run { seed, outcome, verdict } in runs {
            let rules = outcome.steps.into_iter().flat_map(|step| step.findings);
            let rules = rules.map(|finding| Fault::Rule(Box::new(finding)));
            let tickets = outcome.left_over.into_iter().map(Fault::Ticket);
            let wrong = verdict.and_then(Result::err).map(Fault::Result);
            for fault in rules.chain(tickets).chain(wrong) {
                match all.iter_mut().find(|seen| seen.fault.is(&fault)) {
                    Some(seen) if seen.seeds.last() == Some(&seed) => {}
                    Some(seen) => seen.seeds.push(seed),
                    None => all.push(Seen { fault, again: again(seed), seeds: vec![seed] }),
                }
            }
        }
        all.sort_by_key(|seen| match &seen.fault {
            Fault::Rule(finding) => finding.rule.order(),
            Fault::Ticket(_) | Fault::Result(_) => u32::MAX,
        });
        let (title, runs) = (titles.join("\n"), count);
        Report { title, seed, counted, probes, faults: all, runs, broken, error, allowed, time }
    }

    /// The report as JSON, with the timeline of the model. Counters are listed per launch of one run.
    pub(super) fn json(&self, timeline: Option<&Timeline>) -> Value {
        let Report { title: _, seed, counted, probes, faults, runs, broken, error, allowed: _, time } = self;
        let count = |count: Count| json!({ "count": count.count, "bytes": count.bytes });
        let step = |(kernel, counters): &(String, Counters)| {
            json!({
                "kernel": kernel, "seed": seed,
                "warp_instructions": counters.warp_instructions,
                "products": counters.products, "product_flops": counters.product_flops,
                "tma_loads": count(counters.loads), "tma_stores": count(counters.stores),
                "tma_reductions": count(counters.reductions),
                "barriers": counters.barriers, "mbarriers": counters.mbarriers,
            })
        };
        let fault = |Seen { fault, again, seeds }: &Seen| json!({ "what": fault.to_string(), "again": again, "seeds": seeds });
        let probe = |probe: &Probe| {
            let Site { cta, warp, iteration, .. } = &probe.site;
            json!({
                "name": probe.name, "cta": cta, "warp": warp, "iteration": iteration, "text": probe.to_string(),
            })
        };
        let engines = |timeline: &Timeline| -> Vec<Value> {
            let engine = |track: &EngineTrack| {
                let busy = timeline.utilisation(track.cta, track.engine);
                json!({ "cta": track.cta, "engine": track.engine.to_string(), "busy": busy })
            };
            timeline.engines.iter().map(engine).collect()
        };
        json!({
            "steps": counted.iter().map(step).collect::<Vec<_>>(),
            "probes": probes.iter().map(probe).collect::<Vec<_>>(),
            "faults": faults.iter().map(fault).collect::<Vec<_>>(),
            "runs": runs, "broken_runs": broken, "error_of_allowed": error, "seconds": time.as_secs_f64(),
            "model": timeline.map(|timeline| json!({
                "kernel": timeline.kernel, "cycles": timeline.length(), "engines": engines(timeline),
            })),
        })
    }

    /// Whether there is no fault.
    pub(super) fn is_clean(&self) -> bool {
        self.faults.is_empty()
    }
}

impl Run {
    fn is_right(&self) -> bool {
        self.outcome.is_clean() && !matches!(self.verdict, Some(Err(_)))
    }
}

fn title(Step { kernel, grid: [x, y, z], .. }: &Step<Kernel>) -> String {
    format!("{}, {x} x {y} x {z} ctas of {} threads", kernel.name, kernel.launch.threads)
}

impl Fault {
    /// Whether both are the same fault.
    fn is(&self, other: &Fault) -> bool {
        match (self, other) {
            (Fault::Rule(x), Fault::Rule(y)) => same(x, y),
            (Fault::Ticket(x), Fault::Ticket(y)) => x == y,
            (Fault::Result(_), Fault::Result(_)) => true,
            (Fault::Rule(_) | Fault::Ticket(_) | Fault::Result(_), _) => false,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Rule(finding) => write!(f, "{finding}"),
            Fault::Ticket(name) => writeln!(f, "TICKET: {name} is not 0 after the last launch"),
            Fault::Result(wrong) => writeln!(f, "RESULT: {wrong}"),
        }
    }
}

/// Whether two findings are the same fault: the same instructions break the same rule, or, if there are no
/// instructions, the descriptions are equal.
fn same(x: &Finding, y: &Finding) -> bool {
    let place = |site: &Option<Site>| site.as_ref().map(|site| (site.source, site.instruction));
    x.rule == y.rule
        && place(&x.here) == place(&y.here)
        && place(&x.other) == place(&y.other)
        && (x.here.is_some() || x.what == y.what)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { title, seed, counted, probes, faults, runs, broken, error, allowed, time } = self;
        writeln!(f, "{title}\n")?;
        for (kernel, counters) in counted {
            let of = if counted.len() == 1 { String::new() } else { format!(" of {kernel}") };
            writeln!(f, "Counted{of} with seed {seed}:\n{counters}")?;
        }
        probes.iter().take(PRINTED_PROBES).try_for_each(|probe| writeln!(f, "{probe}"))?;
        match probes.len().saturating_sub(PRINTED_PROBES) {
            0 if probes.is_empty() => {}
            0 => writeln!(f)?,
            more => writeln!(f, "... and {more} more\n")?,
        }
        for Seen { fault, again, seeds } in faults {
            writeln!(f, "{fault}  seen:    in {} of {runs} runs, first by {again}\n", seeds.len())?;
        }
        let seconds = time.as_secs_f64();
        write!(f, "{} in {seconds:.2} s, ", counted_runs(*runs))?;
        match faults.len() {
            0 => {
                let percent = error.map(|error| 100.0 * error);
                let results = percent.map_or_else(
                    || "results not computed".to_owned(),
                    |percent| format!("results right (off by at most {percent:.0} % of {allowed})"),
                );
                write!(f, "no rule broken, {results}")
            }
            count => write!(f, "findings: {count}, in {}", counted_runs(*broken)),
        }
    }
}

fn counted_runs(count: usize) -> String {
    format!("{count} run{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::panic::Location;

    use fa3_cuda::kernels::ladder::vector_add;
    use fa3_ir::Source;
    use fa3_ref::plain::{Expected, Mismatch};
    use fa3_sim::{Outcome, Policy, Replay, Rule};

    use super::*;

    fn finding(rule: Rule, what: &str, here: Option<Source>) -> Finding {
        let site = |source| Site {
            role: "all".to_owned(),
            cta: [0; 3],
            warp: 0,
            source,
            iteration: [0; 2],
            instruction: "store",
            access: None,
        };
        Finding {
            rule,
            what: what.to_owned(),
            here: here.map(site),
            other: None,
            missing: None,
            waits: Vec::new(),
            more: 0,
            cause: None,
            replay: Replay { kernel: "k".to_owned(), grid: [1; 3], policy: Policy::Random(0) },
        }
    }

    #[test]
    fn a_finding_counts_once_a_run() {
        let (here, there) = (Location::caller(), Location::caller());
        let race = |what, source| finding(Rule::Race, what, Some(source));
        let outcomes = [
            (7, vec![race("bytes 0 to 4", here)]),
            (8, vec![]),
            (9, vec![race("bytes 8 to 12", here), race("bytes 12 to 16", here), race("bytes 0 to 4", there)]),
            (10, vec![finding(Rule::I1, "x", None), finding(Rule::I1, "y", None)]),
        ];
        let outcomes = outcomes.map(|(seed, findings)| {
            let left_over = if seed > 8 { vec!["ticket"] } else { Vec::new() };
            let step = Outcome { findings, probes: Vec::new(), counters: Counters::default(), trace: None };
            let outcome = ProgramOutcome { buffers: Vec::new(), steps: vec![step], left_over };
            let mismatch = Mismatch { index: 3, given: 2.5, expected: Expected::exactly(2.0) };
            let verdict = (seed == 8).then_some(Err(Wrong::Element { array: "z", mismatch }));
            Run { seed, outcome, verdict }
        });
        let program = vector_add::program(1000).kernels();
        let report =
            Report::new(&program, outcomes.into(), "one rounding", Duration::from_millis(1234), |seed| {
                format!("run {seed}")
            });
        let what = |fault: &Fault| match fault {
            Fault::Rule(finding) => finding.what.clone(),
            Fault::Ticket(name) => (*name).to_owned(),
            Fault::Result(wrong) => wrong.to_string(),
        };
        let seen = report.faults.iter().map(|seen| (what(&seen.fault), &*seen.again, &*seen.seeds));
        let seen: Vec<(String, &str, &[u64])> = seen.collect();
        let expected: [(&str, &str, &[u64]); 6] = [
            ("bytes 0 to 4", "run 7", &[7, 9]),
            ("bytes 0 to 4", "run 9", &[9]),
            ("x", "run 10", &[10]),
            ("y", "run 10", &[10]),
            ("z: element 3 is 2.5, not 2 +- 0", "run 8", &[8]),
            ("ticket", "run 9", &[9, 10]),
        ];
        assert_eq!(seen, expected.map(|(what, again, seeds)| (what.to_owned(), again, seeds)));
        let text = report.to_string();
        let ticket =
            "\n\nTICKET: ticket is not 0 after the last launch\n  seen:    in 2 of 4 runs, first by run 9\n";
        assert!(text.contains(ticket), "{text}");
        assert!(text.ends_with("\n\n4 runs in 1.23 s, findings: 6, in 4 runs"), "{text}");
    }
}
