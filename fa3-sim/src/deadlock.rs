//! Nobody can go on: who waits for whom.

use crate::machine::{At, Machine};
use crate::rule::Rule;
use crate::warp::State;

impl Machine<'_> {
    /// Reports that nobody can go on. Where a single rule explains it, that rule; and what everybody waits for.
    pub(crate) fn deadlock(&mut self) {
        let mut waits = Vec::new();
        let (mut cause, mut first) = (Rule::Deadlock, None);
        for cluster in 0..self.clusters.len() {
            for cta in 0..self.clusters[cluster].ctas.len() {
                for warp in 0..self.clusters[cluster].ctas[cta].warps.len() {
                    let at = At { cluster, cta, warp };
                    let Some((rule, line)) = self.waits_for(at) else { continue };
                    if first.is_none() || (cause == Rule::Deadlock && rule != Rule::Deadlock) {
                        (cause, first) = (rule, Some(at));
                    }
                    waits.push(line);
                }
            }
        }
        let what = if cause == Rule::M5 {
            "nobody can go on: a phase expects other bytes than its copies bring"
        } else if cause == Rule::R1 {
            "nobody can go on: the pool has too few registers"
        } else {
            "nobody can go on"
        };
        waits.truncate(64);
        let Some(at) = first else { return self.find_nowhere(Rule::Deadlock, what.to_owned()) };
        let before = self.findings.len();
        self.find(cause, at, what.to_owned());
        if self.findings.len() > before {
            self.explain(waits);
        }
    }

    /// What a warp waits for, and the rule that this breaks.
    fn waits_for(&mut self, at: At) -> Option<(Rule, String)> {
        let state = self.warp(at).state;
        let who = self.who(at);
        let line = match state {
            State::Exited => return None,
            State::Ready => (Rule::Deadlock, format!("{who} polls")),
            State::Barrier(id) => (Rule::Deadlock, format!("{who} waits at {}", self.barrier_state(at, id))),
            State::Mbarrier { offset, parity } => {
                let (rule, text) = self.mbarrier_state(at, offset, parity);
                (rule, format!("{who} waits for {text}"))
            }
            State::Cluster => {
                let barrier = &self.clusters[at.cluster].barrier;
                (
                    Rule::Deadlock,
                    format!("{who} waits at the cluster's barrier, {} warps have arrived", barrier.arrived),
                )
            }
            State::Registers(more) => {
                let pool = self.cta(at).pool;
                (Rule::R1, format!("{who} waits for {} registers, the pool has {pool}", 32 * more))
            }
        };
        Some(line)
    }

    fn who(&mut self, at: At) -> String {
        let warp = self.warp(at);
        let (code, pc) = (warp.code, warp.pc);
        let code = &self.program.codes[code];
        let (source, number) = (code.steps[pc].source, self.cta(at).number);
        let file = source.file().rsplit(['/', '\\']).next().unwrap_or_default();
        format!("cta {number} {}.w{} ({file}:{})", code.role, at.warp, source.line())
    }

    fn barrier_state(&mut self, at: At, id: usize) -> String {
        let declared = self.program.kernel.barriers.iter().find(|barrier| barrier.id as usize == id);
        let name = declared.map_or_else(
            || "the barrier of the cta".to_owned(),
            |barrier| format!("barrier {}", barrier.name),
        );
        let live = 32 * self.cta(at).live_warps();
        let cta = &*self.cta(at);
        let barrier = &cta.barriers[id];
        let needed = if id == 0 { live } else { barrier.threads };
        let missing: Vec<String> = cta
            .warps
            .iter()
            .enumerate()
            .filter(|(warp, of)| of.state != State::Exited && !barrier.arrived.contains(warp))
            .map(|(warp, _)| format!("w{warp}"))
            .collect();
        let arrived = 32 * barrier.arrived.len();
        format!("{name}: {arrived} of {needed} threads have arrived, not {}", missing.join(" "))
    }

    fn mbarrier_state(&mut self, at: At, offset: u32, parity: u32) -> (Rule, String) {
        let region = self.region_at(offset);
        let copies = self.loads_for(at.cluster, at.cta, offset);
        let Some(mbarrier) = self.cta(at).mbarrier(offset) else {
            return (Rule::Deadlock, format!("{region}, which is no mbarrier"));
        };
        let (phase, missing, bytes) = (mbarrier.phase, mbarrier.pending, mbarrier.bytes);
        // Who else could bring bytes has brought its own: it is what was expected that is wrong.
        let wrong = missing == 0 && bytes != 0 && copies == 0 && mbarrier.all_issued();
        let rule = if wrong { Rule::M5 } else { Rule::Deadlock };
        let (expected, last) = (mbarrier.expected, mbarrier.arrivals.clone());
        let last: Vec<String> =
            last.iter().filter_map(|&event| self.site(event, None)).map(|site| site.to_string()).collect();
        let last = if last.is_empty() {
            "nobody has arrived".to_owned()
        } else {
            format!("last arrivals: {}", last.join("; "))
        };
        let text = format!(
            "{region} parity {parity}: phase {phase} misses {missing} of {expected} arrivals and {bytes} bytes; {last}"
        );
        (rule, text)
    }
}
