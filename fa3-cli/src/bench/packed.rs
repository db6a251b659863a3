//! Both passes over packed sequences, by mixes of their lengths.

use std::fmt;
use std::path::PathBuf;

use fa3::cuda::Device;
use fa3_sched::forward::PlanOptions;
use serde::Serialize;

use super::mix::{Mix, Mixes, NoMix};
use crate::grid::PackedSetting;
use crate::measure::{self, Machine, Outcome, Pace};
use crate::progress;
use crate::table::Table;

/// Operations of the backward pass, as the FlashAttention papers count them, by those of the forward pass.
const OF_GRADIENTS: f64 = 2.5;

/// Which packed sequences to measure, if any.
#[derive(Debug, clap::Args)]
pub(super) struct PackedArgs {
    /// Packed sequences instead: mixes of lengths such as 8192+64x128, zipf, odd; or all, which are those of
    /// docs/packed.md
    #[arg(
        long,
        value_name = "MIX,..",
        value_delimiter = ',',
        group = "sequences",
        conflicts_with_all = ["ablation", "svg", "seqlen", "seqlen_k", "batch", "tokens"]
    )]
    mix: Vec<Mixes>,
    /// Packed sequences instead, of the lengths in a file, numbers between blanks
    #[arg(
        long,
        value_name = "FILE",
        group = "sequences",
        conflicts_with_all = ["mix", "ablation", "svg", "seqlen", "seqlen_k", "batch", "tokens"]
    )]
    lengths: Option<PathBuf>,
    /// Gradients of packed sequences in place of the forward pass
    #[arg(long, requires = "sequences")]
    backward: bool,
    /// Gradients that are the same bits in every run
    #[arg(long, requires = "backward")]
    deterministic: bool,
    /// Packed sequences on the CPU
    #[arg(long, requires = "sequences", conflicts_with = "device")]
    pub(super) cpu: bool,
}

/// Where they are computed.
pub(super) enum Place {
    Gpu(Device),
    Cpu,
}

/// The pass that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Pass {
    Forward,
    Backward { deterministic: bool },
}

/// Where it was measured.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum Host {
    Gpu(Machine),
    Cpu { threads: usize, fa3: &'static str },
}

/// A setting and its outcome.
#[derive(Clone, Debug, Serialize)]
struct Cell {
    #[serde(flatten)]
    setting: PackedSetting,
    /// How many sequences, and rows of all of them.
    sequences: usize,
    tokens: usize,
    flops: f64,
    outcome: Outcome,
    tflops: Option<f64>,
}

/// Everything measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Report {
    machine: Host,
    pass: Pass,
    #[serde(flatten)]
    pace: Pace,
    cells: Vec<Cell>,
}

impl PackedArgs {
    /// The mixes, if packed sequences are asked for.
    ///
    /// # Errors
    /// Those of the file.
    pub(super) fn mixes(&self) -> Result<Option<Vec<Mix>>, NoMix> {
        if let Some(path) = &self.lengths {
            return Ok(Some(vec![Mix::read(path)?]));
        }
        let mixes: Vec<Mix> = self.mix.iter().flat_map(|Mixes(mixes)| mixes.iter().cloned()).collect();
        Ok((!mixes.is_empty()).then_some(mixes))
    }

    /// The pass.
    pub(super) fn pass(&self) -> Pass {
        match self.backward {
            true => Pass::Backward { deterministic: self.deterministic },
            false => Pass::Forward,
        }
    }
}

/// Measures a pass in all settings.
pub(super) fn measure(place: &Place, settings: Vec<PackedSetting>, pass: Pass, pace: Pace) -> Report {
    let progress = progress::bar(settings.len() * measure::steps(1, pace));
    let cells = settings.into_iter().map(|setting| {
        progress.set_message(setting.to_string());
        let spec = setting.spec();
        let problem = setting.problem().expect("settings are of valid problems");
        let outcome = match (place, pass) {
            (Place::Cpu, pass) => {
                measure::race_on_cpu((&spec, &problem), pass != Pass::Forward, pace, &progress)
            }
            (Place::Gpu(device), Pass::Forward) => {
                let outcomes = measure::race(device, &problem, &[PlanOptions::default()], pace, &progress);
                outcomes.into_iter().next().expect("one way to compute has one outcome")
            }
            (Place::Gpu(device), Pass::Backward { deterministic }) => {
                measure::race_of_gradients(device, (&spec, &problem), deterministic, pace, &progress)
            }
        };
        let more = if pass == Pass::Forward { 1.0 } else { OF_GRADIENTS };
        let flops = more * problem.forward_flops();
        let (sequences, tokens) = (problem.batch(), problem.q().shape.seqlen);
        let tflops = outcome.tflops(flops);
        Cell { setting, sequences, tokens, flops, tflops, outcome }
    });
    let cells = cells.collect();
    progress.finish_and_clear();
    let machine = match place {
        Place::Gpu(device) => Host::Gpu(Machine::of(device)),
        Place::Cpu => Host::Cpu { threads: rayon::current_num_threads(), fa3: env!("CARGO_PKG_VERSION") },
    };
    Report { machine, pass, pace, cells }
}

impl Report {
    /// Whether every cell has a time.
    pub(super) fn is_whole(&self) -> bool {
        self.cells.iter().all(|cell| cell.tflops.is_some())
    }

    /// A line for each shape and mask, a column for each mix.
    fn table(&self) -> Table {
        let key = |cell: &Cell| {
            let PackedSetting { heads, heads_kv, .. } = cell.setting;
            [cell.setting.head_dims(), format!("{heads}/{heads_kv}"), cell.setting.scores()]
        };
        let mut rows: Vec<Vec<String>> = Vec::new();
        let mut mixes = Vec::new();
        for cell in &self.cells {
            if rows.last().is_none_or(|row| row[..3] != key(cell)) {
                rows.push(key(cell).into());
            }
            if rows.len() == 1 {
                mixes.push(cell.setting.mix.to_string());
            }
            let digits = self.digits();
            let text = cell.tflops.map(|tflops| format!("{tflops:.digits$}"));
            let text = text.unwrap_or_else(|| cell.outcome.cell(cell.flops));
            rows.last_mut().expect("there is one").push(text);
        }
        let heads = ["head_dim", "heads", "mask"].map(str::to_owned).into_iter();
        rows.insert(0, heads.chain(mixes).collect());
        Table { rows, left: 3 }
    }

    /// Digits behind the point: a CPU has few TFLOP/s.
    fn digits(&self) -> usize {
        if matches!(self.machine, Host::Cpu { .. }) { 3 } else { 0 }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Gpu(machine) => machine.fmt(f),
            Host::Cpu { threads, fa3 } => write!(f, "CPU, {threads} threads, fa3 {fa3}"),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { machine, pass, pace, cells } = self;
        let Some(first) = cells.first() else { return write!(f, "{machine}") };
        let (pass, judged) = match pass {
            Pass::Forward => ("Forward pass", "O and LSE"),
            Pass::Backward { deterministic: false } => ("Backward pass", "dQ, dK and dV"),
            Pass::Backward { deterministic: true } => ("Deterministic backward pass", "dQ, dK and dV"),
        };
        writeln!(f, "{machine}\n{pass} over packed sequences, {}; TFLOP/s, {pace}", first.setting.dtype)?;
        writeln!(f, "\n{}\n", self.table())?;
        let timings = || cells.iter().filter_map(|cell| cell.outcome.timing());
        let rows: usize = timings().map(|timing| timing.rows).sum();
        let error = timings().map(|timing| timing.error).fold(0.0, f64::max);
        let (right, all) = (timings().count(), cells.len());
        write!(
            f,
            "{right} of {all} results are right: {rows} rows of {judged} judged, error / bound up to {error:.2}"
        )?;
        cells
            .iter()
            .filter_map(|cell| Some((cell, cell.outcome.fault()?)))
            .try_for_each(|(cell, fault)| write!(f, "\n{}: {fault}", cell.setting))
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask};
    use serde_json::{Value, json};

    use super::*;
    use crate::write;

    fn report() -> Report {
        let mixes = ["zipf", "8192+64x128"].map(|mix| mix.parse::<Mix>().unwrap());
        let settings = [Mask::None, Mask::Causal].into_iter().flat_map(|mask| {
            mixes.clone().map(|mix| PackedSetting {
                dtype: Dtype::Bf16,
                head_dim: 128,
                head_dim_v: 128,
                mask,
                softcap: None,
                mix,
                heads: 32,
                heads_kv: 8,
            })
        });
        let cells = settings.map(|setting| {
            let problem = setting.problem().unwrap();
            let flops = problem.forward_flops();
            let outcome = match (setting.mask, setting.mix.to_string().as_str()) {
                (Mask::Causal, "zipf") => Outcome::Failed("out of memory".to_owned()),
                _ => Outcome::checked(&[flops / 600e9]),
            };
            let (sequences, tokens, tflops) =
                (problem.batch(), problem.q().shape.seqlen, outcome.tflops(flops));
            Cell { setting, sequences, tokens, flops, tflops, outcome }
        });
        let pace = Pace { rounds: 3, slice_ms: 25.0 };
        Report { machine: Host::Gpu(Machine::example()), pass: Pass::Forward, pace, cells: cells.collect() }
    }

    #[test]
    fn a_line_for_each_mask_and_a_column_for_each_mix() {
        let expected = "\
NVIDIA H100 80GB HBM3, 132 SMs, driver for CUDA 13.0, fa3 0.1.0
Forward pass over packed sequences, bf16; TFLOP/s, medians of 3 rounds of 25 ms

head_dim  heads  mask      zipf  8192+64x128
128       32/8   none       600          600
128       32/8   causal  failed          600

3 of 4 results are right: 180 rows of O and LSE judged, error / bound up to 0.50
head_dim 128, heads 32/8, mask causal, zipf: failed: out of memory";
        assert_eq!(report().to_string(), expected);
        assert!(!report().is_whole());
        let gradients = Report { pass: Pass::Backward { deterministic: true }, ..report() };
        let text = gradients.to_string();
        assert!(
            text.contains("\nDeterministic backward pass over packed")
                && text.contains("dQ, dK and dV judged")
        );
    }

    #[test]
    fn everything_is_in_the_json() {
        let report: Value = serde_json::from_slice(&write::json(&report())).unwrap();
        assert_eq!((&report["pass"], &report["rounds"]), (&json!("forward"), &json!(3)));
        let first = &report["cells"][0];
        assert_eq!(
            (&first["mix"], &first["sequences"], &first["tokens"]),
            (&json!("zipf"), &json!(32), &json!(26698))
        );
        assert!((first["tflops"].as_f64().unwrap() - 600.0).abs() < 1e-9);
        assert_eq!(report["cells"][2]["tflops"], Value::Null);
    }
}
