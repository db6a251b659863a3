//! The engines of an SM, which serve one request after the other.

use super::{Activity, Engine, EngineTrack, Span, append, engine_track};
use crate::{Costs, Line, trace::Pipe};

/// Everything about a span except its time.
#[derive(Clone, Copy, Debug)]
pub(super) struct SpanInfo {
    pub(super) activity: Activity,
    pub(super) line: Line,
    pub(super) warpgroup: u32,
}

impl SpanInfo {
    pub(super) fn span(self, start: u64, end: u64) -> Span {
        let SpanInfo { activity, line, warpgroup } = self;
        Span { activity, line, warpgroup, start, end }
    }
}

/// A unit that does one thing at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct Unit {
    /// The first cycle at which it can begin its next request.
    pub(super) free: u64,
    pub(super) spans: Vec<Span>,
}

impl Unit {
    /// Makes the unit busy for `cycles` cycles, from `ready` on or as soon as it is free. Returns the cycle at which it
    /// is done.
    pub(super) fn serve(&mut self, ready: u64, cycles: u64, what: SpanInfo) -> u64 {
        self.serve_late(ready, cycles, 0, what)
    }

    /// Like [`Unit::serve`], but results come `latency` cycles later, and the span is drawn at that time.
    fn serve_late(&mut self, ready: u64, cycles: u64, latency: u64, what: SpanInfo) -> u64 {
        let start = self.free.max(ready);
        self.free = start + cycles;
        append(&mut self.spans, what.span(start + latency, self.free + latency));
        self.free + latency
    }
}

/// A quarter of an SM.
#[derive(Clone, Debug, Default)]
struct Partition {
    issue: Unit,
    special: Unit,
    /// The first cycle at which each other unit can begin its next instruction.
    float: u64,
    integer: u64,
    convert: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Sm {
    partitions: [Partition; 4],
    pub(super) tensor_core: Unit,
    shared: Unit,
    loads: Unit,
    stores: Unit,
}

impl Sm {
    /// The first cycle at which a warp's partition can issue its next instruction.
    pub(super) fn issue_free(&self, warp: u32) -> u64 {
        self.partitions[warp as usize % 4].issue.free
    }

    /// The first cycle at which a warp's unit can begin its next instruction.
    pub(super) fn pipe_free(&self, warp: u32, pipe: Pipe) -> u64 {
        let partition = &self.partitions[warp as usize % 4];
        match pipe {
            Pipe::Float => partition.float,
            Pipe::Integer => partition.integer,
            Pipe::Convert => partition.convert,
            Pipe::Special => partition.special.free,
            Pipe::Control => 0,
        }
    }

    pub(super) fn shared_free(&self) -> u64 {
        self.shared.free
    }

    /// Issues an instruction of a warp.
    pub(super) fn issue(&mut self, warp: u32, now: u64, what: SpanInfo) {
        self.partitions[warp as usize % 4].issue.serve(now, 1, what);
    }

    /// Executes an issued instruction in a unit of the warp's partition.
    pub(super) fn execute(&mut self, warp: u32, pipe: Pipe, now: u64, costs: &Costs, what: SpanInfo) {
        let partition = &mut self.partitions[warp as usize % 4];
        match pipe {
            Pipe::Float => partition.float = now + costs.float_cycles,
            Pipe::Integer => partition.integer = now + costs.integer_cycles,
            Pipe::Convert => partition.convert = now + costs.convert_cycles,
            Pipe::Special => _ = partition.special.serve(now, costs.special_cycles, what),
            Pipe::Control => {}
        }
    }

    /// Moves `wavefronts` wavefronts through the port of shared memory. Returns the cycle at which this is done.
    pub(super) fn access_shared(&mut self, now: u64, wavefronts: u32, what: SpanInfo) -> u64 {
        self.shared.serve(now, wavefronts.into(), what)
    }

    /// Transfers bytes from L2. Returns the cycle at which the last byte has arrived.
    pub(super) fn load(&mut self, now: u64, bytes: u32, latency: u64, costs: &Costs, what: SpanInfo) -> u64 {
        self.loads.serve_late(now, u64::from(bytes).div_ceil(costs.load_bytes.max(1)), latency, what)
    }

    /// Transfers bytes to L2. Returns the cycle at which the last byte has left.
    pub(super) fn store(&mut self, now: u64, bytes: u32, costs: &Costs, what: SpanInfo) -> u64 {
        self.stores.serve(now, u64::from(bytes).div_ceil(costs.store_bytes.max(1)), what)
    }

    pub(super) fn tracks(self, cta: u32) -> Vec<EngineTrack> {
        let Sm { partitions, tensor_core, shared, loads, stores } = self;
        let (issue, special) = partitions.into_iter().map(|of| (of.issue, of.special)).unzip();
        let units = [vec![tensor_core], special, issue, vec![shared], vec![loads], vec![stores]];
        let tracks = Engine::ALL.into_iter().zip(units);
        tracks.map(|(engine, units)| engine_track(cta, engine, units)).collect()
    }
}
