//! What `fa3 sim` prints.

use std::fmt;
use std::time::Duration;

use fa3_cuda::kernels::Job;
use fa3_sim::{Counters, Finding, Outcome, Site};

/// What some runs of a job found, each finding once, and what the first of them counted.
#[derive(Debug)]
pub(super) struct Report {
    title: String,
    counted: Option<(u64, Counters)>,
    findings: Vec<Seen>,
    runs: usize,
    /// Runs that found something.
    broken: usize,
    time: Duration,
}

/// A finding, as the first run that has it reports it.
#[derive(Debug)]
struct Seen {
    finding: Finding,
    /// The command of that run.
    again: String,
    /// The seeds of the runs that have it.
    seeds: Vec<u64>,
}

impl Report {
    /// Of what runs with these seeds gave in some `time`; `again` is the command that repeats one of them.
    pub(super) fn new(
        job: &Job,
        outcomes: Vec<(u64, Outcome)>,
        time: Duration,
        again: impl Fn(u64) -> String,
    ) -> Report {
        let ([x, y, z], kernel) = (job.grid, &job.kernel);
        let title = format!("{}, {x} x {y} x {z} ctas of {} threads", kernel.name, kernel.launch.threads);
        let counted = outcomes.first().map(|(seed, outcome)| (*seed, outcome.counters.clone()));
        let (runs, broken) =
            (outcomes.len(), outcomes.iter().filter(|(_, outcome)| !outcome.is_clean()).count());
        let mut findings: Vec<Seen> = Vec::new();
        for (seed, outcome) in outcomes {
            for finding in outcome.findings {
                match findings.iter_mut().find(|seen| same(&seen.finding, &finding)) {
                    Some(seen) if seen.seeds.last() == Some(&seed) => {}
                    Some(seen) => seen.seeds.push(seed),
                    None => findings.push(Seen { finding, again: again(seed), seeds: vec![seed] }),
                }
            }
        }
        Report { title, counted, findings, runs, broken, time }
    }

    /// Whether nothing was found.
    pub(super) fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}

/// Whether two findings are one: the same instructions break the same rule, or, if none does, the same happens.
fn same(x: &Finding, y: &Finding) -> bool {
    let place = |site: &Option<Site>| site.as_ref().map(|site| (site.source, site.instruction));
    x.rule == y.rule
        && place(&x.here) == place(&y.here)
        && place(&x.other) == place(&y.other)
        && (x.here.is_some() || x.what == y.what)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { title, counted, findings, runs, broken, time } = self;
        writeln!(f, "{title}\n")?;
        if let Some((seed, counters)) = counted {
            writeln!(f, "Counted with seed {seed}:\n{counters}")?;
        }
        for Seen { finding, again, seeds } in findings {
            writeln!(f, "{finding}  seen:    in {} of {runs} runs, first by {again}\n", seeds.len())?;
        }
        let seconds = time.as_secs_f64();
        write!(f, "{} in {seconds:.2} s, ", counted_runs(*runs))?;
        match findings.len() {
            0 => write!(f, "no rule broken"),
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

    use fa3_cuda::kernels::catalogue;
    use fa3_ir::Source;
    use fa3_sim::{Policy, Replay, Rule};

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
        let outcomes = outcomes
            .map(|(seed, findings)| (seed, Outcome { findings, counters: Counters::default(), trace: None }));
        let job = catalogue::find("vector_add").unwrap().job(&[]).unwrap();
        let report =
            Report::new(&job, outcomes.into(), Duration::from_millis(1234), |seed| format!("run {seed}"));
        let seen: Vec<(&str, &str, &[u64])> =
            report.findings.iter().map(|seen| (&*seen.finding.what, &*seen.again, &*seen.seeds)).collect();
        let expected: [(&str, &str, &[u64]); 4] = [
            ("bytes 0 to 4", "run 7", &[7, 9]),
            ("bytes 0 to 4", "run 9", &[9]),
            ("x", "run 10", &[10]),
            ("y", "run 10", &[10]),
        ];
        assert_eq!(seen, expected);
        assert!(report.to_string().ends_with("\n\n4 runs in 1.23 s, findings: 4, in 3 runs"), "{report}");
    }
}
