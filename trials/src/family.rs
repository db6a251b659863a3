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
    /// Kernels to mutate.
    pub targets: fn() -> Vec<Target>,
}

/// Every family.
pub fn families() -> [Family; 11] {
    [
        family("ladder", ladder::rungs, || ladder::small_rungs(3), ladder::targets),
        family("fwd", fwd::trials, fwd::small, forward_targets),
        family("wide", fwd::wide::trials, fwd::wide::small, wide_targets),
        family("intervals", intervals::trials, intervals::small, intervals::targets),
        family("bwd", bwd::trials, bwd::small, bwd::targets),
        family("quantize", quantize::trials, quantize::small, quantize::targets),
        family("packed", packed::trials, packed::small, packed::targets),
        family("cache", cache::trials, cache::small, cache::targets),
        family("sparse", sparse::trials, sparse::small, sparse::targets),
        family("combine", combine::trials, combine::small, combine::targets),
        family("append", append::trials, append::small, append::targets),
    ]
}

fn family(
    name: &'static str,
    trials: fn(u64) -> Vec<Trial>,
    small: fn() -> Vec<Trial>,
    targets: fn() -> Vec<Target>,
) -> Family {
    Family { name, trials, small, targets }
}
