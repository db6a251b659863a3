//! Masks. [`Mask::allows`] is *the* definition of which key a query may see; schedulers, kernels and
//! emulators are compared with it.

use std::fmt;

use crate::ProblemError;

/// The numbers of query and key rows of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lengths {
    /// Query rows.
    pub q: usize,
    /// Key rows.
    pub k: usize,
}

/// Which keys a query may see. Positions are aligned at the bottom right: the last query row lies on the
/// diagonal of the last key, so query row `i` stands at key position `i + seqlen_k - seqlen_q`.
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
}

impl Mask {
    /// The mask that lets a query see `left` keys before its position and `right` after it, `None` being
    /// unbounded, by its simplest name: [`Mask::None`] or [`Mask::Causal`] where it is one of these.
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

    /// The simplest mask that allows the same pairs in sequences of at most `longest` rows: a side that no query is
    /// far enough from an end to notice is unbounded.
    pub(crate) fn simplified(self, longest: Lengths) -> Mask {
        let notices = |reach: Option<u32>, rows: usize| {
            reach.filter(|&reach| (reach as usize) < rows.saturating_sub(1))
        };
        let (left, right) = self.reach();
        Mask::window(notices(left, longest.k), notices(right, longest.q))
    }

    /// How far a query sees to the left and to the right of its own position; `None` is unbounded.
    pub fn reach(self) -> (Option<u32>, Option<u32>) {
        match self {
            Mask::None => (None, None),
            Mask::Causal => (None, Some(0)),
            Mask::Window { left, right } => (left, right),
        }
    }

    /// The mask that lets a query see the keys that both masks let it see.
    ///
    /// ```
    /// use fa3_types::Mask;
    /// assert_eq!(Mask::Causal.and(Mask::window(Some(3), None)), Mask::window(Some(3), Some(0)));
    /// ```
    #[must_use]
    pub fn and(self, other: Mask) -> Mask {
        let nearer = |one: Option<u32>, other: Option<u32>| one.into_iter().chain(other).min();
        let (one, other) = (self.reach(), other.reach());
        Mask::window(nearer(one.0, other.0), nearer(one.1, other.1))
    }

    /// The same mask seen from the keys: `mask.transposed()` lets key row `k` "see" query row `q` where this one lets
    /// the query see the key.
    #[must_use]
    pub fn transposed(self) -> Mask {
        let (left, right) = self.reach();
        Mask::window(right, left)
    }

    /// Whether query row `q` may see key row `k` in a sequence of `len`. Rows are counted from 0 within
    /// the sequence; a row at or past the sequence's end sees nothing and is seen by nothing.
    pub fn allows(self, q: usize, k: usize, len: Lengths) -> bool {
        if q >= len.q || k >= len.k {
            return false;
        }
        // Keys and queries measured from their own ends, so that nothing can go below zero before the
        // subtraction: distance > 0 means that the key lies before the query's position.
        let distance = (len.k - k) as i128 - (len.q - q) as i128;
        let (left, right) = self.reach();
        left.is_none_or(|left| distance <= i128::from(left))
            && right.is_none_or(|right| -distance <= i128::from(right))
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |size: &Option<u32>| size.map_or("inf".to_owned(), |size| size.to_string());
        match self {
            Mask::None => f.pad("none"),
            Mask::Causal => f.pad("causal"),
            Mask::Window { left, right } => f.pad(&format!("window({},{})", side(left), side(right))),
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
        let sides = [None, Some(0), Some(1), Some(3)];
        let all = || sides.into_iter().flat_map(|left| sides.map(|right| Mask::Window { left, right }));
        for (one, other) in all().flat_map(|one| all().map(move |other| (one, other))) {
            let both = one.and(other);
            assert_eq!(both, other.and(one));
            for len in (0..6).flat_map(|q| (0..6).map(move |k| Lengths { q, k })) {
                for (q, k) in (0..len.q).flat_map(|q| (0..len.k).map(move |k| (q, k))) {
                    let allowed = one.allows(q, k, len) && other.allows(q, k, len);
                    assert_eq!(both.allows(q, k, len), allowed, "{one} {other} {len:?} {q} {k}");
                }
            }
        }
    }

    #[test]
    fn simplified_masks_allow_the_same() {
        let sides = [None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(9)];
        for (q, k) in (0..6).flat_map(|q| (0..6).map(move |k| (q, k))) {
            for (left, right) in sides.into_iter().flat_map(|left| sides.map(|right| (left, right))) {
                let (mask, len) = (Mask::Window { left, right }, Lengths { q, k });
                let simplified = mask.simplified(len);
                for (i, j) in (0..q).flat_map(|i| (0..k).map(move |j| (i, j))) {
                    assert_eq!(
                        mask.allows(i, j, len),
                        simplified.allows(i, j, len),
                        "{mask} {simplified} {len:?}"
                    );
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
        let sizes = || [None, Some(0), Some(1), Some(3)].into_iter();
        for mask in sizes().flat_map(|left| sizes().map(move |right| Mask::window(left, right))) {
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
