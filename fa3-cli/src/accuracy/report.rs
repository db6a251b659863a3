//! Both tables as text, and what must hold of them.

use std::fmt;

use serde::Serialize;

use super::drift;
use super::table::{self, Method, PAPER_SEQLEN};

#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) seqlen: usize,
    pub(super) head_dim: usize,
    pub(super) table: Vec<table::Row>,
    pub(super) drift: Vec<drift::Row>,
}

/// Something that the paper, or the model of the hardware, leads one to expect.
pub(super) struct Expectation {
    text: String,
    verdict: Verdict,
}

/// Whether an expectation holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Holds,
    Fails,
    /// It is about the paper's sequence length, which was not measured.
    Open,
}

impl From<bool> for Verdict {
    fn from(holds: bool) -> Verdict {
        if holds { Verdict::Holds } else { Verdict::Fails }
    }
}

impl Report {
    fn median(&self, method: Method) -> f64 {
        let row = self.table.iter().find(|row| row.method == method);
        row.expect("every method has a row").median
    }

    /// Whether no expectation failed.
    pub(super) fn is_as_expected(&self) -> bool {
        self.expectations().iter().all(|expectation| expectation.verdict != Verdict::Fails)
    }

    fn expectations(&self) -> Vec<Expectation> {
        let at_papers_length = |holds: bool| match self.seqlen {
            PAPER_SEQLEN => Verdict::from(holds),
            _ => Verdict::Open,
        };
        let fp16 = self.median(Method::Flash3Fp16) / self.median(Method::StandardFp16);
        let fp8 = self.median(Method::NoIncoherentProcessing) / self.median(Method::Flash3Fp8);
        let off = |row: &table::Row| row.paper.map(|paper| (row.median / paper - 1.0).abs());
        let worst = self.table.iter().filter_map(off).fold(0.0, f64::max);
        let shrinks =
            self.drift.windows(2).all(|pair| pair[1].one_level.bias < pair[0].one_level.bias - 0.02);
        let flat = self.drift.iter().map(|row| row.two_level.bias.abs()).fold(0.0, f64::max);
        let expectation = |text: String, verdict: Verdict| Expectation { text, verdict };
        vec![
            expectation(
                format!(
                    "fp16: FlashAttention-3 has {fp16:.2} of the error of standard attention (at most 0.7)"
                ),
                at_papers_length(fp16 <= 0.7),
            ),
            expectation(
                format!("fp8: incoherent processing lowers the error {fp8:.1} times (at least 2)"),
                at_papers_length(fp8 >= 2.0),
            ),
            expectation(
                format!("medians lie within {:.0} % of the paper's numbers (at most 25)", 100.0 * worst),
                at_papers_length(worst <= 0.25),
            ),
            expectation("fp8: in one level O shrinks as keys are added".to_owned(), shrinks.into()),
            expectation(
                format!("fp8: in two levels its bias stays within {:.2} % (at most 1)", 100.0 * flat),
                (flat <= 0.01).into(),
            ),
        ]
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Verdict::Holds => "ok",
            Verdict::Fails => "FAIL",
            Verdict::Open => "open",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seqlen, head_dim, seeds) = (self.seqlen, self.head_dim, self.table[0].rmse.len());
        writeln!(f, "Error of O (RMSE against f64), seqlen {seqlen}, head_dim {head_dim}, {seeds} seeds;")?;
        writeln!(f, "entries of Q, K, V from N(0,1) + N(0,100) Bernoulli(0.001)")?;
        if seqlen != PAPER_SEQLEN {
            writeln!(
                f,
                "(the paper's numbers are for seqlen {PAPER_SEQLEN}: run without --quick to compare)"
            )?;
        }
        writeln!(f)?;
        writeln!(f, "{:32}  {:>8}  {:>17}  {:>8}", "", "median", "least .. most", "paper")?;
        for row in &self.table {
            let paper = row.paper.map_or(String::new(), |paper| format!("{paper:.1e}"));
            let spread = format!("{:.1e} .. {:.1e}", row.least(), row.most());
            writeln!(f, "{:32}  {:>8.2e}  {spread:>17}  {paper:>8}", row.method, row.median)?;
        }
        writeln!(f)?;
        writeln!(f, "FP8 attention with V around 1: bias and RMSE of O, relative to its size")?;
        writeln!(f)?;
        writeln!(f, "{:>8}  {:>20}  {:>20}", "", "one level", "two levels (128)")?;
        writeln!(f, "{:>8}  {:>10}{:>10}  {:>10}{:>10}", "keys", "bias", "rmse", "bias", "rmse")?;
        for drift::Row { keys, one_level, two_level } in &self.drift {
            let cells = [one_level.bias, one_level.rmse, two_level.bias, two_level.rmse].map(|x| 100.0 * x);
            let [bias1, rmse1, bias2, rmse2] = cells;
            writeln!(f, "{keys:>8}  {bias1:>+8.2} %{rmse1:>8.2} %  {bias2:>+8.2} %{rmse2:>8.2} %")?;
        }
        for Expectation { text, verdict } in self.expectations() {
            write!(f, "\n{verdict:4} {text}")?;
        }
        Ok(())
    }
}
