//! How FP8 attention drifts as the number of keys grows.
//!
//! Hopper's tensor cores truncate sums of FP8 products to 13 fraction bits. A value near 1 that is added to an
//! accumulator of many loses its low bits, always toward zero, so that O shrinks with every key. Here V is around 1,
//! 1 + N(0, 1)/2, where such a bias shows. Adding the accumulator into f32 registers every 128 keys ends it.

use std::fmt::Display;

use fa3_quant::{Accumulation, Fp8Attention, Granularity, Preparation};
use indicatif::ProgressBar;
use rand_distr::Distribution;
use serde::Serialize;

use super::Error;
use super::sample::Sample;
use crate::data::{Tensor, normal};

const QUERIES: usize = 64;
const HEAD_DIM: usize = 64;
const SEED: u64 = 1;
const BLOCK: usize = 128;

/// One number of keys.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) keys: usize,
    pub(super) one_level: Drift,
    pub(super) two_level: Drift,
}

/// Errors of O relative to its mean size.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Drift {
    /// mean (O − exact) / mean |exact|
    pub(super) bias: f64,
    /// √ mean (O − exact)² / mean |exact|
    pub(super) rmse: f64,
}

/// Every number of keys; `print` gets each row as soon as it is there.
pub(super) fn measure(
    keys: &[usize],
    progress: &ProgressBar,
    print: &dyn Fn(&dyn Display),
) -> Result<Vec<Row>, Error> {
    let rows = keys.iter().map(|&keys| {
        progress.set_message(format!("{keys} keys in one level and in two"));
        let (around_0, around_1) = (normal(0.0, 1.0), normal(1.0, 0.5));
        let sample = Sample::draw(SEED, (QUERIES, keys, HEAD_DIM), |rng, tensor| match tensor {
            Tensor::Q | Tensor::K => around_0.sample(rng),
            Tensor::V => around_1.sample(rng),
        })?;
        let one_level = drift(&sample, Accumulation::OneLevel)?;
        let two_level = drift(&sample, Accumulation::TwoLevel { keys: BLOCK })?;
        let row = Row { keys, one_level, two_level };
        progress.inc(1);
        print(&row);
        Ok(row)
    });
    rows.collect()
}

fn drift(sample: &Sample, accumulation: Accumulation) -> Result<Drift, Error> {
    let head = Preparation::new(Granularity::Head);
    let [q, k, v] = sample.quantize(&head, &head)?;
    let o = Fp8Attention::new(accumulation, BLOCK).forward(&sample.problem, &q, &k, &v)?.o;
    let norms = fa3_ref::norms::ErrorNorms::of(&o, &sample.exact.o);
    let size = sample.exact.o.iter().map(|x| x.abs()).sum::<f64>() / norms.count as f64;
    Ok(Drift { bias: norms.mean / size, rmse: norms.rmse / size })
}
