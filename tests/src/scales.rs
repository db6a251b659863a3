//! The scales of e4m3 tensors: those of heads are 1, those of blocks differ from each other.

use fa3::Scalar;
use fa3_quant::{E4m3, Quantized};
use fa3_types::{Granularity, Problem};
use ndarray::Array4;

/// A tensor of a problem that has scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaled {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
}

impl Scaled {
    /// In the order of their scales.
    pub const ALL: [Scaled; 3] = [Scaled::Q, Scaled::K, Scaled::V];

    /// The scales of a problem's tensor, as they lie in memory: numbers of few digits, so that code times scale is
    /// exact.
    pub fn scales(self, problem: &Problem) -> Vec<f32> {
        let count: usize = problem.descale_shapes()[self as usize].iter().product();
        match problem.scales()[self as usize] {
            Granularity::Head | Granularity::Tensor => vec![1.0; count],
            Granularity::Block { .. } => (0..count).map(|index| scale(3 * index + self as usize)).collect(),
        }
    }

    /// The scale of a row.
    fn of(self, problem: &Problem, (batch, row, head): (usize, usize, usize)) -> f32 {
        match problem.scales()[self as usize] {
            Granularity::Head | Granularity::Tensor => 1.0,
            Granularity::Block { rows } => {
                let shapes = problem.descale_shapes();
                let [_, heads, blocks] = shapes[self as usize][..] else { return 1.0 };
                scale(3 * ((batch * heads + head) * blocks + row / rows) + self as usize)
            }
        }
    }

    /// The codes of a tensor's numbers, as numbers.
    pub fn codes(self, problem: &Problem, x: &Array4<f32>) -> Array4<f32> {
        let of = |(batch, row, head, _)| self.of(problem, (batch, row, head));
        Array4::from_shape_fn(x.dim(), |at| x[at] / of(at))
    }

    /// The nearest numbers that have codes.
    pub(crate) fn round(self, problem: &Problem, x: &Array4<f32>) -> Array4<f32> {
        let of = |(batch, row, head, _)| self.of(problem, (batch, row, head));
        let codes = self.codes(problem, x).mapv(|x| <E4m3 as Scalar>::from_f32(x).to_f32());
        Array4::from_shape_fn(x.dim(), |at| codes[at] * of(at))
    }

    /// Codes and scales.
    ///
    /// # Panics
    /// If the array is not the tensor's.
    pub(crate) fn quantized(self, problem: &Problem, x: &Array4<f32>) -> Quantized {
        let sequences = if self == Scaled::Q { problem.seqs_q() } else { problem.seqs_k() };
        let codes = self.codes(problem, x).mapv(<E4m3 as Scalar>::from_f32);
        let (granularity, scales) = match problem.scales()[self as usize] {
            Granularity::Head | Granularity::Tensor => (Granularity::Tensor, vec![1.0]),
            blocks @ Granularity::Block { .. } => (blocks, self.scales(problem)),
        };
        let quantized = Quantized::new(codes, sequences, granularity, scales);
        quantized.unwrap_or_else(|error| panic!("{self:?} of {problem}: {error}"))
    }
}

/// From 1/4 to 15/4, with four digits.
fn scale(number: usize) -> f32 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let (digits, exponent) = ((mixed & 7) as f32, (mixed >> 3 & 3) as i32);
    (1.0 + digits / 8.0) * f32::powi(2.0, exponent - 2)
}
