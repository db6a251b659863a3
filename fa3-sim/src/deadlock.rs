//! Deadlocks, in which no warp can go on. Reports what each warp waits for.

use std::fmt;

use fa3_ir::Source;

use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::warp::State;

/// Warps that wait for the same event, each in its own CTA.
struct Wait {
    /// The statement and the role of the warps.
    place: (Source, String),
    what: String,
    /// The last arrivals at the barrier that the first of these warps waits for.
    last: String,
    /// CTA numbers, each with its warp numbers.
    who: Vec<(u32, Vec<usize>)>,
}

impl Wait {
    fn add(&mut self, cta: u32, warp: usize) {
        match self.who.iter_mut().find(|(known, _)| *known == cta) {
            Some((_, warps)) => warps.push(warp),
            None => self.who.push((cta, vec![warp])),
        }
    }
}

/// For example `consumer.w0 to w3 of cta 0, and of 5 other ctas, at gemm.rs:12: waiting for ...`.
impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { place: (source, role), what, last, who } = self;
        let Some((cta, warps)) = who.first() else { return Ok(()) };
        write!(f, "{role}.{} of cta {cta}", span(warps))?;
        match who.len() - 1 {
            0 => {}
            1 => write!(f, ", and of cta {}", who[1].0)?,
            others => write!(f, ", and of {others} other ctas")?,
        }
        write!(f, ", at {}:{}: {what}{last}", source.file(), source.line())
    }
}

/// Writes `w0 to w3` for successive numbers, otherwise `w0 w2`.
fn span(warps: &[usize]) -> String {
    match warps {
        [first, .., last] if last - first == warps.len() - 1 => format!("w{first} to w{last}"),
        _ => warps.iter().map(|warp| format!("w{warp}")).collect::<Vec<_>>().join(" "),
    }
}

impl Machine<'_> {
    /// Reports that no warp can go on, with the one rule that explains it, if any, and with what all warps wait for.
    pub(crate) fn deadlock(&mut self) {
        let mut waits: Vec<Wait> = Vec::new();
        let (mut cause, mut first) = (Rule::Deadlock, None);
        for cluster in 0..self.clusters.len() {
            for cta in 0..self.clusters[cluster].ctas.len() {
                for warp in 0..self.clusters[cluster].ctas[cta].warps.len() {
                    let at = At { cluster, cta, warp };
                    let Some((rule, what, last)) = self.waits_for(at) else { continue };
                    if first.is_none() || (cause == Rule::Deadlock && rule != Rule::Deadlock) {
                        (cause, first) = (rule, Some(at));
                    }
                    let (place, number) = (self.place(at), self.cta(at).number);
                    match waits.iter_mut().find(|wait| wait.place == place && wait.what == what) {
                        Some(wait) => wait.add(number, warp),
                        None => waits.push(Wait { place, what, last, who: vec![(number, vec![warp])] }),
                    }
                }
            }
        }
        let what = if cause == Rule::M5 {
            "no warp can go on: a phase expects other bytes than its copies bring"
        } else if cause == Rule::R1 {
            "no warp can go on: the pool has too few registers"
        } else {
            "no warp can go on"
        };
        let Some(at) = first else { return self.find_nowhere(Rule::Deadlock, what.to_owned()) };
        let before = self.findings.len();
        self.find(cause, at, what);
        if self.findings.len() > before {
            self.explain(waits.iter().map(ToString::to_string).collect());
        }
    }

    /// Returns the rule that a warp's wait breaks, what the warp waits for, and the last arrivals there.
    fn waits_for(&mut self, at: At) -> Option<(Rule, String, String)> {
        let nobody = |what: String| Some((Rule::Deadlock, what, String::new()));
        match self.warp(at).state {
            State::Exited => None,
            State::Ready => nobody("polling".to_owned()),
            State::Barrier(id) => nobody(format!("waiting at {}", self.barrier_state(at, id))),
            State::Mbarrier { offset, parity } => {
                let (rule, text, last) = self.mbarrier_state(at, offset, parity);
                Some((rule, format!("waiting for {text}"), last))
            }
            State::Cluster => {
                let arrived = self.clusters[at.cluster].barrier.arrived;
                nobody(format!("waiting at the cluster's barrier, {arrived} warps have arrived"))
            }
            State::Registers(more) => {
                let pool = self.cta(at).pool;
                let what = format!("waiting for {} registers, the pool has {pool}", 32 * more);
                Some((Rule::R1, what, String::new()))
            }
        }
    }

    /// The role and the line of the statement that a warp is at.
    fn place(&mut self, at: At) -> (Source, String) {
        let warp = self.warp(at);
        let (code, pc) = (warp.code, warp.pc);
        let code = &self.program.codes[code];
        (code.steps[pc].source, code.role.to_owned())
    }

    fn barrier_state(&mut self, at: At, id: usize) -> String {
        let declared = self.program.kernel.barriers.iter().find(|barrier| barrier.id as usize == id);
        let name = declared.map(|barrier| format!("barrier {}", barrier.name));
        let name = name.unwrap_or_else(|| "the barrier of the cta".to_owned());
        let live = 32 * self.cta(at).live_warps();
        let cta = &*self.cta(at);
        let barrier = &cta.barriers[id];
        let needed = if id == 0 { live } else { barrier.threads };
        let misses =
            |warp: &usize| cta.warps[*warp].state != State::Exited && !barrier.arrived.contains(warp);
        let missing: Vec<String> =
            (0..cta.warps.len()).filter(misses).map(|warp| format!("w{warp}")).collect();
        let arrived = 32 * barrier.arrived.len();
        format!("{name}: {arrived} of {needed} threads have arrived, not {}", missing.join(" "))
    }

    fn mbarrier_state(&mut self, at: At, offset: u32, parity: u32) -> (Rule, String, String) {
        let region = self.region_at(offset);
        let copies = self.loads_for(at.cluster, at.cta, offset);
        let Some(mbarrier) = self.cta(at).mbarrier(offset) else {
            return (Rule::Deadlock, format!("{region}, which is no mbarrier"), String::new());
        };
        let (phase, missing, bytes) = (mbarrier.phase, mbarrier.pending, mbarrier.bytes);
        // All warps that could bring bytes have brought their bytes, so the expected number is wrong.
        let wrong = missing == 0 && bytes != 0 && copies == 0 && mbarrier.all_issued();
        let rule = if wrong { Rule::M5 } else { Rule::Deadlock };
        let (expected, last) = (mbarrier.expected, mbarrier.arrivals.clone());
        let site = |&event: &u32| self.site(event, None).map(|site| site.to_string());
        let last: Vec<String> = last.iter().filter_map(site).collect();
        let last = match &*last {
            [] => "; no thread has arrived".to_owned(),
            sites => format!("; last arrivals: {}", sites.join("; ")),
        };
        let text = format!(
            "{region} parity {parity}: phase {phase} misses {missing} of {expected} arrivals and {bytes} bytes"
        );
        (rule, text, last)
    }
}
