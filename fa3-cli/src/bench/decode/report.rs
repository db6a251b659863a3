//! The measurements of decoding, as text.

use std::fmt;

use serde::Serialize;

use super::{SKEW, Setting};
use crate::args::number::size_label;
use crate::measure::{Machine, Outcome, Pace};
use crate::table::Table;

/// A setting and its outcome.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    #[serde(flatten)]
    pub(super) setting: Setting,
    /// Bytes of keys and values in use.
    pub(super) bytes: f64,
    pub(super) outcome: Outcome,
    /// Microseconds of a call, by the median.
    pub(super) micros: Option<f64>,
    /// Bytes a nanosecond.
    pub(super) gigabytes_per_second: Option<f64>,
}

/// All cells.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    #[serde(flatten)]
    pub(super) pace: Pace,
    pub(super) cells: Vec<Cell>,
}

/// Cells of one number of sequences.
pub(super) struct Line<'a> {
    pub(super) batch: usize,
    pub(super) cells: Vec<&'a Cell>,
}

impl Cell {
    pub(super) fn new(setting: Setting, outcome: Outcome) -> Cell {
        let (bytes, micros) = (setting.bytes(), outcome.timing().map(|timing| 1e3 * timing.median));
        let gigabytes_per_second = micros.map(|micros| bytes / micros / 1e3);
        Cell { setting, bytes, outcome, micros, gigabytes_per_second }
    }

    /// A number of the outcome, or why there is none in a word.
    fn text(&self, number: Option<f64>, digits: usize) -> String {
        number.map_or_else(|| self.outcome.cell(0.0), |number| format!("{number:.digits$}"))
    }
}

impl Report {
    /// Whether every cell has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.cells.iter().all(|cell| cell.micros.is_some())
    }

    /// The cells by the number of sequences, in the order in which they were measured.
    pub(super) fn lines(&self) -> Vec<Line<'_>> {
        let mut lines: Vec<Line<'_>> = Vec::new();
        for cell in &self.cells {
            match lines.iter_mut().find(|line| line.batch == cell.setting.batch) {
                Some(line) => line.cells.push(cell),
                None => lines.push(Line { batch: cell.setting.batch, cells: vec![cell] }),
            }
        }
        lines
    }

    /// A column for each number of keys, and two rows for each number of sequences.
    fn table(&self) -> Table {
        let lines = self.lines();
        let keys =
            lines.iter().take(1).flat_map(|line| &line.cells).map(|cell| size_label(cell.setting.seqlen_k));
        let heads = ["batch", "keys"].map(str::to_owned).into_iter();
        let mut rows: Vec<Vec<String>> = vec![heads.chain(keys).collect()];
        for Line { batch, cells } in lines {
            let micros = cells.iter().map(|cell| cell.text(cell.micros, 1));
            rows.push([batch.to_string(), "us".to_owned()].into_iter().chain(micros).collect());
            let rates = cells.iter().map(|cell| cell.text(cell.gigabytes_per_second, 0));
            rows.push([String::new(), "GB/s".to_owned()].into_iter().chain(rates).collect());
        }
        Table { rows, left: 2 }
    }

    /// The sizes that all settings share.
    pub(super) fn title(&self) -> String {
        let Some(Cell { setting, .. }) = self.cells.first() else { return String::new() };
        let Setting { dtype, head_dim, heads, heads_kv, seqlen_q, page_size, skewed, .. } = setting;
        let pages = page_size.map_or_else(String::new, |rows| format!(", pages of {rows} rows"));
        let skew = if *skewed { format!(", all but one with 1/{SKEW} of the keys") } else { String::new() };
        format!("{dtype}, new tokens {seqlen_q}, heads {heads}/{heads_kv}, head_dim {head_dim}{pages}{skew}")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, pace, cells } = self;
        writeln!(f, "{machine}")?;
        writeln!(f, "Decoding, {}; {pace}\n\n{}\n", self.title(), self.table())?;
        let timings = || cells.iter().filter_map(|cell| cell.outcome.timing());
        let (right, rows) = (timings().count(), timings().map(|timing| timing.rows).sum::<usize>());
        let error = timings().map(|timing| timing.error).fold(0.0, f64::max);
        write!(
            f,
            "{right} of {} results are right: {rows} rows of O and LSE judged, error / bound up to {error:.2}",
            cells.len()
        )?;
        for (cell, fault) in cells.iter().filter_map(|cell| Some((cell, cell.outcome.fault()?))) {
            write!(f, "\nbatch {}, keys {}: {fault}", cell.setting.batch, size_label(cell.setting.seqlen_k))?;
        }
        Ok(())
    }
}

#[cfg(test)]
impl Report {
    /// 16 microseconds for 1024 keys of each of 4 sequences, and as much longer as there are more; one failed.
    pub(super) fn example() -> Report {
        use fa3_types::Dtype;
        let pairs = [4, 16].into_iter().flat_map(|batch| [1024, 4096].map(|seqlen_k| (batch, seqlen_k)));
        let cells = pairs.map(|(batch, seqlen_k)| {
            let (page_size, skewed, dtype) = (Some(64), false, Dtype::Bf16);
            let setting = Setting {
                dtype,
                head_dim: 128,
                heads: 16,
                heads_kv: 1,
                seqlen_q: 4,
                page_size,
                skewed,
                batch,
                seqlen_k,
            };
            let millis = 16e-3 * (batch * seqlen_k) as f64 / 4096.0;
            let outcome = match (batch, seqlen_k) {
                (16, 4096) => Outcome::Failed("out of memory".to_owned()),
                _ => Outcome::checked(&[millis, 2.0 * millis, millis / 2.0]),
            };
            Cell::new(setting, outcome)
        });
        let pace = Pace { rounds: 3, slice_ms: 25.0 };
        Report { machine: Machine::example(), pace, cells: cells.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write;
    use serde_json::{Value, json};

    #[test]
    fn two_rows_for_each_number_of_sequences() {
        let expected = "\
NVIDIA H100 80GB HBM3, 132 SMs, driver for CUDA 13.0, fa3 0.1.0
Decoding, bf16, new tokens 4, heads 16/1, head_dim 128, pages of 64 rows; medians of 3 rounds of 25 ms

batch  keys    1k      4k
4      us    16.0    64.0
       GB/s   131     131
16     us    64.0  failed
       GB/s   131  failed

3 of 4 results are right: 180 rows of O and LSE judged, error / bound up to 0.50
batch 16, keys 4k: failed: out of memory";
        let report = Report::example();
        assert_eq!(report.to_string(), expected);
        assert!(!report.is_whole());
    }

    #[test]
    fn everything_is_in_the_json() {
        let report: Value = serde_json::from_slice(&write::json(&Report::example())).unwrap();
        let [first, .., last] = report["cells"].as_array().unwrap().as_slice() else { panic!("four cells") };
        for (key, value) in [
            ("dtype", json!("bf16")),
            ("page_size", json!(64)),
            ("skewed", json!(false)),
            ("batch", json!(4)),
            ("seqlen_k", json!(1024)),
            ("bytes", json!(2_097_152.0)),
            ("micros", json!(16.0)),
        ] {
            assert_eq!(first[key], value, "{key}");
        }
        assert_eq!((&report["rounds"], first["outcome"]["checked"]["rows"].as_u64()), (&json!(3), Some(60)));
        assert_eq!(
            (&last["outcome"], &last["micros"]),
            (&json!({ "failed": "out of memory" }), &Value::Null)
        );
    }
}
