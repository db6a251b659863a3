//! Sums with short dependency chains.

use fa3_ir::lang::*;

/// A sum in four independent accumulators, so that additions do not wait for each other.
#[derive(Default)]
pub(super) struct Chains<'k>([Option<V<'k, F32>>; 4], usize);

impl<'k> Chains<'k> {
    #[track_caller]
    pub(super) fn add(&mut self, x: V<'k, F32>) {
        let Chains(parts, next) = self;
        parts[*next] = Some(parts[*next].map_or(x, |sum| sum + x));
        *next = (*next + 1) % 4;
    }

    #[track_caller]
    pub(super) fn total(self, b: &'k Builder) -> V<'k, F32> {
        let parts = self.0.into_iter().flatten();
        parts.reduce(|x, y| x + y).unwrap_or_else(|| b.copy(0.0))
    }
}
