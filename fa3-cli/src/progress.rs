//! Progress bars for long computations, shown if stderr is a terminal.

use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The time after which a computation shows a bar.
const SOON: Duration = Duration::from_secs(2);

pub(crate) fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is valid"))
}

/// A progress bar that appears after [`SOON`]. Its clock also advances between steps.
pub(crate) fn late_bar(steps: u64) -> ProgressBar {
    let bar = bar(steps as usize);
    bar.set_draw_target(ProgressDrawTarget::hidden());
    let seen = bar.clone();
    let watch = move || {
        thread::sleep(SOON);
        if !seen.is_finished() {
            seen.set_draw_target(ProgressDrawTarget::stderr());
        }
        while !seen.is_finished() {
            seen.tick();
            thread::sleep(Duration::from_millis(100));
        }
    };
    // If no thread can be started, there is no bar.
    let _ = thread::Builder::new().spawn(watch);
    bar
}
