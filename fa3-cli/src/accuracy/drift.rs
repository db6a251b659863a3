//! How the error of FP8 attention grows with the number of keys.
//!
//! Hopper's tensor cores truncate sums of FP8 products to 13 fraction bits. When a value near 1 is added to a large
//! accumulator, its low bits are cut off toward zero, so O shrinks with every key. V is 1 + N(0, 1)/2 here, because
//! this bias shows when V is near 1. Adding the accumulator into f32 registers every 128 keys removes the bias.
//!
//! Q, K and V are rounded to e4m3 before anything is computed. Rounding V alone moves its mean by -0.05 to -0.07 %, as
//! much as the bias that remains with two levels.

use std::error::Error;
use std::fmt::Display;

use fa3_quant::{Accumulation, E4m3};
use fa3_ref::norms::ErrorNorms;
use indicatif::ProgressBar;
use ndarray::Array4;
use rand_distr::Distribution;
use serde::Serialize;

use super::computer::{Computer, Processor};
use super::cpu;
use super::distributions::normal;
use super::sample::{Sample, Tensor};

const QUERIES: usize = 64;
const HEAD_DIM: usize = 64;
const SEED: u64 = 1;

/// The drift at one number of keys.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    pub(super) keys: usize,
    pub(super) one_level: Drift,
    pub(super) two_level: Drift,
}

/// Errors of O, relative to the mean of the exact |O|.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Drift {
    pub(super) place: Processor,
    /// mean (O − exact) / mean |exact|
    pub(super) bias: f64,
    /// √ mean (O − exact)² / mean |exact|
    pub(super) rmse: f64,
}

/// Measures each number of keys, and passes each row to `print` as soon as it is known.
pub(super) fn measure(
    keys: &[usize],
    computer: &Computer,
    progress: &ProgressBar,
    print: &dyn Fn(&dyn Display),
) -> Result<Vec<Row>, Box<dyn Error>> {
    let rows = keys.iter().map(|&keys| {
        progress.set_message(format!("{keys} keys in one level and in two"));
        let (around_0, around_1) = (normal(0.0, 1.0), normal(1.0, 0.5));
        let e4m3 = |x: f64| f64::from(E4m3::from_f32(x as f32).to_f32());
        let sample = Sample::draw(SEED, (QUERIES, keys, HEAD_DIM), |rng, tensor| match tensor {
            Tensor::Q | Tensor::K => e4m3(around_0.sample(rng)),
            Tensor::V => e4m3(around_1.sample(rng)),
        })?;
        let one_level = cpu::e4m3(&sample, Accumulation::OneLevel)?;
        let one_level = Drift::new(Processor::Cpu, &one_level, &sample);
        let two_level = Drift::new(computer.place(), &computer.two_levels(&sample)?, &sample);
        let row = Row { keys, one_level, two_level };
        progress.inc(1);
        print(&row);
        Ok(row)
    });
    rows.collect()
}

impl Drift {
    fn new(place: Processor, o: &Array4<f32>, sample: &Sample) -> Drift {
        let norms = ErrorNorms::of(o, &sample.exact.o);
        let size = sample.exact.o.iter().map(|x| x.abs()).sum::<f64>() / norms.count as f64;
        Drift { place, bias: norms.mean / size, rmse: norms.rmse / size }
    }
}
