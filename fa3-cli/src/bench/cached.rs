//! Attention of new tokens over a cache, for figures by the number of keys.

mod chart;
mod report;

use std::error::Error;
use std::path::PathBuf;

use fa3::cuda::Device;
use fa3_types::{Dtype, Mask, Problem, ProblemError, ProblemSpec, Shape};
use serde::Serialize;

use crate::args::number::{half, size_label};
use crate::cache::CacheLayout;
use crate::console;
use crate::gpu::GpuArgs;
use crate::measure::{self, Machine, Pace, cached};
use crate::progress;
use crate::threads;
use crate::write;
use report::{Cell, Report};
pub(super) use report::{Figure, GIGABYTES, MICROS, TERABYTES, TFLOPS};

/// Skewed lengths: all sequences but the first one have so many times fewer keys.
const SKEW: usize = 16;

/// Options of all figures of caches.
#[derive(Debug, clap::Args)]
pub(super) struct CachedArgs {
    /// Elements of Q, K and V, bf16 or f16
    #[arg(long, value_name = "TYPE", value_parser = half, default_value_t = Dtype::Bf16)]
    pub(super) dtype: Dtype,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Writes everything measured, each round apart
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draws the figure, lines by the number of keys
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Attention of new tokens over a cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Setting {
    #[serde(serialize_with = "crate::grid::text")]
    pub(super) dtype: Dtype,
    pub(super) head_dim: usize,
    /// Columns of latent vectors, if it is latent attention. K and V are then views of one cache.
    pub(super) latent: Option<usize>,
    pub(super) heads: usize,
    pub(super) heads_kv: usize,
    pub(super) seqlen_q: usize,
    pub(super) page_size: Option<usize>,
    pub(super) skewed: bool,
    pub(super) batch: usize,
    pub(super) seqlen_k: usize,
}

/// Why the options describe no settings.
#[derive(Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(super) enum SettingError {
    #[error(
        "there is nothing to compute with batch {batch}, seqlen {seqlen_q} x {seqlen_k}, heads {heads}, head_dim {head_dim}"
    )]
    Empty { batch: usize, seqlen_q: usize, seqlen_k: usize, heads: usize, head_dim: usize },
    #[error("{seqlen_q} new tokens are more than the {seqlen} keys of a sequence")]
    Tokens { seqlen_q: usize, seqlen: usize },
    #[error("batch {batch}, seqlen_k {}: {source}", size_label(*seqlen_k))]
    Problem { batch: usize, seqlen_k: usize, source: ProblemError },
}

/// Settings with their problems.
///
/// # Errors
/// The first one that nothing computes.
pub(super) fn with_problems(
    settings: impl Iterator<Item = Setting>,
) -> Result<Vec<(Setting, Problem)>, SettingError> {
    settings.map(|setting| Ok((setting, setting.problem()?))).collect()
}

/// Measures, prints and writes. False if a result is wrong or missing.
///
/// # Errors
/// No GPU, or a file that cannot be written.
pub(super) fn run(
    figure: &'static Figure,
    settings: Vec<(Setting, Problem)>,
    args: &CachedArgs,
) -> Result<bool, Box<dyn Error>> {
    let [json, svg] = write::open([args.json.as_deref(), args.svg.as_deref()], &[])?;
    let device = args.gpu.open()?;
    threads::start()?;
    let report = measure(&device, figure, settings, args.pace);
    console::print(&report);
    let mut files = Vec::new();
    files.extend(json.map(|file| (file, write::json(&report))));
    if let Some(file) = svg {
        files.push((file, chart::draw(&report)?.into_bytes()));
    }
    if !files.is_empty() {
        console::print(&"");
    }
    write::write(&files)?;
    Ok(report.is_whole())
}

fn measure(
    device: &Device,
    figure: &'static Figure,
    settings: Vec<(Setting, Problem)>,
    pace: Pace,
) -> Report {
    let progress = progress::bar(settings.len() * measure::steps(1, pace));
    let cells = settings.into_iter().map(|(setting, problem)| {
        let Setting { heads, batch, seqlen_k, .. } = setting;
        progress.set_message(format!("heads {heads}, batch {batch}, keys {}", size_label(seqlen_k)));
        let outcome = cached::measure(device, &problem, &setting.layout(), pace, &progress);
        Cell::new(setting, outcome)
    });
    let cells = cells.collect();
    progress.finish_and_clear();
    Report { figure, machine: Machine::of(device), pace, cells }
}

impl Setting {
    /// The cache of all sequences.
    pub(super) fn layout(&self) -> CacheLayout {
        let mut seqlens = vec![if self.skewed { self.seqlen_k / SKEW } else { self.seqlen_k }; self.batch];
        seqlens.iter_mut().take(1).for_each(|first| *first = self.seqlen_k);
        CacheLayout { seqlens, room: 0, page_size: self.page_size }
    }

    /// # Errors
    /// A setting that nothing computes.
    pub(super) fn problem(&self) -> Result<Problem, SettingError> {
        let &Setting { dtype, head_dim, heads, heads_kv, seqlen_q, batch, seqlen_k, .. } = self;
        if [batch, seqlen_q, seqlen_k, heads, head_dim].contains(&0) {
            return Err(SettingError::Empty { batch, seqlen_q, seqlen_k, heads, head_dim });
        }
        let layout = self.layout();
        if let Some(&seqlen) = layout.seqlens.iter().find(|&&seqlen| seqlen < seqlen_q) {
            return Err(SettingError::Tokens { seqlen_q, seqlen });
        }
        let [entries, rows] = layout.extent();
        let q = Shape { batch, seqlen: seqlen_q, heads, head_dim };
        let kv = Shape { batch: entries, seqlen: rows, heads: heads_kv, head_dim };
        let spec = match self.latent {
            Some(columns) => cached::latent(dtype, q, kv, columns),
            None => ProblemSpec::dense(dtype, q, kv),
        };
        let spec = spec.mask(Mask::Causal).seqs_k(layout.sequences().longest(seqlen_k));
        spec.validate().map_err(|source| SettingError::Problem { batch, seqlen_k, source })
    }

    /// Rows of the cache in use.
    fn rows(&self) -> usize {
        self.layout().seqlens.iter().sum()
    }

    /// Bytes of keys and values in use.
    pub(super) fn bytes(&self) -> f64 {
        let columns = self.head_dim + self.latent.unwrap_or(self.head_dim);
        (self.rows() * self.heads_kv * columns * self.dtype.bytes()) as f64
    }

    /// Operations of both products of each new row and key, the mask left aside.
    pub(super) fn flops(&self) -> f64 {
        let of_scores = self.head_dim + self.latent.unwrap_or(0);
        let columns = of_scores + self.latent.unwrap_or(self.head_dim);
        (2 * self.heads * self.seqlen_q * columns * self.rows()) as f64
    }
}

#[cfg(test)]
pub(super) use command::{examples, parse};

#[cfg(test)]
mod command {
    use clap::{Args, CommandFactory, Parser};

    #[derive(Parser)]
    struct Command<T: Args> {
        #[command(flatten)]
        options: T,
    }

    /// The options that these words say.
    pub(in crate::bench) fn parse<T: Args>(words: &str) -> T {
        let words = std::iter::once("fa3").chain(words.split_whitespace());
        Command::try_parse_from(words).unwrap().options
    }

    /// The options of each example in the help of the figure of this name.
    pub(in crate::bench) fn examples<T: Args>(figure: &str) -> Vec<String> {
        let help = Command::<T>::command().get_after_help().unwrap().to_string();
        let before = format!("  fa3 bench {figure} ");
        help.lines().filter_map(|line| line.strip_prefix(&before)).map(str::to_owned).collect()
    }
}
