//! Table 3 of the paper: root mean square error against attention in f64, in fp16 and in FP8.
//!
//! One head, head_dim 128, no mask, inputs with outliers. The f64 reference takes the inputs before any rounding, so
//! that rounding them counts as error. The paper does not state a sequence length; 8448 is that of its Table 2.

use std::fmt;
use std::ops::RangeInclusive;

use fa3_quant::{Accumulation, Fp8Attention, Granularity, Incoherent, Preparation, QuantError, StandardFp8};
use fa3_ref::norms::ErrorNorms;
use fa3_ref::tiled::{self, Algorithm, Tiles};
use fa3_ref::{Inputs, Precision, standard};
use half::f16;
use indicatif::ProgressBar;
use ndarray::Array4;
use serde::Serialize;

use super::Error;
use super::sample::Sample;
use crate::data;

pub(super) const PAPER_SEQLEN: usize = 8448;
pub(super) const HEAD_DIM: usize = 128;

/// Rows that share a scale in block quantization.
const BLOCK: usize = 128;

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Method {
    StandardFp16,
    Flash2Fp16,
    Flash3Fp16,
    StandardFp8,
    Flash3Fp8,
    NoBlockQuantization,
    NoIncoherentProcessing,
    TwoLevel,
}

impl Method {
    pub(super) const ALL: [Method; 8] = [
        Method::StandardFp16,
        Method::Flash2Fp16,
        Method::Flash3Fp16,
        Method::StandardFp8,
        Method::Flash3Fp8,
        Method::NoBlockQuantization,
        Method::NoIncoherentProcessing,
        Method::TwoLevel,
    ];

    /// The precision, and what computes in it.
    fn parts(self) -> (&'static str, &'static str) {
        match self {
            Method::StandardFp16 => ("fp16", "standard attention"),
            Method::Flash2Fp16 => ("fp16", "FlashAttention-2"),
            Method::Flash3Fp16 => ("fp16", "FlashAttention-3"),
            Method::StandardFp8 => ("fp8", "standard attention"),
            Method::Flash3Fp8 => ("fp8", "FlashAttention-3"),
            Method::NoBlockQuantization => ("fp8", "no block quantization"),
            Method::NoIncoherentProcessing => ("fp8", "no incoherent processing"),
            Method::TwoLevel => ("fp8", "two-level accumulation"),
        }
    }

    /// Whether it is FlashAttention-3 in FP8 but for one thing.
    fn is_variant(self) -> bool {
        matches!(self, Method::NoBlockQuantization | Method::NoIncoherentProcessing | Method::TwoLevel)
    }

    pub(super) fn name(self) -> String {
        let (precision, what) = self.parts();
        format!("{precision}, {what}")
    }

    /// The number in the paper's Table 3.
    pub(super) fn paper(self) -> Option<f64> {
        match self {
            Method::StandardFp16 => Some(3.2e-4),
            Method::Flash2Fp16 | Method::Flash3Fp16 => Some(1.9e-4),
            Method::StandardFp8 | Method::NoIncoherentProcessing => Some(2.4e-2),
            Method::Flash3Fp8 => Some(9.1e-3),
            Method::NoBlockQuantization => Some(9.3e-3),
            Method::TwoLevel => None,
        }
    }

    fn output(self, sample: &Sample, seed: u64) -> Result<Array4<f32>, QuantError> {
        let flash =
            |algorithm| fp16(sample, |inputs| tiled::forward(inputs, algorithm, tiles(), Precision::F16).o);
        let blocks = Granularity::Block { rows: BLOCK };
        let mixed = Incoherent::new(HEAD_DIM, seed);
        let one_level = Accumulation::OneLevel;
        match self {
            Method::StandardFp16 => Ok(fp16(sample, |inputs| standard::forward(inputs, Precision::F16).o)),
            Method::Flash2Fp16 => Ok(flash(Algorithm::Basic)),
            Method::Flash3Fp16 => Ok(flash(Algorithm::TwoStage)),
            Method::StandardFp8 => standard_fp8(sample),
            Method::Flash3Fp8 => fp8(sample, blocks, Some(&mixed), one_level),
            Method::NoBlockQuantization => fp8(sample, Granularity::Tensor, Some(&mixed), one_level),
            Method::NoIncoherentProcessing => fp8(sample, blocks, None, one_level),
            Method::TwoLevel => fp8(sample, blocks, Some(&mixed), Accumulation::TwoLevel { keys: BLOCK }),
        }
    }
}

/// As in a list of all methods, one below the other.
impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (precision, what) = self.parts();
        let indent = if self.is_variant() { "  " } else { "" };
        f.pad(&format!("{precision:4} {indent}{what}"))
    }
}

fn tiles() -> Tiles {
    Tiles::new(128, 128).expect("128 is not 0")
}

fn fp16(sample: &Sample, attention: impl Fn(&Inputs<'_, f16>) -> Array4<f32>) -> Array4<f32> {
    let [q, k, v] = [&sample.q, &sample.k, &sample.v].map(|x| x.mapv(f16::from_f64));
    attention(&Inputs::new(&sample.problem, q.view(), k.view(), v.view()).expect("the sample's own shapes"))
}

/// FlashAttention-3 in FP8: Q and K, mixed if asked for, and V, each with scales of its own.
fn fp8(
    sample: &Sample,
    granularity: Granularity,
    incoherent: Option<&Incoherent>,
    accumulation: Accumulation,
) -> Result<Array4<f32>, QuantError> {
    let plain = Preparation::new(granularity);
    let mixed = incoherent.map_or(plain, |transform| plain.incoherent(transform));
    let [q, k, v] = sample.quantize(&mixed, &plain)?;
    Ok(Fp8Attention::new(accumulation, BLOCK).forward(&sample.problem, &q, &k, &v)?.o)
}

/// The paper's baseline: per-tensor scales, f32 accumulators, intermediates in fp16.
fn standard_fp8(sample: &Sample) -> Result<Array4<f32>, QuantError> {
    let tensor = Preparation::new(Granularity::Tensor);
    let [q, k, v] = sample.quantize(&tensor, &tensor)?;
    Ok(StandardFp8.forward(&sample.problem, &q, &k, &v)?.o)
}

/// A row as measured: RMSE of each seed.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) method: Method,
    pub(super) name: String,
    pub(super) paper: Option<f64>,
    pub(super) rmse: Vec<f64>,
    pub(super) median: f64,
}

impl Row {
    fn new(method: Method, rmse: Vec<f64>) -> Row {
        Row { method, name: method.name(), paper: method.paper(), median: median(&rmse), rmse }
    }

    pub(super) fn least(&self) -> f64 {
        self.rmse.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub(super) fn most(&self) -> f64 {
        self.rmse.iter().copied().fold(0.0, f64::max)
    }
}

fn median(x: &[f64]) -> f64 {
    let mut sorted = x.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// Every method on the inputs of every seed; `print` gets each row as soon as it is there.
pub(super) fn measure(
    seqlen: usize,
    seeds: RangeInclusive<u64>,
    progress: &ProgressBar,
    print: &dyn Fn(&dyn fmt::Display),
) -> Result<Vec<Row>, Error> {
    let draw = |seed| {
        progress.set_message(format!("seed {seed}: f64 reference, {seqlen} x {seqlen}"));
        let sample = Sample::draw(seed, (seqlen, seqlen, HEAD_DIM), |rng, _| data::outlier(rng))?;
        progress.inc(1);
        Ok((seed, sample))
    };
    let samples: Vec<(u64, Sample)> = seeds.map(draw).collect::<Result<_, Error>>()?;
    let rows = Method::ALL.into_iter().map(|method| {
        let error = |(seed, sample): &(u64, Sample)| {
            progress.set_message(format!("{}, seed {seed}", method.name()));
            let rmse = ErrorNorms::of(&method.output(sample, *seed)?, &sample.exact.o).rmse;
            progress.inc(1);
            Ok(rmse)
        };
        let rmse = samples.iter().map(error).collect::<Result<_, Error>>()?;
        let row = Row::new(method, rmse);
        print(&row);
        Ok(row)
    });
    rows.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
