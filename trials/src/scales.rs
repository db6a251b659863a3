//! Scales of e4m3 and int8 tensors. Per-head scales are 1 if Q is e4m3. Scales of blocks and of channels all differ,
//! and so do per-head scales of K and V beside 16-bit Q, and scales of tokens.

use fa3::Scalar;
use fa3_quant::{Channels, E4m3, Quantized};
use fa3_types::{Dtype, Granularity, KnownProblem, Problem, SequenceRows, Shape, first_block};
use ndarray::{Array3, Array4};

/// A tensor that can have scales.
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
    /// Q, K and V, in the order of `descale_shapes`.
    pub const ALL: [Scaled; 3] = [Scaled::Q, Scaled::K, Scaled::V];

    /// The largest scale.
    pub const LARGEST: f32 = 3.75;

    /// The tensor's type.
    pub(crate) fn dtype(self, problem: &Problem) -> Dtype {
        match self {
            Scaled::Q => problem.q().dtype,
            Scaled::K | Scaled::V => problem.k().dtype,
        }
    }

    /// The place of its scales among the scales of one head: with `qv`, K and V have one scale.
    fn place(self, problem: &Problem) -> usize {
        if problem.qv().is_some() && self == Scaled::V { Scaled::K as usize } else { self as usize }
    }

    /// Whether per-head scales differ from 1. In a packed tensor a row alone does not determine its sequence.
    fn heads_differ(self, problem: &Problem) -> bool {
        self != Scaled::Q && problem.converts_keys() && !problem.seqs_k().is_packed()
    }

    /// Scales of the tensor, in memory order. They have few significant bits, so that code times scale is exact.
    pub fn scales(self, problem: &Problem) -> Vec<f32> {
        let count: usize = problem.descale_shapes()[self as usize].iter().product();
        match problem.scales()[self as usize] {
            Granularity::Head | Granularity::Tensor if !self.heads_differ(problem) => vec![1.0; count],
            Granularity::Head | Granularity::Tensor | Granularity::Block { .. } | Granularity::Channel => {
                (0..count).map(|index| scale(3 * index + self.place(problem))).collect()
            }
        }
    }

    /// The scale of each row and head (batch, seqlen_k, heads_kv, 1) of K or V, if tokens have scales.
    pub fn token_scales(self, problem: &KnownProblem) -> Array4<f32> {
        let Shape { batch, seqlen, heads, .. } = problem.k().shape;
        let of = self.of(problem);
        Array4::from_shape_fn((batch, seqlen, heads, 1), |at| of(at).1)
    }

    /// Means of V's channels in memory order, if V has per-channel scales.
    pub fn means(problem: &Problem) -> Option<Vec<f32>> {
        problem.v_mean_shape().map(|shape| (0..shape.iter().product()).map(mean).collect())
    }

    /// Scales and means of V's channels, if V has per-channel scales.
    ///
    /// # Panics
    /// Never: there are as many means as scales.
    pub(crate) fn channels(problem: &Problem) -> Option<Channels> {
        let shape = problem.v_mean_shape()?;
        let array = |numbers| Array3::from_shape_vec(shape, numbers).expect("one of each channel");
        let (mean, scale) = (array(Scaled::means(problem)?), array(Scaled::V.scales(problem)));
        Some(Channels::new(mean, scale).expect("scales are normal"))
    }

    /// Mean and scale of the element at (batch, row, head, column). Its value is mean + scale · code.
    fn of(self, problem: &KnownProblem) -> impl Fn((usize, usize, usize, usize)) -> (f32, f32) + use<> {
        let shape = problem.descale_shapes()[self as usize].clone();
        let granularity = problem.scales()[self as usize];
        let blocks = match granularity {
            Granularity::Block { rows } => self.blocks(problem, rows),
            Granularity::Head | Granularity::Tensor | Granularity::Channel => Vec::new(),
        };
        let (heads_differ, place) = (self.heads_differ(problem), self.place(problem));
        let of_tokens = problem.token_scales().filter(|_| self != Scaled::Q).map(|scales| scales.k.shape);
        move |(batch, row, head, column)| {
            if let Some(Shape { seqlen, heads, .. }) = of_tokens {
                return (0.0, scale(3 * ((batch * seqlen + row) * heads + head) + place));
            }
            let number = |[heads, count]: [usize; 2], index| (batch * heads + head) * count + index;
            match (granularity, &shape[..]) {
                (Granularity::Block { .. }, &[_, heads, count]) => {
                    (0.0, scale(3 * number([heads, count], blocks[row]) + self as usize))
                }
                (Granularity::Channel, &[_, heads, columns]) => {
                    let channel = number([heads, columns], column);
                    (mean(channel), scale(3 * channel + self as usize))
                }
                (Granularity::Head, &[_, heads]) if heads_differ => {
                    (0.0, scale(3 * (batch * heads + head) + place))
                }
                _ => (0.0, 1.0),
            }
        }
    }

    /// The block that each row of the tensor belongs to, for blocks of `rows` rows.
    fn blocks(self, problem: &KnownProblem, rows: usize) -> Vec<usize> {
        let of = self.sequences(problem);
        let tensor = if self == Scaled::Q { problem.q() } else { problem.k() };
        let mut blocks: Vec<usize> = (0..tensor.shape.seqlen).map(|row| row / rows).collect();
        if of.is_packed() {
            for (sequence, row) in (0..of.count()).flat_map(|i| (0..of.capacity(i)).map(move |row| (i, row)))
            {
                blocks[of.start(sequence).1 + row] = block(of, rows, sequence, row);
            }
            blocks[of.end()..].fill(0);
        }
        blocks
    }

    fn sequences(self, problem: &KnownProblem) -> &SequenceRows {
        if self == Scaled::Q { problem.rows_q() } else { problem.rows_k() }
    }

    /// Codes of the tensor's values, as f32.
    pub fn codes(self, problem: &KnownProblem, x: &Array4<f32>) -> Array4<f32> {
        self.map(problem, x, |x, mean, scale| (x - mean) / scale)
    }

    /// Applies `f(value, mean, scale)` to each value of the tensor.
    fn map(self, problem: &KnownProblem, x: &Array4<f32>, f: impl Fn(f32, f32, f32) -> f32) -> Array4<f32> {
        let of = self.of(problem);
        let by_columns = problem.scales()[self as usize] == Granularity::Channel;
        let (_, rows, heads, _) = x.dim();
        let mut y = x.clone();
        for (index, mut columns) in y.rows_mut().into_iter().enumerate() {
            let of_column = |column| of((index / heads / rows, index / heads % rows, index % heads, column));
            let of_row = of_column(0);
            for (column, x) in columns.iter_mut().enumerate() {
                let (mean, scale) = if by_columns { of_column(column) } else { of_row };
                *x = f(*x, mean, scale);
            }
        }
        y
    }

    /// Rounds each value to the nearest one that has a code. Codes of int8 have as few significant bits as e4m3.
    pub(crate) fn round(self, problem: &KnownProblem, x: &Array4<f32>) -> Array4<f32> {
        let is_int8 = self.dtype(problem) == Dtype::Int8;
        self.map(problem, x, |x, mean, scale| {
            let code = <E4m3 as Scalar>::from_f32((x - mean) / scale).to_f32();
            let code = if is_int8 { code.round_ties_even().clamp(-120.0, 120.0) } else { code };
            mean + code * scale
        })
    }

    /// The codes with their scales. Per-channel scales are left out.
    ///
    /// # Panics
    /// If the array has another shape than the tensor.
    pub(crate) fn quantized(self, problem: &KnownProblem, x: &Array4<f32>) -> Quantized {
        let sequences = self.sequences(problem);
        let codes = self.codes(problem, x).mapv(<E4m3 as Scalar>::from_f32);
        let quantized = match problem.scales()[self as usize] {
            Granularity::Head | Granularity::Tensor | Granularity::Channel => {
                Quantized::new(codes, sequences, Granularity::Tensor, vec![1.0])
            }
            Granularity::Block { rows } => {
                Quantized::of_blocks(codes, sequences, rows, &self.scales(problem))
            }
        };
        quantized.unwrap_or_else(|error| panic!("{self:?} of {problem}: {error}"))
    }
}

/// Index of the block that a row of a sequence belongs to.
fn block(of: &SequenceRows, rows: usize, sequence: usize, row: usize) -> usize {
    let first = match of.is_packed() {
        true => first_block(of.start(sequence).1 as u32, sequence as u32, rows.ilog2()) as usize,
        false => 0,
    };
    first + row / rows
}

/// A scale between 1/4 and [`Scaled::LARGEST`], with four significant bits.
fn scale(number: usize) -> f32 {
    let mixed = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let (digits, exponent) = ((mixed & 7) as f32, (mixed >> 3 & 3) as i32);
    (1.0 + digits / 8.0) * f32::powi(2.0, exponent - 2)
}

/// A mean between -15/4 and 15/4 in steps of 1/2, so that mean + code · scale is exact.
fn mean(number: usize) -> f32 {
    let mixed = (number as u64 + 1).wrapping_mul(0xd1b5_4a32_d192_ed03) >> 32;
    ((mixed & 15) as f32 - 7.5) / 2.0
}
