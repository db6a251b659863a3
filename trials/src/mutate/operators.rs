//! The operators, by what they break.

mod barriers;
mod copies;
mod fences;
mod flags;
mod lanes;
mod layouts;
mod numbers;
mod phases;
mod products;
mod waits;

use super::{Anatomy, Operator, Site};

/// Every operator.
pub fn operators() -> impl Iterator<Item = &'static Operator> {
    let families = [
        fences::OPERATORS,
        flags::OPERATORS,
        products::OPERATORS,
        waits::OPERATORS,
        phases::OPERATORS,
        barriers::OPERATORS,
        lanes::OPERATORS,
        copies::OPERATORS,
        layouts::OPERATORS,
        numbers::OPERATORS,
    ];
    families.into_iter().flatten()
}

/// An operator that finds nothing to break, to be completed.
const NOTHING: Operator =
    Operator { name: "", rules: &[], verifier: &[], result: false, sites: |_| Vec::new() };

/// Each of `lines` deleted.
fn deleted(lines: Vec<usize>) -> Vec<Site> {
    lines.into_iter().map(Site::deleted).collect()
}

/// Each of `lines` deleted. `reason` says why that changes nothing, if it does not.
fn deleted_unless(
    kernel: &Anatomy<'_>,
    lines: Vec<usize>,
    reason: fn(&Anatomy<'_>, usize) -> Option<&'static str>,
) -> Vec<Site> {
    lines.into_iter().map(|line| Site::deleted(line).equivalent(reason(kernel, line))).collect()
}

/// Each of `lines` moved to after the statement that `to` gives, where it gives one.
fn later(kernel: &Anatomy<'_>, lines: Vec<usize>, to: impl Fn(usize) -> Option<usize>) -> Vec<Site> {
    lines.into_iter().filter_map(|line| Some(Site::after(kernel, line, to(line)?))).collect()
}

/// Each of `lines` moved to before the statement that `to` gives, where it gives one.
fn earlier(kernel: &Anatomy<'_>, lines: Vec<usize>, to: impl Fn(usize) -> Option<usize>) -> Vec<Site> {
    lines.into_iter().filter_map(|line| Some(Site::before(kernel, line, to(line)?))).collect()
}
