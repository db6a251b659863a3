//! Replays the records of all warps in the order of time.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use fa3_ir::WgmmaType;

use super::engine::{Sm, SpanInfo};
use super::walker::{Walker, tracks};
use super::{Activity, Cause, EngineTrack, Timeline};
use crate::Costs;
use crate::trace::{Action, Gate, Pipe, Trace};

/// The object of a wait: a gate, or a product of a warpgroup by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Key {
    Gate(Gate),
    Product { cta: u32, warpgroup: u32, number: u32 },
}

/// The state of a gate.
#[derive(Default)]
struct Progress {
    /// Number of signals for the gate that are still to come in the trace.
    missing: u64,
    /// The cycle at which waiting warps can go on, according to the signals so far.
    open: u64,
    /// The waiting warps, each with the cause of its wait.
    waiting: Vec<(usize, Cause)>,
}

pub(super) struct Replay<'a> {
    trace: &'a Trace,
    costs: &'a Costs,
    sms: Vec<Sm>,
    walkers: Vec<Walker<'a>>,
    gates: HashMap<Key, Progress>,
    /// Warps that can go on: the cycle at which they can, the cycle of their last instruction, and their index. Of two
    /// warps that can go on at the same time, the warp whose last instruction is older goes first.
    queue: BinaryHeap<Reverse<(u64, u64, usize)>>,
}

impl<'a> Replay<'a> {
    pub(super) fn new(trace: &'a Trace, costs: &'a Costs) -> Replay<'a> {
        let sms = trace.warps.iter().map(|warp| warp.cta as usize + 1).max().unwrap_or(0);
        let walkers: Vec<Walker<'_>> = trace.warps.iter().map(Walker::new).collect();
        let queue = (0..walkers.len()).map(|index| Reverse((0, 0, index))).collect();
        Replay { trace, costs, sms: vec![Sm::default(); sms], gates: gates(&walkers), walkers, queue }
    }

    pub(super) fn run(mut self) -> Timeline {
        while let Some(Reverse((now, _, index))) = self.queue.pop() {
            if let Some(then) = self.step(index, now) {
                self.queue.push(Reverse((then, self.walkers[index].last, index)));
            }
        }
        self.finish()
    }

    /// Executes a warp's next instruction, if the units that it needs are free. Returns the cycle at which the warp can
    /// go on, unless it is done or waits for other warps.
    fn step(&mut self, index: usize, now: u64) -> Option<u64> {
        let walker = &mut self.walkers[index];
        let trace = walker.trace;
        let action = &trace.records.get(walker.next)?.action;
        if *action == Action::Use {
            walker.next += 1;
            let results = walker.results;
            return Some(self.sleep(index, now, results, Cause::Results));
        }
        let sm = &mut self.sms[trace.cta as usize];
        let needed = if let Action::Issue { pipe, .. } = action {
            sm.pipe_free(trace.warp, *pipe)
        } else if matches!(action, Action::Shared { .. }) {
            sm.shared_free()
        } else {
            0
        };
        let free = sm.issue_free(trace.warp).max(needed);
        if free > now {
            return Some(free);
        }
        let what = walker.what(walker.next, activity(action));
        sm.issue(trace.warp, now, what);
        walker.tell(what, now + 1);
        walker.last = now;
        walker.done += 1;
        if !matches!(action, Action::Issue { count, .. } if walker.done < *count) {
            (walker.next, walker.done) = (walker.next + 1, 0);
        }
        self.execute(index, action, now, what)
    }

    /// Executes the instruction that is issued now. Returns what [`Replay::step`] returns.
    fn execute(&mut self, index: usize, action: &Action, now: u64, what: SpanInfo) -> Option<u64> {
        let (costs, next) = (self.costs, now + 1);
        let walker = &mut self.walkers[index];
        let sm = &mut self.sms[walker.trace.cta as usize];
        match action {
            Action::Issue { pipe, .. } => sm.execute(walker.trace.warp, *pipe, now, costs, what),
            Action::Shared { wavefronts, loads } => {
                let done = sm.access_shared(now, *wavefronts, what);
                if *loads {
                    walker.results = walker.results.max(done + costs.shared_latency);
                }
            }
            Action::Global { bytes, loads: true } => {
                let done = sm.load(now, *bytes, costs.global_latency, costs, what);
                walker.results = walker.results.max(done);
            }
            Action::Global { bytes, loads: false } => _ = sm.store(now, *bytes, costs, what),
            Action::Product { ty, n, a_in_registers } => {
                let key = product(walker, walker.products);
                walker.products += 1;
                self.begin_product(key, next, product_cycles(costs, *ty, *n, *a_in_registers), what);
            }
            Action::Commit => walker.groups.push(walker.products),
            Action::Wait { pending } => {
                let groups = walker.groups.len().saturating_sub(*pending as usize);
                let products = groups.checked_sub(1).map_or(0, |last| walker.groups[last]);
                if let Some(last) = products.checked_sub(1) {
                    let key = product(walker, last);
                    return self.wait(index, key, next, Cause::Products);
                }
            }
            Action::Load { bytes, signals } => {
                let done = sm.load(now, *bytes, costs.load_latency, costs, what);
                signals.iter().for_each(|&gate| self.signal(gate, 1, done));
            }
            Action::Store { bytes } => {
                let read = sm.store(now, *bytes, costs, what);
                walker.stores.begin(read, read + costs.store_latency);
            }
            Action::StoreCommit => walker.stores.commit(),
            Action::StoreWait { pending, read } => {
                let [until_read, complete] = walker.stores.wait(*pending);
                let until = if *read { until_read } else { complete };
                return Some(self.sleep(index, next, until, Cause::Copies));
            }
            Action::CopyAsync { bytes } => {
                let done = sm.load(now, *bytes, costs.global_latency, costs, what);
                walker.copies.begin(done, done);
            }
            Action::CopyAsyncCommit => walker.copies.commit(),
            Action::CopyAsyncWait { pending } => {
                let [_, complete] = walker.copies.wait(*pending);
                return Some(self.sleep(index, next, complete, Cause::Copies));
            }
            Action::CopyAsyncSignal { gate, count } => {
                let done = walker.copies.complete().max(next);
                self.signal(*gate, *count, done);
            }
            Action::Signal { gate, count } => self.signal(*gate, *count, next),
            Action::Await(gate) => {
                let cause = match gate {
                    Gate::Mbarrier { .. } => Cause::Mbarrier,
                    Gate::Barrier { .. } | Gate::Cluster { .. } => Cause::Barrier,
                };
                return self.wait(index, Key::Gate(*gate), next, cause);
            }
            Action::Use => {}
        }
        Some(next)
    }

    /// Lets a warp go on at `until`.
    fn sleep(&mut self, index: usize, now: u64, until: u64, cause: Cause) -> u64 {
        if until > now {
            self.walkers[index].waited(cause, until);
        }
        until.max(now)
    }

    /// Lets a warp go on when a gate is open.
    fn wait(&mut self, index: usize, key: Key, now: u64, cause: Cause) -> Option<u64> {
        let gate = self.gates.entry(key).or_default();
        if gate.missing > 0 {
            gate.waiting.push((index, cause));
            return None;
        }
        let open = gate.open;
        Some(self.sleep(index, now, open, cause))
    }

    fn signal(&mut self, gate: Gate, count: u32, at: u64) {
        let (key, latency) = (Key::Gate(gate), self.costs.gate_latency);
        let progress = self.gates.entry(key).or_default();
        progress.missing = progress.missing.saturating_sub(count.into());
        progress.open = progress.open.max(at + latency);
        self.open(key);
    }

    /// Notes that a warp has reached a product, which begins when all warps of its warpgroup have reached it.
    fn begin_product(&mut self, key: Key, at: u64, cycles: u64, what: SpanInfo) {
        let Key::Product { cta, .. } = key else { return };
        let progress = self.gates.entry(key).or_default();
        progress.missing = progress.missing.saturating_sub(1);
        if progress.missing == 0 {
            let end = self.sms[cta as usize].tensor_core.serve(at, cycles, what);
            progress.open = end + self.costs.product_latency;
            self.open(key);
        }
    }

    /// Wakes the warps that wait for a gate, if it is complete.
    fn open(&mut self, key: Key) {
        let Some(gate) = self.gates.get_mut(&key) else { return };
        if gate.missing > 0 {
            return;
        }
        let open = gate.open;
        for (index, cause) in std::mem::take(&mut gate.waiting) {
            let now = self.walkers[index].end();
            let then = self.sleep(index, now, open, cause);
            self.queue.push(Reverse((then, self.walkers[index].last, index)));
        }
    }

    /// Makes the timeline when no warp can go on. Warps that still wait do so until the end.
    fn finish(mut self) -> Timeline {
        let engines: Vec<EngineTrack> =
            self.sms.into_iter().enumerate().flat_map(|(cta, sm)| sm.tracks(cta as u32)).collect();
        let ends = engines.iter().filter_map(|track| track.spans.last().map(|span| span.end));
        let end = self.walkers.iter().map(Walker::end).chain(ends).max().unwrap_or(0);
        for (index, cause) in self.gates.into_values().flat_map(|gate| gate.waiting) {
            self.walkers[index].waited(cause, end);
        }
        Timeline {
            kernel: self.trace.kernel.clone(),
            cycles: 0..end,
            roles: tracks(self.walkers),
            engines,
            products: self.trace.products.clone(),
        }
    }
}

/// The product of a walker's warpgroup with a number.
fn product(walker: &Walker<'_>, number: u32) -> Key {
    Key::Product { cta: walker.trace.cta, warpgroup: walker.warpgroup(), number }
}

/// All gates, with the number of signals that the trace has for each.
fn gates(walkers: &[Walker<'_>]) -> HashMap<Key, Progress> {
    let mut gates: HashMap<Key, Progress> = HashMap::new();
    let mut expect = |key, count: u32| gates.entry(key).or_default().missing += u64::from(count);
    for walker in walkers {
        let mut products = 0;
        for record in &walker.trace.records {
            if let Action::Product { .. } = record.action {
                expect(product(walker, products), 1);
                products += 1;
            } else if let Action::Load { signals, .. } = &record.action {
                signals.iter().for_each(|&gate| expect(Key::Gate(gate), 1));
            } else if let Action::Signal { gate, count } | Action::CopyAsyncSignal { gate, count } =
                record.action
            {
                expect(Key::Gate(gate), count);
            }
        }
    }
    gates
}

/// Cycles of a product: the cycles of its arithmetic, or of reading its operands from shared memory, whichever are
/// more.
fn product_cycles(costs: &Costs, ty: WgmmaType, n: u32, a_in_registers: bool) -> u64 {
    let rate = costs.tensor_flops * if ty == WgmmaType::E4m3 { 2 } else { 1 };
    let flops = 2 * 64 * u64::from(n * ty.k());
    // K is 32 bytes for every element type.
    let rows = if a_in_registers { n } else { n + 64 };
    flops.div_ceil(rate.max(1)).max((32 * u64::from(rows)).div_ceil(costs.product_bytes.max(1)))
}

/// The activity of a warp that executes an action.
fn activity(action: &Action) -> Activity {
    match action {
        Action::Issue { pipe: Pipe::Special, .. } => Activity::Special,
        Action::Issue { pipe: Pipe::Float | Pipe::Integer | Pipe::Convert, .. } => Activity::Arithmetic,
        Action::Issue { pipe: Pipe::Control, .. } => Activity::Control,
        Action::Shared { .. } => Activity::Shared,
        Action::Global { .. } => Activity::Global,
        Action::Product { ty, n, .. } => Activity::Product(*ty, *n),
        Action::Load { .. } | Action::CopyAsync { .. } => Activity::Load,
        Action::Store { .. } => Activity::Store,
        Action::Use
        | Action::Commit
        | Action::Wait { .. }
        | Action::StoreCommit
        | Action::StoreWait { .. }
        | Action::CopyAsyncCommit
        | Action::CopyAsyncWait { .. }
        | Action::CopyAsyncSignal { .. }
        | Action::Signal { .. }
        | Action::Await(_) => Activity::Control,
    }
}
