//! The progress of a warp through its records.

use std::collections::BTreeSet;

use super::engine::SpanInfo;
use super::{Activity, Cause, RoleTrack, Span, append};
use crate::Line;
use crate::trace::WarpTrace;

pub(super) struct Walker<'a> {
    pub(super) trace: &'a WarpTrace,
    /// The warp's next record.
    pub(super) next: usize,
    /// How often the next record was executed.
    pub(super) done: u32,
    /// The cycle at which it last executed an instruction.
    pub(super) last: u64,
    /// The cycle at which the results of its loads arrive.
    pub(super) results: u64,
    /// The number of its products so far.
    pub(super) products: u32,
    /// The number of its products at each commit.
    pub(super) groups: Vec<u32>,
    pub(super) stores: Copies,
    pub(super) copies: Copies,
    /// Its spans so far, without gaps.
    spans: Vec<Span>,
}

/// The copies of a warp: the cycles at which they have read their sources, and at which they are complete.
#[derive(Default)]
pub(super) struct Copies {
    all: [u64; 2],
    groups: Vec<[u64; 2]>,
}

impl Copies {
    pub(super) fn begin(&mut self, read: u64, complete: u64) {
        self.all = [self.all[0].max(read), self.all[1].max(complete)];
    }

    pub(super) fn commit(&mut self) {
        self.groups.push(self.all);
    }

    /// The cycle at which all copies so far are complete.
    pub(super) fn complete(&self) -> u64 {
        self.all[1]
    }

    /// The cycles at which all groups except the last `pending` have read their sources, and are complete.
    pub(super) fn wait(&self, pending: u32) -> [u64; 2] {
        let groups = self.groups.len().saturating_sub(pending as usize);
        groups.checked_sub(1).map_or([0; 2], |last| self.groups[last])
    }
}

impl<'a> Walker<'a> {
    pub(super) fn new(trace: &'a WarpTrace) -> Walker<'a> {
        Walker {
            trace,
            next: 0,
            done: 0,
            last: 0,
            results: 0,
            products: 0,
            groups: Vec::new(),
            stores: Copies::default(),
            copies: Copies::default(),
            spans: Vec::new(),
        }
    }

    /// Its warpgroup's number in the CTA.
    pub(super) fn warpgroup(&self) -> u32 {
        self.trace.warp / 4
    }

    /// The description of its span at a record.
    pub(super) fn what(&self, record: usize, activity: Activity) -> SpanInfo {
        SpanInfo { activity, line: self.trace.records[record].line, warpgroup: self.warpgroup() }
    }

    /// Notes an activity until `until`.
    pub(super) fn tell(&mut self, what: SpanInfo, until: u64) {
        let start = self.spans.last().map_or(0, |span| span.end);
        append(&mut self.spans, what.span(start, until.max(start)));
    }

    /// Notes a wait until `until`, for the record before the next one.
    pub(super) fn waited(&mut self, cause: Cause, until: u64) {
        let what = self.what(self.next.saturating_sub(1), Activity::Wait(cause));
        self.tell(what, until);
    }

    /// The end of the warp's known activities.
    pub(super) fn end(&self) -> u64 {
        self.spans.last().map_or(0, |span| span.end)
    }

    /// The lines of the kernel's source that it has executed.
    fn lines(&self) -> BTreeSet<Line> {
        self.trace.records.iter().map(|record| record.line).collect()
    }

    /// Whether one track can stand for both warps.
    fn is_like(&self, other: &Walker<'_>) -> bool {
        let key = |walker: &Walker<'_>| (walker.trace.cta, walker.warpgroup());
        if key(self) != key(other) || self.trace.role != other.trace.role {
            return false;
        }
        if self.products > 0 {
            return true;
        }
        let (lines, others) = (self.lines(), other.lines());
        lines.is_subset(&others) || others.is_subset(&lines)
    }

    fn busy(&self) -> u64 {
        let busy = |span: &&Span| !matches!(span.activity, Activity::Wait(_));
        self.spans.iter().filter(busy).map(|span| span.end - span.start).sum()
    }
}

/// One track for each role and warpgroup: the track of the busiest warp. The warps of a producer may do different
/// things: a warp that begins no products, and executes lines that the other warps do not, has a track of its own.
pub(super) fn tracks(walkers: Vec<Walker<'_>>) -> Vec<RoleTrack> {
    let mut chosen: Vec<Walker<'_>> = Vec::new();
    for walker in walkers {
        match chosen.iter_mut().find(|other| other.is_like(&walker)) {
            None => chosen.push(walker),
            Some(other) if walker.busy() > other.busy() => *other = walker,
            Some(_) => {}
        }
    }
    let names: Vec<String> = chosen.iter().map(|walker| name(walker, &chosen)).collect();
    let track = |(walker, name): (Walker<'_>, String)| RoleTrack {
        cta: walker.trace.cta,
        name,
        warpgroup: walker.warpgroup(),
        spans: walker.spans,
    };
    chosen.into_iter().zip(names).map(track).collect()
}

/// A track's name: the role, numbered if several warpgroups of the CTA have it, and the warp's number if its warpgroup
/// has several tracks.
fn name(walker: &Walker<'_>, all: &[Walker<'_>]) -> String {
    let WarpTrace { cta, role, warp, .. } = walker.trace;
    let same: Vec<u32> = all
        .iter()
        .filter(|other| (other.trace.cta, &other.trace.role) == (*cta, role))
        .map(Walker::warpgroup)
        .collect();
    let is_mine = |warpgroup: &&u32| **warpgroup == walker.warpgroup();
    let tracks = same.iter().filter(is_mine).count();
    let mut warpgroups = same;
    warpgroups.dedup();
    let name = match warpgroups.iter().position(|warpgroup| is_mine(&warpgroup)) {
        Some(index) if warpgroups.len() > 1 => format!("{role} {}", index + 1),
        _ => role.clone(),
    };
    if tracks > 1 { format!("{name}, warp {}", warp % 4 + 1) } else { name }
}
