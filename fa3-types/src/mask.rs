//! Masks. [`Mask::allows`] is *the* definition of the keys that a query may see; schedulers, kernels and emulators are
//! compared with it.

use std::fmt;
use std::num::NonZeroU32;
use std::ops::Range;

use crate::{Intervals, ProblemError};

/// The numbers of query and key rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lengths {
    /// Query rows.
    pub q: usize,
    /// Key rows.
    pub k: usize,
}

/// The keys that a query may see. Masks are aligned at the bottom right: query row `i` has key position `i + seqlen_k -
/// seqlen_q`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Every key.
    #[default]
    None,
    /// Keys up to the query's own position.
    Causal,
    /// Keys from `left` before the query's position to `right` after it; `None` is unbounded.
    Window {
        /// How many keys before the query's position are visible.
        left: Option<u32>,
        /// How many keys after the query's position are visible.
        right: Option<u32>,
    },
    /// Keys of a window that lie in the same chunk as the query's position.
    Chunk {
        /// The chunks.
        chunk: Chunk,
        /// As in [`Mask::Window`].
        left: Option<u32>,
        /// As in [`Mask::Window`].
        right: Option<u32>,
    },
    /// Keys of the row's intervals that a window and chunks show, too. The bounds are data, which
    /// [`KnownProblem`](crate::KnownProblem) has.
    Intervals {
        /// The form of the intervals.
        form: Intervals,
        /// The chunks, if any.
        chunk: Option<Chunk>,
        /// As in [`Mask::Window`].
        left: Option<u32>,
        /// As in [`Mask::Window`].
        right: Option<u32>,
    },
}

/// Chunks of a sequence: keys `0 .. keys`, then `keys .. 2 · keys`, and so on. A position before the first key lies in
/// a chunk without keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    /// Keys of a chunk.
    pub keys: NonZeroU32,
    /// Whether the rows of the attention matrix are keys and its columns queries: see [`Mask::transposed`].
    pub transposed: bool,
}

impl Mask {
    /// The mask that lets a query see `left` keys before its position and `right` after it, with `None` for unbounded.
    /// Returns [`Mask::None`] or [`Mask::Causal`] where that is the same mask.
    pub fn window(left: Option<u32>, right: Option<u32>) -> Mask {
        match (left, right) {
            (None, None) => Mask::None,
            (None, Some(0)) => Mask::Causal,
            (left, right) => Mask::Window { left, right },
        }
    }

    /// The mask of the customary pair `window_size = (left, right)`, in which -1 means unbounded.
    ///
    /// # Errors
    /// [`ProblemError::WindowSize`] for a size below -1 or above `u32::MAX`.
    pub fn from_window(left: i64, right: i64) -> Result<Mask, ProblemError> {
        let size = |given: i64| match given {
            -1 => Ok(None),
            _ => u32::try_from(given).map(Some).map_err(|_| ProblemError::WindowSize { given }),
        };
        Ok(Mask::window(size(left)?, size(right)?))
    }

    /// The mask that lets a query see the keys of its own chunk of `keys` keys: `attention_chunk` of other libraries,
    /// in which 0 means no chunks.
    ///
    /// # Errors
    /// [`ProblemError::AttentionChunk`] for a number below 0 or above `u32::MAX`.
    pub fn from_chunk(keys: i64) -> Result<Mask, ProblemError> {
        let size = u32::try_from(keys).map_err(|_| ProblemError::AttentionChunk { given: keys })?;
        Ok(NonZeroU32::new(size).map_or(Mask::None, Mask::chunk))
    }

    /// The mask that lets a query see the keys of its own chunk of `keys`.
    pub const fn chunk(keys: NonZeroU32) -> Mask {
        Mask::Chunk { chunk: Chunk { keys, transposed: false }, left: None, right: None }
    }

    /// The mask that lets a query see the keys of its row's intervals.
    pub const fn of_intervals(form: Intervals) -> Mask {
        Mask::Intervals { form, chunk: None, left: None, right: None }
    }

    /// A window, in chunks and in intervals if given, in its simplest variant: its sides are cut to the chunk size.
    pub fn of(
        intervals: Option<Intervals>,
        chunk: Option<Chunk>,
        left: Option<u32>,
        right: Option<u32>,
    ) -> Mask {
        let is_bounded = |side: &u32| chunk.is_none_or(|chunk| *side < chunk.keys.get() - 1);
        let (left, right) = (left.filter(is_bounded), right.filter(is_bounded));
        match (intervals, chunk) {
            (Some(form), chunk) => Mask::Intervals { form, chunk, left, right },
            (None, Some(chunk)) => Mask::Chunk { chunk, left, right },
            (None, None) => Mask::window(left, right),
        }
    }

    /// The mask without its intervals, which are data.
    #[must_use]
    pub fn without_intervals(self) -> Mask {
        let (left, right) = self.reach();
        Mask::of(None, self.chunks(), left, right)
    }

    /// The simplest mask that allows the same pairs in sequences of at most `longest` rows. Bounds that no query can
    /// reach are left out, and so are chunks that hide no key.
    pub(crate) fn simplified(self, longest: Lengths) -> Mask {
        let notices = |reach: Option<u32>, rows: usize| {
            reach.filter(|&reach| (reach as usize) < rows.saturating_sub(1))
        };
        let (left, right) = self.reach();
        // A chunk that holds all keys still hides them from query rows with positions before the first key, which lie
        // in no chunk with keys. Under a causal mask such rows see no key anyway. A single query row has the last key's
        // position.
        let none_is_before = right == Some(0) || longest.q <= 1;
        let holds_all = |chunk: &Chunk| chunk.keys.get() as usize >= longest.k && !chunk.transposed;
        let chunk = self.chunks().filter(|chunk| !(holds_all(chunk) && none_is_before));
        Mask::of(self.intervals(), chunk, notices(left, longest.k), notices(right, longest.q))
    }

    /// The number of keys that a query sees before and after its own position; `None` is unbounded. It is below the
    /// chunk size.
    pub fn reach(self) -> (Option<u32>, Option<u32>) {
        let (left, right) = match self {
            Mask::None => (None, None),
            Mask::Causal => (None, Some(0)),
            Mask::Window { left, right }
            | Mask::Chunk { left, right, .. }
            | Mask::Intervals { left, right, .. } => (left, right),
        };
        let most = self.chunks().map(|chunk| chunk.keys.get() - 1);
        let within = |side: Option<u32>| side.into_iter().chain(most).min();
        (within(left), within(right))
    }

    /// The chunks, if any.
    pub fn chunks(self) -> Option<Chunk> {
        match self {
            Mask::None | Mask::Causal | Mask::Window { .. } => None,
            Mask::Chunk { chunk, .. } => Some(chunk),
            Mask::Intervals { chunk, .. } => chunk,
        }
    }

    /// The form of the intervals, if the mask is one of intervals.
    pub fn intervals(self) -> Option<Intervals> {
        match self {
            Mask::Intervals { form, .. } => Some(form),
            Mask::None | Mask::Causal | Mask::Window { .. } | Mask::Chunk { .. } => None,
        }
    }

    /// The form of the intervals, if rows have bounds: no bits say which blocks of keys they see.
    pub fn bounds(self) -> Option<Intervals> {
        self.intervals().filter(|form| !form.are_blocks())
    }

    /// The intersection of the two masks.
    ///
    /// ```
    /// use fa3_types::Mask;
    /// assert_eq!(Mask::Causal.and(Mask::window(Some(3), None))?, Mask::window(Some(3), Some(0)));
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// [`ProblemError::Chunks`] for two masks with different chunks, whose intersection is no [`Mask`].
    /// [`ProblemError::IntervalsTwice`] for two masks of intervals.
    pub fn and(self, other: Mask) -> Result<Mask, ProblemError> {
        let intervals = match (self.intervals(), other.intervals()) {
            (Some(_), Some(_)) => return Err(ProblemError::IntervalsTwice),
            (one, other) => one.or(other),
        };
        let chunk = match (self.chunks(), other.chunks()) {
            (Some(one), Some(other)) if one != other => {
                return Err(ProblemError::Chunks { one: one.keys, other: other.keys });
            }
            (one, other) => one.or(other),
        };
        let nearer = |one: Option<u32>, other: Option<u32>| one.into_iter().chain(other).min();
        let (one, other) = (self.reach(), other.reach());
        Ok(Mask::of(intervals, chunk, nearer(one.0, other.0), nearer(one.1, other.1)))
    }

    /// The mask seen from the keys: `mask.transposed()` lets key row `k` "see" query row `q` where this mask lets the
    /// query see the key. Intervals belong to query rows in both directions.
    #[must_use]
    pub fn transposed(self) -> Mask {
        let (left, right) = self.reach();
        let chunk = self.chunks().map(|chunk| Chunk { transposed: !chunk.transposed, ..chunk });
        Mask::of(self.intervals(), chunk, right, left)
    }

    /// Whether query row `q` may see key row `k` in a sequence of `len`. Rows are counted from 0 within the sequence; a
    /// row at or past the sequence's end sees nothing and is not seen. A mask of intervals does not know their bounds:
    /// here it allows what its window and chunks allow, and [`KnownProblem::allows`](crate::KnownProblem::allows)
    /// decides.
    pub fn allows(self, q: usize, k: usize, len: Lengths) -> bool {
        if q >= len.q || k >= len.k {
            return false;
        }
        // How many keys the key lies before the query's position, counted from the ends of both sequences; negative if
        // it lies after.
        let distance = (len.k - k) as i128 - (len.q - q) as i128;
        let (left, right) = self.reach();
        // Whether the key and the query's position are in one chunk. Both are counted in keys.
        let in_chunk = |Chunk { keys, transposed }: Chunk| {
            let (key, position) = if transposed {
                (q as i128, q as i128 - distance)
            } else {
                (k as i128, k as i128 + distance)
            };
            let chunk = |key: i128| key.div_euclid(keys.get().into());
            chunk(key) == chunk(position)
        };
        left.is_none_or(|left| distance <= i128::from(left))
            && right.is_none_or(|right| -distance <= i128::from(right))
            && self.chunks().is_none_or(in_chunk)
    }
}

/// The keys that a row sees by its window and its chunk.
pub(crate) fn keys_of_row(mask: Mask, row: usize, len: Lengths) -> Range<usize> {
    let (left, right) = mask.reach();
    let (keys, position) = (len.k as i128, (row + len.k) as i128 - len.q as i128);
    let first = left.map_or(0, |left| position - i128::from(left));
    let end = right.map_or(keys, |right| position + i128::from(right) + 1);
    let chunk = mask.chunks().map_or(0..keys, |chunk| {
        let (of_chunk, row) = (i128::from(chunk.keys.get()), row as i128);
        let (counted, ahead) = if chunk.transposed { (row, position - row) } else { (position, 0) };
        let start = counted.div_euclid(of_chunk) * of_chunk + ahead;
        start..start + of_chunk
    });
    // Both lie within the keys, whose number is a `usize`.
    let inside = |key: i128| key.clamp(0, keys) as usize;
    let (first, end) = (inside(first.max(chunk.start)), inside(end.min(chunk.end)));
    first..end.max(first)
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |size: &Option<u32>| size.map_or("inf".to_owned(), |size| size.to_string());
        match self {
            Mask::None => f.pad("none"),
            Mask::Causal => f.pad("causal"),
            Mask::Window { left, right } => f.pad(&format!("window({},{})", side(left), side(right))),
            Mask::Chunk { chunk, left, right } => {
                let chunks = format!("chunks({})", chunk.keys);
                match (left, right) {
                    (None, None) => f.pad(&chunks),
                    (left, right) => f.pad(&format!("{} {chunks}", Mask::window(*left, *right))),
                }
            }
            Mask::Intervals { form, .. } => {
                let mask = self.without_intervals();
                if mask == Mask::None { form.fmt(f) } else { f.pad(&format!("{mask} {form}")) }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(mask: Mask, len: Lengths) -> Vec<String> {
        let row = |q| (0..len.k).map(|k| if mask.allows(q, k, len) { '#' } else { '.' }).collect();
        (0..len.q).map(row).collect()
    }

    #[test]
    fn masks_as_pictures() {
        let wide = Lengths { q: 2, k: 5 };
        assert_eq!(picture(Mask::None, wide), ["#####", "#####"]);
        assert_eq!(picture(Mask::Causal, wide), ["####.", "#####"]);
        let tall = Lengths { q: 5, k: 2 };
        assert_eq!(picture(Mask::Causal, tall), ["..", "..", "..", "#.", "##"]);
        let square = Lengths { q: 4, k: 4 };
        let window = Mask::Window { left: Some(1), right: Some(0) };
        assert_eq!(picture(window, square), ["#...", "##..", ".##.", "..##"]);
        let right_only = Mask::Window { left: None, right: Some(1) };
        assert_eq!(picture(right_only, square), ["##..", "###.", "####", "####"]);
        let left_only = Mask::Window { left: Some(0), right: None };
        assert_eq!(picture(left_only, square), ["####", ".###", "..##", "...#"]);
        let pairs = chunk(2);
        assert_eq!(picture(pairs, square), ["##..", "##..", "..##", "..##"]);
        assert_eq!(picture(Mask::Causal.and(pairs).unwrap(), square), ["#...", "##..", "..#.", "..##"]);
        assert_eq!(picture(pairs, wide), ["..##.", "....#"]);
        assert_eq!(picture(pairs, tall), ["..", "..", "..", "##", "##"]);
        assert_eq!(picture(pairs.transposed(), wide), ["...##", "...##"]);
    }

    fn chunk(keys: u32) -> Mask {
        Mask::chunk(NonZeroU32::new(keys).unwrap())
    }

    /// Windows of every kind, alone and within chunks of every size.
    fn all() -> Vec<Mask> {
        let sides = [None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(9)];
        let windows = sides.into_iter().flat_map(|left| sides.map(|right| Mask::Window { left, right }));
        let chunked = |window: Mask| [1, 2, 3, 4, 7].map(|keys| window.and(chunk(keys)).unwrap());
        windows.flat_map(|window| [window].into_iter().chain(chunked(window))).collect()
    }

    #[test]
    fn nothing_is_seen_past_the_end() {
        let len = Lengths { q: 3, k: 4 };
        assert!(!Mask::None.allows(3, 0, len));
        assert!(!Mask::None.allows(0, 4, len));
        assert!(!Mask::None.allows(0, 0, Lengths { q: 0, k: 0 }));
    }

    #[test]
    fn extreme_numbers_do_not_overflow() {
        let len = Lengths { q: usize::MAX, k: usize::MAX };
        assert!(Mask::Causal.allows(usize::MAX - 1, usize::MAX - 1, len));
        assert!(!Mask::Causal.allows(0, 1, len));
        let widest = Mask::Window { left: Some(u32::MAX), right: Some(u32::MAX) };
        assert!(widest.allows(0, u32::MAX as usize, len));
        assert!(!widest.allows(0, u32::MAX as usize + 1, len));
    }

    #[test]
    fn two_masks_allow_what_both_allow() {
        let lens = [(5, 5), (3, 5), (5, 3), (1, 5), (2, 0)].map(|(q, k)| Lengths { q, k });
        let same = |one: Mask, other: Mask| match (one.chunks(), other.chunks()) {
            (Some(one), Some(other)) => one == other,
            _ => true,
        };
        for (one, other) in all().into_iter().flat_map(|one| all().into_iter().map(move |other| (one, other)))
        {
            let both = one.and(other);
            assert_eq!(both, other.and(one).map_err(|_| both.clone().unwrap_err()));
            assert_eq!(both.is_ok(), same(one, other), "{one} {other}");
            let Ok(both) = both else { continue };
            for len in lens {
                for (q, k) in (0..len.q).flat_map(|q| (0..len.k).map(move |k| (q, k))) {
                    let allowed = one.allows(q, k, len) && other.allows(q, k, len);
                    assert_eq!(both.allows(q, k, len), allowed, "{one} {other} {len:?} {q} {k}");
                }
            }
        }
    }

    #[test]
    fn simplified_masks_allow_the_same() {
        for (q, k) in (0..6).flat_map(|q| (0..6).map(move |k| (q, k))) {
            for mask in all().into_iter().flat_map(|mask| [mask, mask.transposed()]) {
                // Sequences may be shorter than the longest one.
                let simplified = mask.simplified(Lengths { q, k });
                for len in (0..=q).flat_map(|q| (0..=k).map(move |k| Lengths { q, k })) {
                    for (i, j) in (0..len.q).flat_map(|i| (0..len.k).map(move |j| (i, j))) {
                        assert_eq!(
                            mask.allows(i, j, len),
                            simplified.allows(i, j, len),
                            "{mask} {simplified} {len:?}"
                        );
                    }
                }
            }
        }
        let len = Lengths { q: 4, k: 9 };
        assert_eq!(Mask::Window { left: Some(8), right: Some(0) }.simplified(len), Mask::Causal);
        assert_eq!(Mask::Window { left: Some(8), right: Some(3) }.simplified(len), Mask::None);
        assert_eq!(
            Mask::Window { left: Some(7), right: Some(9) }.simplified(len),
            Mask::Window { left: Some(7), right: None }
        );
        // A chunk of all keys matters only to rows before the first key.
        assert_eq!(Mask::Causal.and(chunk(9)).unwrap().simplified(len), Mask::Causal);
        assert_eq!(chunk(9).simplified(len), chunk(9));
        assert_eq!(chunk(9).simplified(Lengths { q: 1, k: 9 }), Mask::None);
        assert_eq!(chunk(8).simplified(Lengths { q: 1, k: 9 }), chunk(8));
    }

    #[test]
    fn intervals_stand_beside_other_masks() {
        let form = Intervals { of_row: crate::IntervalsOfRow::Two, per_sequence: false, per_head: true };
        let (mask, len) = (Mask::of_intervals(form), Lengths { q: 4, k: 9 });
        let left = Mask::window(Some(3), None);
        for other in [Mask::None, Mask::Causal, left, chunk(3), chunk(3).and(left.transposed()).unwrap()] {
            let both = mask.and(other).unwrap();
            assert_eq!(other.and(mask), Ok(both));
            assert_eq!((both.intervals(), both.without_intervals()), (Some(form), other), "{other}");
            assert_eq!((both.reach(), both.chunks()), (other.reach(), other.chunks()), "{other}");
            assert_eq!(both.transposed(), mask.and(other.transposed()).unwrap(), "{other}");
            assert_eq!(both.simplified(len), mask.and(other.simplified(len)).unwrap(), "{other}");
            assert_eq!(picture(both, len), picture(other, len), "{other}");
            assert_eq!(both.and(mask), Err(ProblemError::IntervalsTwice), "{other}");
        }
        assert_eq!(mask.to_string(), "two intervals");
        assert_eq!(mask.and(Mask::Causal).unwrap().to_string(), "causal two intervals");
    }

    #[test]
    fn chunks_have_a_size() {
        assert_eq!(Mask::from_chunk(0), Ok(Mask::None));
        assert_eq!(Mask::from_chunk(5), Ok(chunk(5)));
        for given in [-1, 1 << 32] {
            assert_eq!(Mask::from_chunk(given), Err(ProblemError::AttentionChunk { given }));
        }
        let window = Mask::window(Some(3), Some(4)).and(chunk(5)).unwrap();
        assert_eq!(window, Mask::window(Some(3), None).and(chunk(5)).unwrap());
        assert_eq!([window, chunk(5)].map(|mask| mask.to_string()), ["window(3,inf) chunks(5)", "chunks(5)"]);
        assert_eq!(
            chunk(5).and(chunk(4)).unwrap_err().to_string(),
            "chunks of 5 keys and of 4 keys cannot be combined"
        );
    }

    #[test]
    fn window_pairs() {
        assert_eq!(Mask::from_window(-1, -1), Ok(Mask::None));
        assert_eq!(Mask::from_window(-1, 0), Ok(Mask::Causal));
        assert_eq!(Mask::from_window(3, 0), Ok(Mask::Window { left: Some(3), right: Some(0) }));
        assert_eq!(Mask::from_window(-2, 0), Err(ProblemError::WindowSize { given: -2 }));
        assert_eq!(Mask::from_window(0, 1 << 32), Err(ProblemError::WindowSize { given: 1 << 32 }));
    }

    #[test]
    fn a_transposed_mask_is_the_same_from_the_other_side() {
        for mask in all() {
            assert_eq!(mask.transposed().transposed(), mask.and(mask).unwrap());
            for len in (0..6).flat_map(|q| (0..6).map(move |k| Lengths { q, k })) {
                let other = Lengths { q: len.k, k: len.q };
                for (q, k) in (0..=len.q).flat_map(|q| (0..=len.k).map(move |k| (q, k))) {
                    assert_eq!(
                        mask.allows(q, k, len),
                        mask.transposed().allows(k, q, other),
                        "{mask} {len:?}"
                    );
                }
            }
        }
    }
}
