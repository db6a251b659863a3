//! The visible keys of rows.

use std::ops::Range;

use fa3_sched::{SeqLens, Tiling, VisibleKeys};
use fa3_types::KnownProblem;

/// The keys that a row sees: `all` except `gaps`, which lie within `all`.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    pub(super) all: Range<usize>,
    pub(super) gaps: Vec<Range<usize>>,
}

/// The keys that the row `at` sees: a sequence, a query head and a row index.
pub(super) fn keys_of_row(problem: &KnownProblem, at @ [sequence, _, row]: [usize; 3]) -> Keys {
    let Some(mut ranges) = problem.intervals_of_row(at) else {
        return Keys { all: visible_keys(problem, [sequence, row], row + 1), gaps: Vec::new() };
    };
    ranges.retain(|keys| !keys.is_empty());
    let all = ranges.first().map_or(0, |first| first.start)..ranges.last().map_or(0, |last| last.end);
    Keys { all, gaps: ranges.windows(2).map(|pair| pair[0].end..pair[1].start).collect() }
}

/// The range from the first to the last key that any of the rows `rows` of a sequence sees in any of these heads. There
/// is at least one row.
pub(super) fn keys_of_rows(
    problem: &KnownProblem,
    sequence: usize,
    heads: Range<usize>,
    rows: Range<usize>,
) -> Range<usize> {
    if problem.intervals().is_none() {
        return visible_keys(problem, [sequence, rows.start], rows.end);
    }
    let places = heads.flat_map(|head| rows.clone().map(move |row| [sequence, head, row]));
    let keys = places.map(|at| keys_of_row(problem, at).all).filter(|keys| !keys.is_empty());
    keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).unwrap_or(0..0)
}

/// The range of keys that rows `first..end` see under a mask without intervals.
fn visible_keys(problem: &KnownProblem, [sequence, first]: [usize; 2], end: usize) -> Range<usize> {
    let tiling = Tiling::new(1, 1, 1, problem.mask());
    let len = problem.lengths(sequence);
    // A validated problem's lengths are below 2³¹.
    let lens = SeqLens { q: len.q as u32, k: len.k as u32 };
    // Both bounds of a row's keys grow with the row index.
    let VisibleKeys { start, .. } = tiling.keys(first as u32, lens);
    let VisibleKeys { end, .. } = tiling.keys(end as u32 - 1, lens);
    start as usize..end as usize
}

/// The part of `keys` that is in `block`, counted from the block's first key.
pub(super) fn within(keys: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let inside = |key: usize| key.clamp(block.start, block.end) - block.start;
    let start = inside(keys.start);
    start..inside(keys.end).max(start)
}
