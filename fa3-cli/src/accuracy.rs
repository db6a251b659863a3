//! `fa3 accuracy`: the error of attention in 16 and 8 bits, next to the paper's Table 3.

mod activations;
mod chart;
mod computer;
mod cpu;
mod distributions;
mod drift;
mod gpu;
mod method;
mod recipe;
mod report;
mod sample;
mod table;

use std::error::Error;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::args::number::{NotThat, size};
use crate::console;
use crate::progress;
use crate::threads;
use crate::write;
use activations::Activations;
use computer::Computer;
use gpu::Gpu;
use method::Method;
use report::Report;

pub(crate) const ABOUT: &str = "\
Measures the error of attention in fp16 and in FP8 against f64 arithmetic, and prints it next to Table 3 of the \
FlashAttention-3 paper. Then shows how the output of FP8 attention shrinks as the number of keys grows, with the \
tensor cores' accumulator alone and with two-level accumulation.

FP8 is emulated on the CPU with the arithmetic of Hopper's tensor cores. With --gpu, this library's kernels compute \
FlashAttention-3 in fp16 and in FP8, including quantization, and the results with two-level accumulation in the \
second table. Standard attention, FlashAttention-2 and the f64 arithmetic stay on the CPU.

With --input, Q, K and V are read from a file, and only the errors of the same methods on them are printed.

The full tables take about 20 minutes on one core, less on several cores or with --gpu. --quick takes seconds. The \
exit code is 1 if a result is not as expected.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 accuracy --quick
  fa3 accuracy --json accuracy.json --svg accuracy.svg
  fa3 accuracy --gpu
  fa3 accuracy --quick --seqlen 4k
  fa3 accuracy --input data/minilm_layer5.safetensors")]
pub(crate) struct Options {
    /// Takes seconds: 1024 keys, where the paper's numbers do not apply, and 3 seeds
    #[arg(long)]
    quick: bool,
    /// Rows and keys of Table 3, in place of 8448, or of 1024 with --quick; the paper's numbers are for 8448 alone. The
    /// time of a CPU grows with the square; k is 1024
    #[arg(long, value_name = "N", value_parser = seqlen)]
    seqlen: Option<usize>,
    /// Computes with this library's kernels, on the first Hopper GPU, what they can compute
    #[arg(long)]
    gpu: bool,
    /// Measures on tensors q, k and v of a safetensors file, (batch, seqlen, heads, head_dim) each
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "svg", "seqlen"])]
    input: Option<PathBuf>,
    /// The start of the names of these tensors, as in `layer0.`
    #[arg(long, requires = "input")]
    prefix: Option<String>,
    /// Writes every measurement, with each seed listed separately
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draws both tables
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// The most rows of Table 3: with these, the CPU's part takes two days of a core.
const MOST_ROWS: u32 = 1 << 17;

/// The extent of the measurements.
struct Settings {
    /// Keys and queries of Table 3.
    seqlen: usize,
    seeds: RangeInclusive<u64>,
    /// Keys of the drift table's rows.
    drift_keys: &'static [usize],
}

const FULL: Settings =
    Settings { seqlen: table::PAPER_SEQLEN, seeds: 1..=6, drift_keys: &[1 << 10, 1 << 12, 1 << 14, 1 << 16] };
const QUICK: Settings = Settings { seqlen: 1024, seeds: 1..=3, drift_keys: &[1 << 10, 1 << 12] };

/// Measures, prints each result as soon as it is known, and writes the files. False if a result is not as expected.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let inputs = options.input.as_slice();
    let [json, svg] = write::open([options.json.as_deref(), options.svg.as_deref()], inputs)?;
    let computer = Computer(options.gpu.then(Gpu::open).transpose()?);
    threads::start()?;
    if let Some(path) = &options.input {
        let prefix = options.prefix.as_deref().unwrap_or_default();
        let activations = measure_activations(path, prefix, &computer)?;
        write::write_below(json.map(|file| (file, write::json(&activations))).into_iter().collect())?;
        return Ok(true);
    }
    let settings = if options.quick { QUICK } else { FULL };
    let seqlen = options.seqlen.unwrap_or(settings.seqlen);
    let report = measure(Settings { seqlen, ..settings }, &computer)?;
    console::print(&report);
    let mut files: Vec<_> = json.map(|file| (file, write::json(&report))).into_iter().collect();
    if let Some(file) = svg {
        files.push((file, chart::draw(&report)?.into_bytes()));
    }
    write::write_below(files)?;
    Ok(report.is_as_expected())
}

/// Reads a number of rows from 1 to [`MOST_ROWS`].
fn seqlen(text: &str) -> Result<usize, NotThat> {
    let rows = size(text).ok().filter(|rows| (1..=MOST_ROWS as usize).contains(rows));
    rows.ok_or(NotThat::Whole { most: MOST_ROWS })
}

fn measure_activations(
    path: &Path,
    prefix: &str,
    computer: &Computer,
) -> Result<Activations, Box<dyn Error>> {
    let seeds = FULL.seeds;
    let progress = progress::bar(seeds.clone().count() * Method::ALL.len());
    progress.set_message("f64 reference");
    let (sample, gpu) = (&activations::read(path, prefix)?, computer.gpu());
    let head = activations::head(path, sample, seeds.clone().count(), gpu);
    progress.suspend(|| console::print(&head));
    let samples: Vec<_> = seeds.map(|seed| (seed, sample)).collect();
    let print = |row: &table::Row| progress.suspend(|| console::print(row));
    let rows = table::rows(&samples, |_| None, computer, &progress, &print)?;
    progress.finish_and_clear();
    Ok(Activations::new(path, gpu, sample, rows))
}

fn measure(settings: Settings, computer: &Computer) -> Result<Report, Box<dyn Error>> {
    let jobs = settings.seeds.clone().count() * (Method::ALL.len() + 1) + settings.drift_keys.len();
    let progress = progress::bar(jobs);
    let (seqlen, head_dim, gpu) = (settings.seqlen, table::HEAD_DIM, computer.gpu());
    let print = |text: &dyn Display| progress.suspend(|| console::print(&text));
    print(&report::head(seqlen, head_dim, settings.seeds.clone().count(), gpu));
    let table = table::measure(seqlen, settings.seeds, computer, &progress, &print)?;
    print(&report::drift_head(computer.place()));
    let drift = drift::measure(settings.drift_keys, computer, &progress, &print)?;
    progress.finish_and_clear();
    Ok(Report { seqlen, head_dim, gpu: gpu.map(str::to_owned), table, drift })
}
