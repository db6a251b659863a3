//! Which keys rows see, as intervals.

use std::ops::Range;

use fa3_sched::{Lens, Tiling, VisibleKeys};
use fa3_types::{Lengths, Problem};

/// The keys from the first that some of the query positions sees to the last. There is a position.
pub(super) fn visible_keys(problem: &Problem, len: Lengths, positions: Range<usize>) -> Range<usize> {
    let tiling = Tiling::new(1, 1, 1, problem.mask());
    // A validated problem's lengths are below 2³¹.
    let lens = Lens { q: len.q as u32, k: len.k as u32 };
    // Both ends grow with the position.
    let VisibleKeys { start, .. } = tiling.keys(positions.start as u32, lens);
    let VisibleKeys { end, .. } = tiling.keys(positions.end as u32 - 1, lens);
    start as usize..end as usize
}

/// The part of `keys` that is in `block`, counted from the block's first.
pub(super) fn within(keys: &Range<usize>, block: &Range<usize>) -> Range<usize> {
    let inside = |key: usize| key.clamp(block.start, block.end) - block.start;
    let start = inside(keys.start);
    start..inside(keys.end).max(start)
}
