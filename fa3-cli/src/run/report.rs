//! What `fa3 run` prints about a call.

use std::fmt;
use std::time::Duration;

use fa3_types::Problem;

use super::compare::Comparison;
use super::place::Place;

/// What was computed, where, how fast and how well.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) prefix: String,
    pub(super) problem: Problem,
    pub(super) place: Place,
    /// Of the attention call alone; on a GPU with compiling and copying.
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
        let Report { prefix, problem, place, elapsed, comparisons } = self;
        let seconds = elapsed.as_secs_f64();
        let gap = if prefix.is_empty() { "" } else { "  " };
        writeln!(f, "{}{gap}{problem}", crate::escaped(prefix))?;
        writeln!(f, "  device  {place}")?;
        let speed = problem.forward_flops() / seconds / 1e9;
        write!(f, "  time    {:.2} ms, {speed:.1} GFLOP/s", 1e3 * seconds)?;
        if comparisons.is_empty() {
            write!(f, "\n  check   none, there is no expected o or lse of these tensors")?;
        }
        comparisons.iter().try_for_each(|comparison| write!(f, "\n  {comparison}"))
    }
}
