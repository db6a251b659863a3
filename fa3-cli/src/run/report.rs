//! What `fa3 run` prints about a call.

use std::fmt;
use std::time::Duration;

use fa3::Device;
use fa3::types::Problem;

use super::compare::Comparison;

/// What was computed, where, how fast and how well.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) prefix: String,
    pub(super) problem: Problem,
    pub(super) device: Device,
    /// Of the attention call alone.
    pub(super) elapsed: Duration,
    pub(super) comparisons: Vec<Comparison>,
}

impl Report {
    /// Whether every comparison satisfies the law.
    pub(super) fn holds(&self) -> bool {
        self.comparisons.iter().all(Comparison::holds)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { prefix, problem, device, elapsed, comparisons } = self;
        let seconds = elapsed.as_secs_f64();
        let gap = if prefix.is_empty() { "" } else { "  " };
        writeln!(f, "{}{gap}{problem}", crate::escaped(prefix))?;
        writeln!(f, "  device  {device}")?;
        let speed = problem.forward_flops() / seconds / 1e9;
        write!(f, "  time    {:.2} ms, {speed:.1} GFLOP/s", 1e3 * seconds)?;
        if comparisons.is_empty() {
            write!(f, "\n  check   none, there is no expected o or lse of these tensors")?;
        }
        comparisons.iter().try_for_each(|comparison| write!(f, "\n  {comparison}"))
    }
}
