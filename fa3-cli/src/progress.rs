//! How far a long computation is, where stderr is a terminal.

use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Who waits for no longer needs no bar.
const SOON: Duration = Duration::from_secs(2);

/// A bar of `steps` steps.
pub(crate) fn bar(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {wide_msg}");
    ProgressBar::new(steps as u64).with_style(style.expect("the template is valid"))
}

/// The same, to be seen where the computation takes longer than a moment; its time runs on between two steps.
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
    // Without another thread there is no bar.
    let _ = thread::Builder::new().spawn(watch);
    bar
}
