//! The report of `fa3 quantize`.

use std::fmt;

use fa3::problem::QuantizeProblem;
use fa3::{Quantized, RopeTable, Scalar, Scaling};
use fa3_quant::Incoherent;
use ndarray::{ArrayView4, Axis};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::device::{ChosenDevice, Times};

/// A quantized tensor: the device, the time, and the error.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) problem: QuantizeProblem,
    pub(super) place: ChosenDevice,
    pub(super) times: Times,
    pub(super) drift: Drift,
    pub(super) quantized: &'a Quantized,
}

/// The error of codes times scales plus means, compared with the rows that were quantized.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Drift {
    /// Σ of squared differences.
    differences: f64,
    /// Σ of squared numbers.
    numbers: f64,
    /// The number of non-finite numbers, which both sums leave out.
    not_finite: usize,
}

impl Drift {
    /// Computes the rotated and transformed rows of `x` again on the CPU, and compares them with the dequantized codes.
    pub(super) fn of<T: Scalar + Copy>(
        x: ArrayView4<'_, T>,
        table: Option<&RopeTable>,
        first: usize,
        incoherent: Option<&Incoherent>,
        quantized: &Quantized,
    ) -> Drift {
        let (batch, seqlen, heads, _) = x.dim();
        let of_row = |batch, row, head| {
            let rows = x.index_axis_move(Axis(0), batch).index_axis_move(Axis(0), row);
            let mut values: Vec<f32> = rows.index_axis(Axis(0), head).iter().map(|x| x.to_f32()).collect();
            if let Some(table) = table {
                table.apply(&mut values, first + row);
            }
            if let Some(incoherent) = incoherent {
                incoherent.apply(&mut values);
            }
            values.iter().enumerate().fold(Drift::default(), |sum, (column, &y)| {
                let at = [batch, row, head, column];
                let mean = quantized.mean.as_ref().map_or(0.0, |mean| mean[[batch, head, column]]);
                let near = f64::from(quantized.codes[at]) * f64::from(quantized.scale(at)) + f64::from(mean);
                sum.with(f64::from(y), near)
            })
        };
        let rows = (0..batch * seqlen).into_par_iter();
        let of_heads = |at| (0..heads).map(move |head| of_row(at / seqlen, at % seqlen, head));
        rows.flat_map_iter(of_heads).reduce(Drift::default, Drift::plus)
    }

    fn with(self, expected: f64, given: f64) -> Drift {
        if !expected.is_finite() {
            return Drift { not_finite: self.not_finite + 1, ..self };
        }
        let difference = given - expected;
        self.plus(Drift { differences: difference * difference, numbers: expected * expected, not_finite: 0 })
    }

    fn plus(self, other: Drift) -> Drift {
        Drift {
            differences: self.differences + other.differences,
            numbers: self.numbers + other.numbers,
            not_finite: self.not_finite + other.not_finite,
        }
    }

    /// The root mean square of the differences, relative to the numbers' root mean square.
    fn relative(&self) -> f64 {
        // If all numbers are zero, codes are exact.
        (self.differences / self.numbers.max(f64::MIN_POSITIVE)).sqrt()
    }
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2e} relative rms", self.relative())?;
        match self.not_finite {
            0 => Ok(()),
            count => write!(f, ", {count} not finite left out"),
        }
    }
}

/// The least number of bytes to read and write. Of the cos and sin tables, only the positions of one sequence count.
fn moved_bytes(problem: &QuantizeProblem) -> f64 {
    let rotary_dim = problem.rotary().map_or(0, |rotary| rotary.rotary_dim);
    let tables = 4 * problem.x().shape.seqlen as u64 * rotary_dim as u64;
    let numbers = [problem.scales_shape(), problem.mean_shape()].into_iter().flatten();
    let numbers: usize = numbers.map(|shape| shape.iter().product::<usize>()).sum();
    let (x, codes) = (problem.x().extent_bytes().0, problem.codes_bytes().0);
    (x + codes + 4 * numbers as u64 + tables) as f64
}

impl Report<'_> {
    pub(super) fn json(&self) -> Value {
        let Report { problem, place, times, drift, quantized } = self;
        let scales = quantized.scales.iter().copied();
        json!({
            "problem": problem.to_string(),
            "device": place.json(),
            "time": times.json(moved_bytes(problem), "gb_per_second"),
            "scales": {
                "shape": quantized.scales.shape(),
                "smallest": scales.clone().reduce(f32::min), "largest": scales.reduce(f32::max),
            },
            "error": { "relative_rms": drift.relative(), "not_finite": drift.not_finite },
        })
    }
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { problem, place, times, drift, quantized } = self;
        writeln!(f, "{problem}")?;
        writeln!(f, "  device  {place}")?;
        times.write(f, moved_bytes(problem), "GB/s")?;
        let scales = &quantized.scales;
        match quantized.scaling {
            Scaling::Given(scale) => writeln!(f, "  scales  {scale:e}, given")?,
            Scaling::Block { .. } | Scaling::Heads { .. } | Scaling::Tensor | Scaling::Channel => {
                let smallest = scales.iter().copied().fold(f32::INFINITY, f32::min);
                let largest = scales.iter().copied().fold(0.0, f32::max);
                writeln!(f, "  scales  {} from {smallest:.3e} to {largest:.3e}", scales.len())?;
            }
        }
        write!(f, "  error   {drift}")
    }
}

#[cfg(test)]
mod tests {
    use fa3::half::f16;
    use fa3::{Device, Quantize, Rope, RopeStyle};
    use ndarray::Array4;

    use super::*;

    /// A call moves 3 bytes per element, 4 per scale, and 8 for each of 8 pairs of cosine and sine per position.
    #[test]
    fn a_table_counts_as_far_as_it_is_read() {
        let x = Array4::from_elem([2, 100, 3, 32], f16::ONE);
        let table = Rope::new(RopeStyle::HalfSplit, 16, 10_000.0).unwrap().table(500);
        let quantize = Quantize::new(x.view());
        let moved = |quantize: &Quantize<'_, f16>| moved_bytes(&quantize.problem().unwrap());
        assert_eq!(moved(&quantize), f64::from(3 * 2 * 100 * 3 * 32 + 4 * 6));
        assert_eq!(moved(&quantize.clone().rotary(&table)) - moved(&quantize), f64::from(8 * 8 * 100));
    }

    #[test]
    fn numbers_that_are_not_finite_are_left_out_and_counted() {
        let mut x = Array4::from_elem([1, 2, 1, 16], f16::ONE);
        let drift = |x: &Array4<f16>| {
            let quantized = Quantize::new(x).scaling(Scaling::Given(1.0)).run(&Device::Cpu).unwrap();
            Drift::of(x.view(), None, 0, None, &quantized).to_string()
        };
        assert_eq!(drift(&x), "0.00e0 relative rms");
        x[[0, 1, 0, 3]] = f16::NAN;
        assert_eq!(drift(&x), "0.00e0 relative rms, 1 not finite left out");
        x.fill(f16::from_f32(1.0625));
        assert_eq!(drift(&x), "5.88e-2 relative rms");
        x.fill(f16::ZERO);
        assert_eq!(drift(&x), "0.00e0 relative rms");
    }
}
