//! The mutation operators, grouped by what they break.

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

use fa3_ir::{Imm, Operand};

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

/// The sites that `site` makes from some of `lines`.
fn sites(lines: impl IntoIterator<Item = usize>, site: impl Fn(usize) -> Option<Site>) -> Vec<Site> {
    lines.into_iter().filter_map(site).collect()
}

/// Marks sites as equivalent where `reason` gives a reason.
fn unless(sites: Vec<Site>, reason: impl Fn(usize) -> Option<&'static str>) -> Vec<Site> {
    sites.into_iter().map(|site| Site { equivalent: reason(site.line), ..site }).collect()
}

/// Deletes each of `lines`.
fn deleted(lines: Vec<usize>) -> Vec<Site> {
    lines.into_iter().map(Site::deleted).collect()
}

/// Deletes each of `lines`, and marks the site as equivalent where `reason` gives a reason.
fn deleted_unless(
    kernel: &Anatomy<'_>,
    lines: Vec<usize>,
    reason: fn(&Anatomy<'_>, usize) -> Option<&'static str>,
) -> Vec<Site> {
    unless(deleted(lines), |line| reason(kernel, line))
}

fn constant(bits: u32) -> Operand {
    Operand::Imm(Imm::B32(bits))
}

/// Moves each of `lines` to after the statement that `to` gives, if it gives one.
fn later(kernel: &Anatomy<'_>, lines: Vec<usize>, to: impl Fn(usize) -> Option<usize>) -> Vec<Site> {
    sites(lines, |line| Some(Site::after(kernel, line, to(line)?)))
}

/// Moves each of `lines` to before the statement that `to` gives, if it gives one.
fn earlier(kernel: &Anatomy<'_>, lines: Vec<usize>, to: impl Fn(usize) -> Option<usize>) -> Vec<Site> {
    sites(lines, |line| Some(Site::before(kernel, line, to(line)?)))
}
