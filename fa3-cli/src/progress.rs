//! How far a long computation is, where stderr is a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// How often the time is shown that something without steps, or with long ones, takes.
pub(crate) const TICK: Duration = Duration::from_millis(200);

/// A bar of `steps` steps.
pub(crate) fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is valid"))
}

/// What is being done, and for how long.
pub(crate) fn spinner(message: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {elapsed} {wide_msg}");
    let spinner = ProgressBar::new_spinner().with_style(style.expect("the template is valid"));
    spinner.set_message(message);
    spinner.enable_steady_tick(TICK);
    spinner
}
