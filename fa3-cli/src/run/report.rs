//! What `fa3 run` prints about a call.

use std::fmt;

use fa3_types::Problem;

use super::compare::Check;
use super::place::{Place, Times};

/// What was computed, where, how fast and how well.
#[derive(Debug)]
pub(super) struct Report {
    /// What the names of the call's tensors begin with.
    pub(super) prefix: String,
    pub(super) problem: Problem,
    pub(super) place: Place,
    pub(super) times: Times,
    pub(super) check: Check,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { prefix, problem, place, times, check } = self;
        let gap = if prefix.is_empty() { "" } else { "  " };
        writeln!(f, "{}{gap}{problem}", crate::escaped(prefix))?;
        writeln!(f, "  device  {place}")?;
        times.write(f, problem.forward_flops(), "GFLOP/s")?;
        write!(f, "  {check}")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fa3_types::{Dtype, ProblemSpec, Shape};

    use super::*;

    /// 4 · 1000 · 1000 · 64 · 2 operations.
    #[test]
    fn compiling_is_no_part_of_a_calls_time() {
        let shape = Shape { batch: 1, seqlen: 1000, heads: 2, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).validate().unwrap();
        let report = |compile| Report {
            prefix: String::new(),
            problem: problem.clone(),
            place: Place::cpu(),
            times: Times { compile, call: Duration::from_millis(1), launches: 20 },
            check: Check::Unwanted,
        };
        let on_cpu = report(None).to_string();
        assert!(on_cpu.contains("\n  time    1.00 ms, 512.0 GFLOP/s\n  check   none, because"), "{on_cpu}");
        let on_gpu = report(Some(Duration::from_millis(300))).to_string();
        let lines =
            "\n  compile 300.00 ms\n  time    1.0000 ms, 512.0 GFLOP/s, of 20 launches back to back\n";
        assert!(on_gpu.contains(lines), "{on_gpu}");
    }
}
