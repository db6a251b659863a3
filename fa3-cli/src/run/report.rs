//! The report on a call of `fa3 run`.

use std::fmt;

use fa3_types::KnownProblem;
use serde_json::{Value, json};

use super::compare::Check;
use super::summary::Summary;
use crate::device::{ChosenDevice, Times};

use crate::console;

/// FLOP of the backward pass per FLOP of the forward pass: five products instead of two.
const BACKWARD: f64 = 2.5;

/// A computed call.
#[derive(Debug)]
pub(super) struct Report {
    /// The prefix of the names of the call's tensors.
    pub(super) prefix: String,
    pub(super) problem: KnownProblem,
    pub(super) forward: Pass,
    pub(super) backward: Option<Backward>,
}

/// Computed gradients.
#[derive(Debug)]
pub(super) struct Backward {
    /// The names of the gradients of O and LSE, if the file has them.
    pub(super) from: [Option<String>; 2],
    pub(super) pass: Pass,
}

/// A computed pass: the device, the time, the results, and the check.
#[derive(Debug)]
pub(super) struct Pass {
    pub(super) place: ChosenDevice,
    pub(super) times: Times,
    pub(super) summaries: Vec<Summary>,
    pub(super) check: Check,
}

impl Pass {
    fn json(&self, flops: f64) -> Value {
        let Pass { place, times, summaries, check } = self;
        json!({
            "device": place.json(),
            "time": times.json(flops, "gflop_per_second"),
            "results": summaries.iter().map(Summary::json).collect::<Vec<_>>(),
            "check": check.json(),
        })
    }

    fn write(&self, f: &mut fmt::Formatter<'_>, flops: f64) -> fmt::Result {
        let Pass { place, times, summaries, check } = self;
        writeln!(f, "  device  {place}")?;
        times.write(f, flops, "GFLOP/s")?;
        summaries.iter().try_for_each(|summary| writeln!(f, "  {summary}"))?;
        write!(f, "  {check}")
    }
}

impl Report {
    /// Whether everything that was checked satisfies the error law.
    pub(super) fn holds(&self) -> bool {
        self.forward.check.holds()
            && self.backward.as_ref().is_none_or(|backward| backward.pass.check.holds())
    }

    pub(super) fn json(&self) -> Value {
        let Report { prefix, problem, forward, backward } = self;
        let flops = problem.forward_flops();
        let mut report = forward.json(flops);
        report["prefix"] = prefix.as_str().into();
        report["problem"] = problem.to_string().into();
        report["backward"] =
            backward.as_ref().map_or(Value::Null, |Backward { from: [dout, dlse], pass }| {
                let mut report = pass.json(BACKWARD * flops);
                (report["dout"], report["dlse"]) = (json!(dout), json!(dlse));
                report
            });
        report
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { prefix, problem, forward, backward } = self;
        let gap = if prefix.is_empty() { "" } else { "  " };
        writeln!(f, "{}{gap}{problem}", console::escaped(prefix))?;
        forward.write(f, problem.forward_flops())?;
        let Some(Backward { from, pass }) = backward else { return Ok(()) };
        let [dout, dlse] = [(0, "1"), (1, "0")].map(|(of, default)| {
            from[of].as_ref().map_or_else(|| default.to_owned(), |name| console::escaped(name))
        });
        writeln!(f, "\n  backward of dO = {dout}, dLSE = {dlse}")?;
        pass.write(f, BACKWARD * problem.forward_flops())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fa3_types::{Dtype, ProblemSpec, Shape};
    use ndarray::Array4;

    use super::*;

    /// The call has 4 · 1000 · 1000 · 64 · 2 operations.
    #[test]
    fn compiling_is_no_part_of_a_calls_time() {
        let shape = Shape { batch: 1, seqlen: 1000, heads: 2, head_dim: 64 };
        let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).known().unwrap();
        let report = |compile| Report {
            prefix: String::new(),
            problem: problem.clone(),
            forward: Pass {
                place: ChosenDevice::cpu(),
                times: Times { compile, call: Duration::from_millis(1), launches: 20, warm: true },
                summaries: vec![Summary::new("o", &Array4::<f32>::ones([1; 4]))],
                check: Check::Unwanted,
            },
            backward: None,
        };
        let on_cpu = report(None).to_string();
        let lines =
            "\n  time    1.00 ms, 512.0 GFLOP/s, of 20 calls after the first one\n  o       rms 1.00, ";
        assert!(on_cpu.contains(lines), "{on_cpu}");
        let on_gpu = report(Some(Duration::from_millis(300))).to_string();
        let lines =
            "\n  compile 300.00 ms\n  time    1.0000 ms, 512.0 GFLOP/s, of 20 launches back to back\n";
        assert!(on_gpu.contains(lines), "{on_gpu}");
    }
}
