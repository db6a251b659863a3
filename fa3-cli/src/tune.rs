//! `fa3 tune`: finds the fastest tiles, tile orders and clusters on a GPU.

mod candidates;
mod ranking;

use std::error::Error;
use std::path::PathBuf;

use fa3::cuda::Device;
use fa3_sched::forward::PlanError;
use fa3_types::{Dtype, KnownProblem};
use serde::Serialize;

use crate::args::number::half;
use crate::console;
use crate::gpu::GpuArgs;
use crate::grid::{GridArgs, Setting};
use crate::measure::{self, Machine, Pace};
use crate::progress;
use crate::threads;
use crate::write;
use candidates::{Candidate, candidates};
use ranking::Ranking;

pub(crate) const ABOUT: &str = "\
Looks for faster forward passes than the tile table's on a Hopper GPU. For each setting it tries tiles that fit an \
SM and are close to the table's (wider and narrower blocks, more and fewer rows with their warpgroups, stages, \
ping-pong, the pipelines of Algorithms 1, 2 and 4), the other choice of clusters, and, under a mask, other section \
sizes.

All candidates take turns, so that whatever slows the GPU down affects all of them, and each result is checked as in \
fa3 bench. The result is a ranking for each setting, with speeds relative to the plan's: evidence for the table on \
this GPU.

Every candidate is compiled, so a setting takes a while; fewer settings take less.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 tune --head-dim 128 --causal --seqlen 4k,8k
  fa3 tune --json tune.json

Exit code: 0, or 1 if a result is wrong or there is none, or 2 without a Hopper GPU.")]
pub(crate) struct Options {
    #[command(flatten)]
    grid: GridArgs,
    /// Elements of Q, K and V, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value_t = Dtype::Bf16, value_parser = half)]
    dtype: Dtype,
    #[command(flatten)]
    pace: Pace,
    #[command(flatten)]
    gpu: GpuArgs,
    /// Writes every measurement, with each round listed separately
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// A setting that no kernel computes.
#[derive(Debug, thiserror::Error)]
#[error("{setting}: {source}")]
struct NoPlan {
    setting: Box<Setting>,
    source: PlanError,
}

/// Everything measured.
#[derive(Debug, Serialize)]
struct Report {
    machine: Machine,
    #[serde(flatten)]
    pace: Pace,
    settings: Vec<Ranking>,
}

/// Measures, prints and writes. False if a result is wrong or missing.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let settings = options.grid.settings(options.dtype)?;
    let [json] = write::open([options.json.as_deref()], &[])?;
    let device = options.gpu.open()?;
    threads::start()?;
    let machine = Machine::of(&device);
    console::print(&format_args!("{machine}\nTFLOP/s, {}, all in turns\n", options.pace));
    let report = Report { machine, pace: options.pace, settings: measure(&device, settings, options.pace)? };
    console::print(&ranking::winners(&report.settings));
    write::write_below(json.map(|file| (file, write::json(&report))).into_iter().collect())?;
    Ok(report.settings.iter().all(Ranking::is_whole))
}

/// Measures all settings, and prints each setting's ranking as soon as it is known.
fn measure(
    device: &Device,
    settings: Vec<(Setting, KnownProblem)>,
    pace: Pace,
) -> Result<Vec<Ranking>, NoPlan> {
    let limits = device.limits();
    let jobs = settings.into_iter().map(|(setting, problem)| match candidates(&problem, &limits) {
        Ok(candidates) => Ok((setting, problem, candidates)),
        Err(source) => Err(NoPlan { setting: Box::new(setting), source }),
    });
    let jobs: Vec<(Setting, KnownProblem, Vec<Candidate>)> = jobs.collect::<Result<_, _>>()?;
    let progress = progress::bar(jobs.iter().map(|(.., these)| measure::steps(these.len(), pace)).sum());
    let rankings = jobs.into_iter().map(|(setting, problem, candidates)| {
        progress.set_message(format!("{setting}, {} candidates", candidates.len()));
        let options: Vec<_> = candidates.iter().map(|candidate| candidate.options).collect();
        let outcomes = measure::race(device, &problem, &options, pace, &progress);
        let outcomes = candidates.into_iter().zip(outcomes).collect();
        let ranking = Ranking::new(setting, problem.forward_flops(), outcomes);
        progress.suspend(|| console::print(&format_args!("{ranking}\n")));
        ranking
    });
    let rankings = rankings.collect();
    progress.finish_and_clear();
    Ok(rankings)
}
