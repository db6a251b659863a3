//! A coarse model of time: when the warps of a trace did their work, and how busy the engines of their SM were.
//!
//! ```text
//! utilisation = cycles in which an engine is busy / cycles of the whole
//! ```
//!
//! It is a model, not a measurement. Its simplifications:
//!
//! - Every CTA has an SM of its own, and everything that it loads is in L2.
//! - Instructions run in the order of the kernel's source. They wait for results of loads and shuffles, but not of
//!   arithmetic; copies between registers are free.
//! - Products and other accesses to shared memory do not disturb each other.
//! - No warp waits for the register pool, or for flags in global memory.
//! - Control flow is the control flow of the traced run: it keeps the polls that failed there, and the tiles that CTAs
//!   fetched from a counter.

mod chrome;
mod engine;
mod replay;
mod svg;
mod walker;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use fa3_ir::WgmmaType;

use crate::trace::Factors;
use crate::{Costs, Line, Trace};
use engine::Unit;
use replay::Replay;

/// The activities of a cluster over time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The kernel's name.
    pub kernel: String,
    /// The range of cycles that the timeline shows.
    pub cycles: Range<u64>,
    /// One track for each role and warpgroup: the busiest warp. If the warps of a warpgroup begin no products and do
    /// different things, there is one track for each kind of warp.
    pub roles: Vec<RoleTrack>,
    /// The engines of the CTAs' SMs.
    pub engines: Vec<EngineTrack>,
    /// The factors of each line's products; `None` if they differ.
    pub products: BTreeMap<Line, Option<Factors>>,
}

/// Track of a warp: spans that follow each other without gaps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleTrack {
    /// The rank of its CTA in the cluster.
    pub cta: u32,
    /// The track's name: its role, the warpgroup's number if the role has several warpgroups, and the warp's number if
    /// the warpgroup has several tracks.
    pub name: String,
    /// Its warpgroup's number in the CTA.
    pub warpgroup: u32,
    /// Its spans, in order.
    pub spans: Vec<Span>,
}

/// The times at which an engine was busy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineTrack {
    /// The rank of its CTA in the cluster.
    pub cta: u32,
    /// The engine.
    pub engine: Engine,
    /// Busy cycles, summed over its units.
    pub busy: u64,
    /// Spans in which any of its units is busy, in order and without overlap.
    pub spans: Vec<Span>,
}

/// A kind of unit of an SM. An SM has one of it, or one in each of its four partitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Matrix products. All four partitions work on each.
    TensorCore,
    /// Exponentials and other special functions.
    Special,
    /// The schedulers, each of which issues one instruction a cycle.
    Issue,
    /// The port of shared memory, as loads, stores and shuffles use it.
    Shared,
    /// Transfers from L2.
    Loads,
    /// Transfers to L2.
    Stores,
}

/// A span of cycles with one activity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The activity.
    pub activity: Activity,
    /// The line of the kernel's source that caused it.
    pub line: Line,
    /// The warpgroup that caused it.
    pub warpgroup: u32,
    /// The first cycle.
    pub start: u64,
    /// One past the last cycle.
    pub end: u64,
}

/// Activity of a warp or an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activity {
    /// A matrix product of 64 x n x k; on a role's track, its start.
    Product(WgmmaType, u32),
    /// Exponentials and other special functions.
    Special,
    /// All other arithmetic.
    Arithmetic,
    /// Accesses to shared memory, and shuffles.
    Shared,
    /// Accesses to global memory.
    Global,
    /// Copies from global to shared memory; on a role's track, their start.
    Load,
    /// Copies from shared to global memory; on a role's track, their start.
    Store,
    /// Branches, fences, arrivals.
    Control,
    /// Waiting.
    Wait(Cause),
}

/// Reason to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Products.
    Products,
    /// A phase of an mbarrier.
    Mbarrier,
    /// Other warps, at a named barrier or the cluster's.
    Barrier,
    /// Copies that the warp has begun itself.
    Copies,
    /// Results of loads or shuffles.
    Results,
}

impl Timeline {
    /// The timeline of a trace, with the durations in `costs`.
    pub fn new(trace: &Trace, costs: &Costs) -> Timeline {
        Replay::new(trace, costs).run()
    }

    /// Renames the factors of products. Factors in registers have no name; the others have the names of the kernel's
    /// regions of shared memory.
    #[must_use]
    pub fn name_factors(mut self, name: impl FnMut(&mut Factors)) -> Timeline {
        self.products.values_mut().flatten().for_each(name);
        self
    }

    /// Describes a span: the factors of a product, if they are known, and the activity.
    fn describe(&self, span: &Span) -> String {
        match self.factors(span) {
            Some(factors) => format!("{factors}, {}", span.activity),
            None => span.activity.to_string(),
        }
    }

    fn factors(&self, span: &Span) -> Option<&Factors> {
        let factors = self.products.get(&span.line)?.as_ref();
        factors.filter(|_| matches!(span.activity, Activity::Product(..)))
    }

    /// The timeline's length in cycles.
    pub fn length(&self) -> u64 {
        self.cycles.end - self.cycles.start
    }

    /// The fraction of the time in which an engine of a CTA is busy, from 0 to 1.
    pub fn utilisation(&self, cta: u32, engine: Engine) -> f64 {
        let track = self.engines.iter().find(|track| (track.cta, track.engine) == (cta, engine));
        let busy = track.map_or(0, |track| track.busy);
        busy as f64 / (engine.units() * self.length()).max(1) as f64
    }

    /// The part of this timeline in `cycles`. For engines with several units, the busy cycles are estimated from the
    /// whole timeline.
    #[must_use]
    pub fn between(&self, cycles: Range<u64>) -> Timeline {
        let start = cycles.start.clamp(self.cycles.start, self.cycles.end);
        let end = cycles.end.clamp(start, self.cycles.end);
        let cut = |spans: &[Span]| -> Vec<Span> {
            let cut = |span: &Span| Span { start: span.start.max(start), end: span.end.min(end), ..*span };
            spans.iter().map(cut).filter(|span| span.start < span.end).collect()
        };
        let role = |track: &RoleTrack| RoleTrack { spans: cut(&track.spans), ..track.clone() };
        let engine = |track: &EngineTrack| {
            let spans = cut(&track.spans);
            let (before, after) = (length(&track.spans), length(&spans));
            EngineTrack { busy: track.busy * after / before.max(1), spans, ..*track }
        };
        Timeline {
            kernel: self.kernel.clone(),
            cycles: start..end,
            roles: self.roles.iter().map(role).collect(),
            engines: self.engines.iter().map(engine).collect(),
            products: self.products.clone(),
        }
    }

    /// The timeline as a picture: one row for each role and warpgroup, with its products above its instructions, and
    /// one row for each engine, whose height shows how busy it is.
    pub fn to_svg(&self) -> String {
        svg::draw(self)
    }

    /// The trace event format that `chrome://tracing` and Perfetto load. A microsecond there is a cycle here.
    pub fn to_chrome_trace(&self) -> String {
        chrome::write(self)
    }
}

/// Number of cycles in spans.
fn length(spans: &[Span]) -> u64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

/// Appends a span, or lengthens the last span if the new one continues it.
fn append(spans: &mut Vec<Span>, span: Span) {
    if span.start == span.end {
        return;
    }
    match spans.last_mut() {
        Some(last)
            if last.end == span.start
                && Span { start: last.start, ..span } == Span { end: span.end, ..*last } =>
        {
            last.end = span.end;
        }
        _ => spans.push(span),
    }
}

impl Engine {
    /// All engines, in the order of a picture's rows.
    pub const ALL: [Engine; 6] =
        [Engine::TensorCore, Engine::Special, Engine::Issue, Engine::Shared, Engine::Loads, Engine::Stores];

    /// Number of these units in an SM.
    pub const fn units(self) -> u64 {
        match self {
            Engine::Special | Engine::Issue => 4,
            Engine::TensorCore | Engine::Shared | Engine::Loads | Engine::Stores => 1,
        }
    }
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Engine::TensorCore => "tensor core",
            Engine::Special => "special functions",
            Engine::Issue => "issue slots",
            Engine::Shared => "shared memory",
            Engine::Loads => "loads from L2",
            Engine::Stores => "stores to L2",
        })
    }
}

impl Activity {
    /// The activity's place in a picture's legend, its colour there and its name. Products have several colours. Waits
    /// at an mbarrier or a barrier have stripes.
    fn legend(self) -> (u32, &'static str, &'static str) {
        match self {
            Activity::Product(..) => (0, svg::PRODUCTS[0], "product"),
            Activity::Special => (1, "#d55e00", "special functions"),
            Activity::Arithmetic => (2, "#b9a900", "arithmetic"),
            Activity::Shared => (3, "#56b4e9", "shared memory"),
            Activity::Global => (4, "#8c6bb1", "global memory"),
            Activity::Load => (5, "#4d9078", "loads"),
            Activity::Store => (6, "#7a4f2a", "stores"),
            Activity::Control => (7, "#666666", "control"),
            Activity::Wait(Cause::Products) => (8, "#dddddd", "waits for products"),
            Activity::Wait(Cause::Mbarrier) => (9, "url(#wait)", "waits at an mbarrier"),
            Activity::Wait(Cause::Barrier) => (10, "url(#stall)", "waits at a barrier"),
            Activity::Wait(Cause::Copies) => (11, "#e8dccb", "waits for copies"),
            Activity::Wait(Cause::Results) => (12, "#dbe9f4", "waits for results"),
        }
    }
}

impl fmt::Display for Activity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (.., name) = self.legend();
        if let Activity::Product(ty, n) = self {
            return write!(f, "{name} 64 x {n} x {}", ty.k());
        }
        f.write_str(name)
    }
}

/// Prints the summary: the length, and how busy the engines are.
impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} cycles (model, not measurement)", self.kernel, self.length())?;
        for track in &self.engines {
            let percent = 100.0 * self.utilisation(track.cta, track.engine);
            writeln!(f, "cta {} {:<18} {percent:5.1} %", track.cta, track.engine.to_string())?;
        }
        Ok(())
    }
}

/// The track of an engine, from its units.
fn engine_track(cta: u32, engine: Engine, units: Vec<Unit>) -> EngineTrack {
    let busy = units.iter().map(|unit| length(&unit.spans)).sum();
    let mut all: Vec<Span> = units.into_iter().flat_map(|unit| unit.spans).collect();
    all.sort_by_key(|span| span.start);
    let mut spans = Vec::new();
    let mut until = 0;
    for span in all {
        let start = span.start.max(until);
        if start < span.end {
            append(&mut spans, Span { start, ..span });
            until = span.end;
        }
    }
    EngineTrack { cta, engine, busy, spans }
}
