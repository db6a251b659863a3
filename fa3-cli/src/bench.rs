//! `fa3 bench`: the speed of attention on a GPU, next to the paper's Figures 5 to 7 and Table 2.

mod ablation;
mod chart;
mod report;

use std::error::Error;
use std::path::PathBuf;

use fa3::cuda::Device;
use fa3_sched::forward::PlanOptions;
use fa3_types::{Dtype, KnownProblem};

use crate::args::number::{NotThat, half};
use crate::console;
use crate::gpu::GpuArgs;
use crate::grid::{self, GridArgs, Pass, Setting};
use crate::measure::{self, Machine, Pace};
use crate::progress;
use crate::threads;
use crate::write;
use report::{Cell, Report};

pub(crate) const ABOUT: &str = "\
Measures attention on a Hopper GPU and prints TFLOP/s as the FlashAttention-3 paper counts them: 4 · seqlen² · \
head_dim · heads · batch, halved under a causal mask, and 2.5 times as many in the backward pass. The default settings \
are from the paper's Figure 5; its numbers (fp16, on an H100 80GB SXM5) are printed where they apply, or the numbers \
of Figure 6 with --backward, or of Figure 7 with --dtype e4m3.

Each setting is timed by CUDA events around back-to-back launches, some milliseconds per round, and the median of \
the rounds is reported. Inputs are from N(0, 1), as in the paper. Every reported result is checked: O and LSE are \
computed into buffers filled with NaN, and no NaN may remain; rows of all kinds are checked by the error law against \
f64 arithmetic; and a launch after the timed ones must give the same bits. In the backward pass, launches before and \
after the timed ones have a dO with one row for each head of K and V: all elements of their dQ, dK and dV are checked.

Boards throttle: numbers of different runs are comparable only to within a few percent. With --ablation, all \
variants of a kernel are measured in turns.

The folder bench of the repository measures everything else, and other libraries: decoding, latent attention, packed \
sequences, deterministic gradients.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 bench --json bench.json --svg bench.svg
  fa3 bench --head-dim 128 --causal --window 1024,0 --seqlen 8k,64k --tokens 64k --heads 32 --heads-kv 8
  fa3 bench --backward --head-dim 64,128 --no-mask
  fa3 bench --dtype e4m3 --head-dim 256
  fa3 bench --ablation

Exit code: 0, or 1 if a result is wrong or there is none, or 2 without a Hopper GPU.")]
pub(crate) struct Options {
    /// Measures the paper's Table 2 instead, (batch, seqlen, heads, head_dim) = (4, 8448, 16, 128): the gain of each of
    /// the kernel's techniques
    #[arg(long, conflicts_with_all = grid::OPTIONS.split(' '), conflicts_with = "svg")]
    ablation: bool,
    /// Measures the backward pass
    #[arg(long, conflicts_with = "ablation")]
    backward: bool,
    #[command(flatten)]
    grid: GridArgs,
    /// Elements of Q, K and V, bf16, f16 or e4m3; bf16 if absent, f16 with --ablation
    #[arg(long, value_name = "TYPE", value_parser = measured)]
    dtype: Option<Dtype>,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Writes every measurement, with each round listed separately
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draws bars as in the paper's figure
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Reads an element type that is measured.
fn measured(text: &str) -> Result<Dtype, NotThat> {
    half(text).or_else(|_| text.parse().ok().filter(|dtype| *dtype == Dtype::E4m3).ok_or(NotThat::Measured))
}

/// A type that the ablation has no forms for: its tiles are of 16 bits.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("--ablation has forms of bf16 and f16 kernels, not of e4m3")]
struct NoForms;

/// Measures, prints and writes. False if a result is wrong or missing.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let dtype = options.dtype.unwrap_or(if options.ablation { Dtype::F16 } else { Dtype::Bf16 });
    if options.ablation && dtype == Dtype::E4m3 {
        return Err(NoForms.into());
    }
    let settings = options.grid.settings(dtype)?;
    let [json, svg] = write::open([options.json.as_deref(), options.svg.as_deref()], &[])?;
    let device = options.gpu.open()?;
    threads::start()?;
    let mut files = Vec::new();
    let is_whole = if options.ablation {
        let report = ablation::measure(&device, dtype, options.pace)?;
        console::print(&report);
        files.extend(json.map(|file| (file, write::json(&report))));
        report.is_whole()
    } else {
        let pass = if options.backward { Pass::Backward } else { Pass::Forward };
        let report = measure(&device, pass, settings, options.pace);
        console::print(&report);
        files.extend(json.map(|file| (file, write::json(&report))));
        if let Some(file) = svg {
            files.push((file, chart::draw(&report)?.into_bytes()));
        }
        report.is_whole()
    };
    write::write_below(files)?;
    Ok(is_whole)
}

/// Measures each setting with the default plan.
fn measure(device: &Device, pass: Pass, settings: Vec<(Setting, KnownProblem)>, pace: Pace) -> Report {
    let progress = progress::bar(settings.len() * measure::steps(1, pace));
    let cells = settings.into_iter().map(|(setting, problem)| {
        progress.set_message(setting.to_string());
        let outcome = match pass {
            Pass::Forward => {
                let outcome = measure::race(device, &problem, &[PlanOptions::default()], pace, &progress);
                outcome.into_iter().next().expect("one way to compute has one outcome")
            }
            Pass::Backward => measure::backward(device, &problem, pace, &progress),
        };
        Cell::new(Setting { pass, ..setting }, pass.flops(&problem), outcome)
    });
    let cells = cells.collect();
    progress.finish_and_clear();
    Report { machine: Machine::of(device), pace, cells }
}
