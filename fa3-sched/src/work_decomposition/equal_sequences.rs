//! Sequences of equally many iterations, of which a CTA finds its first one by a division.

use super::IterationSpace;
use crate::{FastDiv, Int};

/// The iteration space of sequences that have equally many iterations each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EqualSequences<T> {
    /// The iteration space.
    pub space: IterationSpace<T>,
    /// Iterations of a sequence.
    pub(super) iterations: FastDiv<T>,
}

impl<T> EqualSequences<T> {
    pub(super) fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> EqualSequences<U> {
        let IterationSpace { share, total, least } = self.space;
        let [share, total, least] = [("space_share", share), ("space_total", total), ("space_least", least)]
            .map(|(name, x)| f(name, x));
        let iterations = self.iterations.map_named("space_sequence", f);
        EqualSequences { space: IterationSpace { share, total, least }, iterations }
    }
}

impl<T: Int> EqualSequences<T> {
    /// The sequence that has iteration `at`, and the first iteration of that sequence; for an iteration behind the last
    /// one, the number of sequences and of iterations.
    pub fn sequence(&self, at: T) -> [T; 2] {
        let sequence = self.iterations.quotient(at.at_most(self.space.total));
        [sequence, sequence * self.iterations.divisor()]
    }
}
