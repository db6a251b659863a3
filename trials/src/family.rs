//! Operations' kernels, and how each is tested. A new operation is one more entry of [`families`]: the tests of every
//! family's trials, schedules and mutants are loops over them.

use crate::mutate::Prey;
use crate::{Trial, append, bwd, cache, combine, fwd, intervals, ladder, packed, quantize};

/// The kernels of an operation.
pub struct Family {
    /// Name in reports.
    pub name: &'static str,
    /// Every kind of kernel with problems of every shape class; the seed is for the inputs.
    pub trials: fn(seed: u64) -> Vec<Trial>,
    /// Small problems, of several tiles a CTA and more blocks than a ring has slots, to run under many schedules.
    pub small: fn() -> Vec<Trial>,
    /// Number of random schedules for each of `small`.
    pub schedules: u64,
    /// Kernels to mutate.
    pub preys: fn() -> Vec<Prey>,
}

/// Every family there is.
pub fn families() -> [Family; 10] {
    [
        ladder::FAMILY,
        fwd::FAMILY,
        fwd::wide::FAMILY,
        intervals::FAMILY,
        bwd::FAMILY,
        quantize::FAMILY,
        packed::FAMILY,
        cache::FAMILY,
        combine::FAMILY,
        append::FAMILY,
    ]
}
