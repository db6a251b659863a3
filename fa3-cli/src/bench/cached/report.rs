//! Measurements over caches, as text.

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
    /// Operations of both products.
    pub(super) flops: f64,
    pub(super) outcome: Outcome,
    /// Microseconds of a call, by the median.
    pub(super) micros: Option<f64>,
    /// Bytes a nanosecond.
    pub(super) gigabytes_per_second: Option<f64>,
    pub(super) tflops: Option<f64>,
}

/// A number of a cell that tables and panels show.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Number {
    /// Its unit.
    pub(super) name: &'static str,
    /// Digits behind the point, in tables.
    digits: usize,
    pub(super) of: fn(&Cell) -> Option<f64>,
}

/// Microseconds of a call.
pub(in crate::bench) const MICROS: Number = Number { name: "us", digits: 1, of: |cell| cell.micros };
/// Bytes of keys and values in use, read once.
pub(in crate::bench) const GIGABYTES: Number =
    Number { name: "GB/s", digits: 0, of: |cell| cell.gigabytes_per_second };
/// The same in larger units.
pub(in crate::bench) const TERABYTES: Number =
    Number { name: "TB/s", digits: 2, of: |cell| Some(cell.gigabytes_per_second? / 1e3) };
/// Operations of both products.
pub(in crate::bench) const TFLOPS: Number = Number { name: "TFLOP/s", digits: 0, of: |cell| cell.tflops };

/// A figure by the number of keys.
#[derive(Clone, Copy, Debug)]
pub(in crate::bench) struct Figure {
    /// The first words of titles.
    pub(in crate::bench) name: &'static str,
    /// Rows of the table for each number of sequences.
    pub(in crate::bench) rows: &'static [Number],
    /// Panels that are drawn.
    pub(in crate::bench) panels: &'static [Number],
}

/// All cells.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    #[serde(skip)]
    pub(super) figure: &'static Figure,
    pub(super) machine: Machine,
    #[serde(flatten)]
    pub(super) pace: Pace,
    pub(super) cells: Vec<Cell>,
}

/// Cells of one number of query heads, at least one.
pub(super) struct Group<'a> {
    figure: &'static Figure,
    pub(super) cells: Vec<&'a Cell>,
}

/// Cells of one number of sequences.
pub(super) struct Line<'a> {
    pub(super) batch: usize,
    pub(super) cells: Vec<&'a Cell>,
}

impl Cell {
    pub(super) fn new(setting: Setting, outcome: Outcome) -> Cell {
        let (bytes, flops) = (setting.bytes(), setting.flops());
        let micros = outcome.timing().map(|timing| 1e3 * timing.median);
        let gigabytes_per_second = micros.map(|micros| bytes / micros / 1e3);
        let tflops = outcome.tflops(flops);
        Cell { setting, bytes, flops, outcome, micros, gigabytes_per_second, tflops }
    }

    /// A number of the outcome, or why there is none in a word.
    fn text(&self, number: &Number) -> String {
        let digits = number.digits;
        (number.of)(self).map_or_else(|| self.outcome.cell(0.0), |number| format!("{number:.digits$}"))
    }
}

/// The items by their keys, in the order in which the keys came.
fn grouped<T, K: PartialEq>(items: impl IntoIterator<Item = T>, key: impl Fn(&T) -> K) -> Vec<(K, Vec<T>)> {
    let mut groups: Vec<(K, Vec<T>)> = Vec::new();
    for item in items {
        let of = key(&item);
        match groups.iter_mut().find(|(key, _)| *key == of) {
            Some((_, items)) => items.push(item),
            None => groups.push((of, vec![item])),
        }
    }
    groups
}

impl Report {
    /// Whether every cell has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.cells.iter().all(|cell| cell.micros.is_some())
    }

    /// The cells by the number of query heads, in the order in which they were measured.
    pub(super) fn groups(&self) -> Vec<Group<'_>> {
        let groups = grouped(&self.cells, |cell| cell.setting.heads).into_iter();
        groups.map(|(_, cells)| Group { figure: self.figure, cells }).collect()
    }
}

impl<'a> Group<'a> {
    /// The cells by the number of sequences, in the order in which they were measured.
    pub(super) fn lines(&self) -> Vec<Line<'a>> {
        let lines = grouped(self.cells.iter().copied(), |cell| cell.setting.batch).into_iter();
        lines.map(|(batch, cells)| Line { batch, cells }).collect()
    }

    /// A column for each number of keys, and the figure's rows for each number of sequences.
    fn table(&self) -> Table {
        let lines = self.lines();
        let keys =
            lines.iter().take(1).flat_map(|line| &line.cells).map(|cell| size_label(cell.setting.seqlen_k));
        let heads = ["batch", "keys"].map(str::to_owned).into_iter();
        let mut rows: Vec<Vec<String>> = vec![heads.chain(keys).collect()];
        for Line { batch, cells } in lines {
            for (index, number) in self.figure.rows.iter().enumerate() {
                let batch = if index == 0 { batch.to_string() } else { String::new() };
                let numbers = cells.iter().map(|cell| cell.text(number));
                rows.push([batch, number.name.to_owned()].into_iter().chain(numbers).collect());
            }
        }
        Table { rows, left: 2 }
    }

    /// The figure's name and the sizes that all settings share.
    pub(super) fn title(&self) -> String {
        let Some(Cell { setting, .. }) = self.cells.first() else { return String::new() };
        let Setting { dtype, head_dim, latent, heads, heads_kv, seqlen_q, page_size, skewed, .. } = setting;
        let latent = latent.map_or_else(String::new, |columns| format!("/{columns}"));
        let pages = page_size.map_or_else(String::new, |rows| format!(", pages of {rows} rows"));
        let skew = if *skewed { format!(", all but one with 1/{SKEW} of the keys") } else { String::new() };
        format!(
            "{}, {dtype}, new tokens {seqlen_q}, heads {heads}/{heads_kv}, head_dim {head_dim}{latent}{pages}{skew}",
            self.figure.name
        )
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, pace, cells, .. } = self;
        writeln!(f, "{machine}")?;
        for group in self.groups() {
            writeln!(f, "{}; {pace}\n\n{}\n", group.title(), group.table())?;
        }
        let timings = || cells.iter().filter_map(|cell| cell.outcome.timing());
        let (right, rows) = (timings().count(), timings().map(|timing| timing.rows).sum::<usize>());
        let error = timings().map(|timing| timing.error).fold(0.0, f64::max);
        write!(
            f,
            "{right} of {} results are right: {rows} rows of O and LSE judged, error / bound up to {error:.2}",
            cells.len()
        )?;
        for (cell, fault) in cells.iter().filter_map(|cell| Some((cell, cell.outcome.fault()?))) {
            let Setting { heads, batch, seqlen_k, .. } = cell.setting;
            write!(f, "\nheads {heads}, batch {batch}, keys {}: {fault}", size_label(seqlen_k))?;
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
                latent: None,
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
        let figure = &crate::bench::decode::FIGURE;
        Report { figure, machine: Machine::example(), pace, cells: cells.collect() }
    }

    /// A microsecond for each 16 keys of all sequences; the largest of each number of heads is wrong.
    pub(super) fn latent_example() -> Report {
        let heads = [128, 16].into_iter().flat_map(|heads| [1, 128].map(|batch| (heads, batch)));
        let settings = heads.flat_map(|(heads, batch)| {
            let example = Report::example().cells[0].setting;
            let latent = Setting { head_dim: 64, latent: Some(512), seqlen_q: 1, heads, batch, ..example };
            [1024, 4096].map(|seqlen_k| Setting { seqlen_k, ..latent })
        });
        let cells = settings.map(|setting| {
            let outcome = match (setting.batch, setting.seqlen_k) {
                (128, 4096) => Outcome::Wrong("it is".to_owned()),
                (batch, seqlen_k) => Outcome::checked(&[(batch * seqlen_k) as f64 / 16e3]),
            };
            Cell::new(setting, outcome)
        });
        let figure = &crate::bench::latent::FIGURE;
        Report { figure, cells: cells.collect(), ..Report::example() }
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
heads 16, batch 16, keys 4k: failed: out of memory";
        let report = Report::example();
        assert_eq!(report.to_string(), expected);
        assert!(!report.is_whole());
    }

    /// 16 keys a microsecond are 16 · 2 · 128 · 1088 operations, and 16 · 1152 bytes.
    #[test]
    fn a_table_for_each_number_of_heads() {
        let expected = "\
NVIDIA H100 80GB HBM3, 132 SMs, driver for CUDA 13.0, fa3 0.1.0
Latent attention, bf16, new tokens 1, heads 128/1, head_dim 64/512, pages of 64 rows; medians of 3 rounds of 25 ms

batch  keys         1k     4k
1      us         64.0  256.0
       TFLOP/s       4      4
       TB/s       0.02   0.02
128    us       8192.0  WRONG
       TFLOP/s       4  WRONG
       TB/s       0.02  WRONG

Latent attention, bf16, new tokens 1, heads 16/1, head_dim 64/512, pages of 64 rows; medians of 3 rounds of 25 ms

batch  keys         1k     4k
1      us         64.0  256.0
       TFLOP/s       1      1
       TB/s       0.02   0.02
128    us       8192.0  WRONG
       TFLOP/s       1  WRONG
       TB/s       0.02  WRONG

6 of 8 results are right: 360 rows of O and LSE judged, error / bound up to 0.50
heads 128, batch 128, keys 4k: WRONG: it is
heads 16, batch 128, keys 4k: WRONG: it is";
        assert_eq!(Report::latent_example().to_string(), expected);
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
            ("flops", json!(f64::from(2 * 16 * 4 * 256 * 4096))),
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
