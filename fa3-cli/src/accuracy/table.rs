//! Table 3 of the paper: root mean square error against attention in f64, in fp16 and in FP8.
//!
//! The problem is one head of head_dim 128, without a mask, on inputs with outliers. The f64 reference uses the
//! unrounded inputs, so the rounding of inputs counts as error. The paper does not state a sequence length; 8448 is the
//! length in its Table 2.

use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;

use fa3_ref::norms::ErrorNorms;
use indicatif::ProgressBar;
use serde::Serialize;

use super::computer::{Computer, Processor};
use super::distributions::outlier;
use super::method::Method;
use super::sample::Sample;
use crate::measure::median;

pub(super) const PAPER_SEQLEN: usize = 8448;
pub(super) const HEAD_DIM: usize = 128;

/// The lines above a table: `lines`, what a GPU computes, and the column heads.
pub(super) fn head(lines: &str, gpu: Option<&str>, paper: &str) -> String {
    let on = |gpu| format!("\ngpu: by this library's kernels on {gpu}; all else on the CPU");
    let gpu = gpu.map_or_else(String::new, on);
    let columns = format!("{:32}  {:>8}  {:>17}  {paper:>8}", "", "median", "least .. most");
    format!("{lines}{gpu}\n\n{}", columns.trim_end())
}

/// A measured row: the RMSE for each seed.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) method: Method,
    pub(super) name: String,
    pub(super) place: Processor,
    pub(super) paper: Option<f64>,
    pub(super) rmse: Vec<f64>,
    pub(super) median: f64,
}

impl Row {
    pub(super) fn new(method: Method, place: Processor, rmse: Vec<f64>) -> Row {
        Row { method, name: method.name(), place, paper: method.paper(), median: median(&rmse), rmse }
    }

    pub(super) fn least(&self) -> f64 {
        self.rmse.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(super) fn most(&self) -> f64 {
        self.rmse.iter().copied().fold(0.0, f64::max)
    }
}

/// Measures every method for every seed, and passes each row to `print` as soon as it is known.
pub(super) fn measure(
    seqlen: usize,
    seeds: RangeInclusive<u64>,
    computer: &Computer,
    progress: &ProgressBar,
    print: &dyn Fn(&dyn fmt::Display),
) -> Result<Vec<Row>, Box<dyn Error>> {
    let draw = |seed| {
        progress.set_message(format!("seed {seed}: f64 reference, {seqlen} x {seqlen}"));
        let sample = Sample::draw(seed, (seqlen, seqlen, HEAD_DIM), |rng, _| outlier(rng))?;
        progress.inc(1);
        Ok((seed, sample))
    };
    let samples: Vec<(u64, Sample)> = seeds.map(draw).collect::<Result<_, Box<dyn Error>>>()?;
    let samples: Vec<(u64, &Sample)> = samples.iter().map(|(seed, sample)| (*seed, sample)).collect();
    rows(&samples, Method::paper, computer, progress, &|row| print(row))
}

/// Measures every method on samples, each with the seed of its random signs; `paper` gives the paper's number. Each row
/// is passed to `print` as soon as it is known.
pub(super) fn rows(
    samples: &[(u64, &Sample)],
    paper: fn(Method) -> Option<f64>,
    computer: &Computer,
    progress: &ProgressBar,
    print: &dyn Fn(&Row),
) -> Result<Vec<Row>, Box<dyn Error>> {
    let rows = Method::ALL.into_iter().map(|method| {
        let error = |&(seed, sample): &(u64, &Sample)| {
            progress.set_message(format!("{}, seed {seed}", method.name()));
            let rmse = ErrorNorms::of(&computer.output(method, sample, seed)?, &sample.exact.o).rmse;
            progress.inc(1);
            Ok(rmse)
        };
        let rmse = samples.iter().map(error).collect::<Result<_, Box<dyn Error>>>()?;
        let row = Row { paper: paper(method), ..Row::new(method, computer.place_of(method), rmse) };
        print(&row);
        Ok(row)
    });
    rows.collect()
}
