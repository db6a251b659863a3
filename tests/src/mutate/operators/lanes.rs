//! What orders the lanes of a warp.

use fa3_sim::Rule;

use super::{NOTHING, later};
use crate::mutate::kinds::{is_plain_arrival, is_warp_sync};
use crate::mutate::{Anatomy, Operator, Site};

pub(super) const OPERATORS: &[Operator] = &[
    Operator {
        name: "bar.warp.sync: deleted",
        rules: &[Rule::Lanes],
        sites: |kernel| {
            let site = |line| Site::deleted(line).equivalent(brings_together(kernel, line));
            kernel.find(is_warp_sync).into_iter().map(site).collect()
        },
        ..NOTHING
    },
    Operator {
        name: "bar.warp.sync: after the arrival",
        rules: &[Rule::Lanes],
        sites: |kernel| {
            let syncs = kernel.find(is_warp_sync).into_iter();
            let ordering = syncs.filter(|&line| brings_together(kernel, line).is_none()).collect();
            later(kernel, ordering, |line| kernel.after(line, is_plain_arrival))
        },
        ..NOTHING
    },
];

/// Behind what one lane has loaded, lanes need no order: copies are waited for.
fn brings_together(kernel: &Anatomy<'_>, line: usize) -> Option<&'static str> {
    let releases = kernel.after(line, is_plain_arrival).is_some();
    (!releases).then_some("one lane has begun copies, which others wait for: no memory is ordered")
}
