//! How far a long computation is, where stderr is a terminal.

use indicatif::{ProgressBar, ProgressStyle};

/// A bar of `steps` steps.
pub(crate) fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is valid"))
}
