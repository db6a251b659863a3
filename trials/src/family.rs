//! Kernel families: the kernels of each operation, and their tests. A new operation adds an entry to [`families`]: the
//! tests of trials, schedules and mutants loop over it.

use crate::mutate::{Target, forward_targets, wide_targets};
use crate::{Trial, append, bwd, cache, combine, fwd, intervals, ladder, packed, quantize, sparse};

/// The kernels of an operation.
pub struct Family {
    /// Name in reports.
    pub name: &'static str,
    /// Builds trials of every kind of kernel on every class of shapes. The seed is for the inputs.
    pub trials: fn(seed: u64) -> Vec<Trial>,
    /// Small problems to run under many schedules. They have several tiles per CTA and more blocks than pipeline
    /// stages.
    pub small: fn() -> Vec<Trial>,
    /// Number of random schedules for each of `small`.
    pub schedules: u64,
    /// Kernels to mutate.
    pub targets: fn() -> Vec<Target>,
}

/// Every family.
pub fn families() -> [Family; 11] {
    [
        family("ladder", 10, ladder::rungs, || ladder::small_rungs(3), ladder::targets),
        family("fwd", 3, fwd::trials, fwd::small, forward_targets),
        family("wide", 3, fwd::wide::trials, fwd::wide::small, wide_targets),
        family("intervals", 3, intervals::trials, intervals::small, intervals::targets),
        family("bwd", 3, bwd::trials, bwd::small, bwd::targets),
        family("quantize", 10, quantize::trials, quantize::small, quantize::targets),
        family("packed", 20, packed::trials, packed::small, packed::targets),
        family("cache", 3, cache::trials, cache::small, cache::targets),
        family("sparse", 3, sparse::trials, sparse::small, sparse::targets),
        family("combine", 20, combine::trials, combine::small, combine::targets),
        family("append", 20, append::trials, append::small, append::targets),
    ]
}

fn family(
    name: &'static str,
    schedules: u64,
    trials: fn(u64) -> Vec<Trial>,
    small: fn() -> Vec<Trial>,
    targets: fn() -> Vec<Target>,
) -> Family {
    Family { name, trials, small, schedules, targets }
}
