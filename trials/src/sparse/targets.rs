//! Mutation targets: kernels over lists of keys.

use fa3_sim::Rule;

use super::{Case, LATENT, LISTED, Listed};
use crate::Trial;
use crate::mutate::{Equivalent, QK_FENCE, Target};

/// Files that turn entries of lists into rows of memory, and hide what is no row. The arithmetic of blocks is not
/// mutated: the host runs the same code, and a property test covers all of it.
const ROWS: &[&str] = &["parts/lists.rs", "parts/seen.rs"];

/// Equivalent mutants, with the reasons.
const LISTS: &[Equivalent] = &[
    ("wgmma.fence", 1, QK_FENCE),
    (
        "fence.proxy.async: deleted",
        2,
        "zeros in rows of Q, and V but for a work tile's last block, are read after K, which has a fence behind it",
    ),
    (
        "fence.proxy.async: before the last write",
        1,
        "zeros in rows of Q are read after K, with its own fence",
    ),
    (
        "fence.mbarrier_init: before the last init",
        1,
        "only ordinary stores and loads go with the last mbarrier",
    ),
    (
        "wgmma.wait_group: after what it protects",
        2,
        "the warps that load K again load V before, whose stage is given back after products behind K's",
    ),
    (
        "full wait: after the first read",
        1,
        "V of a block is passed on before K of the next one, waited for before",
    ),
    (
        "empty wait: parity not toggled",
        2,
        "a CTA's last blocks of K and V are waited for, and none after them",
    ),
    ("bar.warp.sync: deleted", 1, "the copying warps synchronise when they say which keys exist"),
    (
        "bar.warp.sync: after the arrival",
        2,
        "the copying warps synchronise when they say which keys exist, and consumers by ballots",
    ),
];

/// No data race shows a missing wait for V, because a wait for K of the next block follows.
const UNSEEN: &[(&str, &[Rule])] = &[("full wait: deleted", &[Rule::M3, Rule::M4])];

/// A kernel over lists of two caches. A CTA has several work tiles, and more blocks than pipeline stages.
///
/// # Panics
/// If a kernel cannot be built.
pub(crate) fn targets() -> Vec<Target> {
    let second = Listed { pages: (5, 24), gap: 7, keys: 100, used: true, ..LISTED };
    let first = Listed { keys: 400, used: true, ..LISTED };
    let case =
        Case { heads: (16, 1), columns: (128, 128), qv: false, caches: (first, Some(second)), ..LATENT };
    let trials: Vec<Trial> = [(1, 7, 4), (2, 4, 6), (1, 2, u64::MAX)]
        .map(|(sms, sequences, holes)| Case { sms, sequences, holes, ..case.clone() }.trial())
        .into();
    let lists = Target::of_step("sparse, two lists", &trials, 0, LISTS);
    vec![lists.also_noticed(UNSEEN).with("number", ROWS).with("comparison", ROWS)]
}
