//! The measurements of Figure 5 as text.

use std::fmt;

use fa3_types::Dtype;
use serde::Serialize;

use crate::args::number::size_label;
use crate::grid::{Pass, Setting};
use crate::measure::{Machine, Outcome, Pace};
use crate::paper::Published;
use crate::table::Table;

/// A setting and its outcome.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    #[serde(flatten)]
    pub(super) setting: Setting,
    /// Floating-point operations as the paper counts them.
    pub(super) flops: f64,
    pub(super) outcome: Outcome,
    pub(super) tflops: Option<f64>,
    pub(super) paper: Option<Published>,
}

/// All cells.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    #[serde(flatten)]
    pub(super) pace: Pace,
    pub(super) cells: Vec<Cell>,
}

/// Cells that differ only in their sequence lengths.
pub(super) struct Panel<'a> {
    /// The first cell's setting.
    pub(super) setting: Setting,
    pub(super) cells: Vec<&'a Cell>,
}

impl Cell {
    pub(super) fn new(setting: Setting, flops: f64, outcome: Outcome) -> Cell {
        let tflops = outcome.tflops(flops);
        Cell { setting, flops, tflops, outcome, paper: Published::of(&setting) }
    }
}

impl Report {
    /// Whether every cell has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.cells.iter().all(|cell| cell.tflops.is_some())
    }

    /// The cells grouped by head dimensions, mask and soft cap, in the order of measurement.
    pub(super) fn panels(&self) -> Vec<Panel<'_>> {
        let mut panels: Vec<Panel<'_>> = Vec::new();
        for cell in &self.cells {
            match panels.iter_mut().find(|panel| panel.setting.is_beside(&cell.setting)) {
                Some(panel) => panel.cells.push(cell),
                None => panels.push(Panel { setting: cell.setting, cells: vec![cell] }),
            }
        }
        panels
    }

    /// A table with a column for each sequence length, and for each panel a line, followed by the paper's numbers.
    fn table(&self) -> Table {
        let panels = self.panels();
        let lengths: Vec<String> =
            panels.first().iter().flat_map(|panel| &panel.cells).map(|cell| cell.setting.lengths()).collect();
        let heads = ["head_dim", "mask", "seqlen"].map(str::to_owned).into_iter();
        let mut rows = vec![heads.chain(lengths).collect()];
        for panel in panels {
            let mut row = |names: [String; 3], cell: &dyn Fn(&Cell) -> String| {
                rows.push(names.into_iter().chain(panel.cells.iter().map(|&x| cell(x))).collect());
            };
            let (head_dims, scores) = (panel.setting.head_dims(), panel.setting.scores());
            row([head_dims, scores, "here".to_owned()], &|cell| cell.outcome.cell(cell.flops));
            if panel.cells.iter().any(|cell| cell.paper.is_some()) {
                let papers = |number: fn(&Published) -> u32| {
                    move |cell: &Cell| {
                        cell.paper.as_ref().map_or("-".to_owned(), |paper| number(paper).to_string())
                    }
                };
                let names = |what: &str| [String::new(), String::new(), format!("paper: {what}")];
                row(names("FlashAttention-3"), &papers(|paper| paper.flash_attention_3));
                row(names("best other"), &papers(Published::best_other));
            }
        }
        Table { rows, left: 3 }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, pace, cells } = self;
        writeln!(f, "{machine}")?;
        let Some(Cell { setting: Setting { pass, dtype, .. }, .. }) = cells.first() else { return Ok(()) };
        let (pass, judged) = match pass {
            Pass::Forward => ("Forward", "rows of O and LSE"),
            Pass::Backward => ("Backward", "gradients of rows of O"),
        };
        write!(f, "{pass} pass, {dtype}, {}; TFLOP/s, {pace}", common_sizes(cells))?;
        if cells.iter().any(|cell| cell.paper.is_some()) {
            let paper = if *dtype == Dtype::E4m3 { "FP8" } else { "fp16" };
            write!(f, "; the paper's numbers are for {paper} on an H100 80GB SXM5")?;
        }
        writeln!(f, "\n\n{}\n", self.table())?;
        let rows: usize =
            cells.iter().filter_map(|cell| cell.outcome.timing()).map(|timing| timing.rows).sum();
        let errors = cells.iter().filter_map(|cell| cell.outcome.timing()).map(|timing| timing.error);
        let right = cells.iter().filter(|cell| cell.tflops.is_some()).count();
        write!(
            f,
            "{right} of {} results are right: {rows} {judged} judged, error / bound up to {:.2}",
            cells.len(),
            errors.fold(0.0, f64::max)
        )?;
        cells
            .iter()
            .filter_map(|cell| Some((cell, cell.outcome.fault()?)))
            .try_for_each(|(cell, fault)| write!(f, "\n{}: {fault}", cell.setting))
    }
}

/// The sizes that all settings have in common, and that the table does not show.
fn common_sizes(cells: &[Cell]) -> String {
    // The value of `number`, if it is equal in all settings.
    let same = |number: fn(&Setting) -> usize| {
        let mut numbers = cells.iter().map(|cell| number(&cell.setting));
        let first = numbers.next()?;
        numbers.all(|number| number == first).then(|| size_label(first))
    };
    let parts = [
        ("tokens", same(|x| x.batch * x.seqlen)),
        ("batch", same(|x| x.batch)),
        ("hidden size", same(|x| x.heads * x.head_dim)),
        ("heads", same(|x| x.heads)),
        ("heads_kv", same(|x| x.heads_kv)),
    ];
    let parts = parts.into_iter().filter_map(|(what, number)| Some(format!("{what} {}", number?)));
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
impl Report {
    /// Some of the paper's settings, up to `seqlen`: 600 TFLOP/s each, but for one that is wrong.
    pub(super) fn example(seqlen: usize) -> Report {
        use fa3_types::Mask;
        let settings = [(64, Mask::None), (64, Mask::Causal), (128, Mask::None), (128, Mask::Causal)];
        let lengths = [512, 1024, 2048, 4096, 8192, 16384].into_iter().filter(|&length| length <= seqlen);
        let settings =
            settings.into_iter().flat_map(|panel| lengths.clone().map(move |seqlen| (panel, seqlen)));
        let cells = settings.map(|((head_dim, mask), seqlen)| {
            let (heads, batch) = (2048 / head_dim, 16384 / seqlen);
            let setting = Setting::plain(Dtype::Bf16, head_dim, mask, (batch, seqlen, heads));
            let flops = setting.problem().expect("it is the paper's").forward_flops();
            let outcome = match (head_dim, mask, seqlen) {
                (128, Mask::Causal, 512) => Outcome::Wrong("o is off".to_owned()),
                _ => Outcome::checked(&[flops / 600e9, flops / 500e9, flops / 800e9]),
            };
            Cell::new(setting, flops, outcome)
        });
        Report {
            machine: Machine::example(),
            pace: Pace { rounds: 3, slice_ms: 25.0 },
            cells: cells.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::write;
    use serde_json::{Value, json};

    #[test]
    fn a_line_for_each_panel_and_the_papers_numbers_below() {
        let expected = "\
NVIDIA H100 80GB HBM3, 132 SMs, driver for CUDA 13.0, fa3 0.1.0
Forward pass, bf16, tokens 16k, hidden size 2k; TFLOP/s, medians of 3 rounds of 25 ms; the paper's numbers are for fp16 on an H100 80GB SXM5

head_dim  mask    seqlen                     512   1k
64        none    here                       600  600
                  paper: FlashAttention-3    333  392
                  paper: best other          340  382
64        causal  here                       600  600
                  paper: FlashAttention-3    197  265
                  paper: best other          225  291
128       none    here                       600  600
                  paper: FlashAttention-3    467  565
                  paper: best other          497  574
128       causal  here                     WRONG  600
                  paper: FlashAttention-3    292  423
                  paper: best other          315  410

7 of 8 results are right: 420 rows of O and LSE judged, error / bound up to 0.50
head_dim 128, mask causal, seqlen 512: WRONG: o is off";
        let report = Report::example(1024);
        let text = report.to_string();
        assert_eq!(text, expected);
        assert!(!report.is_whole());
    }

    #[test]
    fn other_settings_stand_alone() {
        let Report { machine, pace, cells } = Report::example(512);
        let mut setting = cells[0].setting;
        (setting.batch, setting.heads_kv) = (1, 8);
        let cell = Cell::new(setting, 1e9, Outcome::Failed("out of memory".to_owned()));
        let text = Report { machine, pace, cells: vec![cell] }.to_string();
        assert!(!text.contains("paper"), "{text}");
        assert!(text.contains("tokens 512, batch 1, hidden size 2k, heads 32, heads_kv 8;"), "{text}");
        assert!(text.ends_with("\nhead_dim 64, mask none, seqlen 512: failed: out of memory"), "{text}");
    }

    #[test]
    fn everything_is_in_the_json() {
        let text = write::json(&Report::example(512));
        let report: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!((&report["rounds"], &report["slice_ms"]), (&json!(3), &json!(25.0)));
        let machine = json!({ "gpu": "NVIDIA H100 80GB HBM3", "sms": 132, "cuda": "13.0", "fa3": "0.1.0" });
        assert_eq!(report["machine"], machine);
        let [first, .., last] = report["cells"].as_array().unwrap().as_slice() else { panic!("four cells") };
        // 4 · seqlen² · head_dim · batch · heads = 4 · 512² · 64 · 32 · 32.
        let flops = 68_719_476_736.0;
        let expected = json!({
            "pass": "forward", "dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "mask": "none", "softcap": null,
            "seqlen": 512, "seqlen_k": 512, "batch": 32, "heads": 32, "heads_kv": 32,
            "flops": flops,
            "outcome": { "checked": {
                "plan": "128 x 128; linear; static persistent",
                "launches": 9,
                "millis": [flops / 600e9, flops / 500e9, flops / 800e9],
                "median": flops / 600e9,
                "rows": 60,
                "error": 0.5,
            }},
            "tflops": first["tflops"].as_f64().unwrap(),
            "paper": {
                "standard": 52, "flash_attention_2": 282, "triton": 340, "cudnn": 335, "flash_attention_3": 333,
            },
        });
        assert_eq!(first, &expected);
        assert!((first["tflops"].as_f64().unwrap() - 600.0).abs() < 1e-9);
        assert_eq!((&last["outcome"], &last["tflops"]), (&json!({ "wrong": "o is off" }), &Value::Null));
    }
}
