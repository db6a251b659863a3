//! Q, K, V and dO of a case, made from its seed.

use fa3::Scalar;
use fa3_quant::E4m3;
use fa3_types::{Dtype, KnownProblem, SequenceRows, Shape};
use half::{bf16, f16};
use ndarray::{Array1, Array4, ArrayViewMut2, Axis};
use rand_distr::{Distribution, StandardNormal};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng};
use serde::Deserialize;

use crate::Scaled;

/// Inputs of a problem and the gradient of its output, in f32 but representable in the problem's dtype.
#[derive(Clone, Debug, PartialEq)]
pub struct Values {
    /// (batch, seqlen_q, heads_q, head_dim)
    pub q: Array4<f32>,
    /// (batch, seqlen_k, heads_kv, head_dim)
    pub k: Array4<f32>,
    /// (batch, seqlen_k, heads_kv, head_dim_v)
    pub v: Array4<f32>,
    /// (batch, seqlen_q, heads_q, head_dim_v)
    pub dout: Array4<f32>,
    /// (batch, seqlen_q, heads_q, head_dim_v), if the problem has it.
    pub qv: Option<Array4<f32>>,
    /// (heads_q), if the problem has sinks.
    pub sink: Option<Array1<f32>>,
}

/// Distribution of the inputs. V and dO are standard normal unless a variant says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dist {
    /// Standard normal.
    Normal,
    /// N(0, 1) + N(0, 100) · Bernoulli(0.001), also for V: the paper's inputs with outliers (§4.3).
    Outliers,
    /// Every score is about 10⁴, or as large as the dtype allows; differences stay of order 1.
    LargeLogits,
    /// All scores of a row are equal: P = 1 / number of visible keys.
    ConstantRows,
    /// Query i has a score of about 128 with keys i mod head_dim, i mod head_dim + head_dim, …, and a score of 0 with
    /// all other keys.
    OneHot,
    /// Scores grow with the key: every block has a new row maximum.
    Increasing,
    /// Scores fall with the key: only the first block of a row sets its maximum.
    Decreasing,
    /// Every score and LSE are about -100. A row of zeros would have a score of 0, which would overflow P.
    Low,
    /// All numbers are subnormal in the dtype.
    Denormals,
    /// Zeros of either sign; V also has ±1.
    SignedZeros,
}

impl Dist {
    /// Every distribution.
    pub const ALL: [Dist; 10] = [
        Dist::Normal,
        Dist::Outliers,
        Dist::LargeLogits,
        Dist::ConstantRows,
        Dist::OneHot,
        Dist::Increasing,
        Dist::Decreasing,
        Dist::Low,
        Dist::Denormals,
        Dist::SignedZeros,
    ];
}

/// The rows that get NaN and infinities. These must not reach the result, or must reach only some of its rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Poison {
    /// No rows.
    #[default]
    None,
    /// Padding rows of all tensors are NaN or infinite.
    BeyondEnd,
    /// This query row of every sequence is NaN.
    QueryRow(usize),
    /// This key row of every sequence is NaN.
    KeyRow(usize),
    /// This value row of every sequence is NaN.
    ValueRow(usize),
}

impl Values {
    /// The values of `problem`. The same arguments always give the same numbers.
    pub fn new(problem: &KnownProblem, dist: Dist, poison: Poison, seed: u64) -> Values {
        let mut rng = Rng::new(seed);
        let scale = problem.softmax_scale().natural();
        let shapes = [problem.q(), problem.k(), problem.v(), problem.o()].map(|tensor| tensor.shape);
        let [mut q, mut k, mut v, mut dout] = match dist {
            Dist::Normal => shapes.map(|shape| rng.fill(shape, Rng::normal)),
            Dist::Outliers => shapes.map(|shape| rng.fill(shape, Rng::outlier)),
            Dist::Denormals => {
                let tiny = subnormal(problem.dtype());
                shapes.map(|shape| rng.fill(shape, |rng| tiny * rng.normal()))
            }
            Dist::SignedZeros => {
                let [q, k, v, dout] = shapes;
                let sign = |rng: &mut Rng| [-1.0, 1.0][rng.below(2)];
                [
                    rng.fill(q, |rng| 0.0 * sign(rng)),
                    rng.fill(k, |rng| 0.0 * sign(rng)),
                    rng.fill(v, |rng| sign(rng) * rng.below(2) as f64),
                    rng.fill(dout, Rng::normal),
                ]
            }
            Dist::LargeLogits
            | Dist::ConstantRows
            | Dist::OneHot
            | Dist::Increasing
            | Dist::Decreasing
            | Dist::Low => {
                let [q, k, v, dout] = shapes;
                let (q, k) =
                    (rows(q, &mut rng, dist, scale, Side::Q), rows(k, &mut rng, dist, scale, Side::K));
                [q, k, rng.fill(v, Rng::normal), rng.fill(dout, Rng::normal)]
            }
        };
        match poison {
            Poison::None => {}
            Poison::BeyondEnd => {
                [&mut q, &mut dout].into_iter().for_each(|x| poison_unused(x, problem.rows_q()));
                [&mut k, &mut v].into_iter().for_each(|x| poison_unused(x, problem.rows_k()));
            }
            Poison::QueryRow(row) => poison_row(&mut q, problem.rows_q(), row),
            Poison::KeyRow(row) => poison_row(&mut k, problem.rows_k(), row),
            Poison::ValueRow(row) => poison_row(&mut v, problem.rows_k(), row),
        }
        let [q, k, v, dout] = [q, k, v, dout].map(|x| x.mapv(|x| round(problem.dtype(), x)));
        let qv = latent_queries(problem, dist, poison, seed);
        let sink = problem.has_sink().then(|| sinks(problem, seed));
        let rounded = |(of, x): (Scaled, Array4<f32>)| match of.dtype(problem) {
            Dtype::E4m3 | Dtype::Int8 => of.round(problem, &x),
            Dtype::F32 | Dtype::F16 | Dtype::Bf16 => x,
        };
        let [q, k, v] = [(Scaled::Q, q), (Scaled::K, k), (Scaled::V, v)].map(rounded);
        Values { q, k, v, dout, qv, sink }
    }
}

/// `qv`, if the problem has it. It has its own random stream, so that the other values do not depend on it. Scores keep
/// the property that the distribution promises when the products of `qv` and V are added.
fn latent_queries(problem: &KnownProblem, dist: Dist, poison: Poison, seed: u64) -> Option<Array4<f32>> {
    let (shape, mut rng) = (problem.qv()?.shape, Rng::new(seed ^ 0x9ab5 << 24));
    let tiny = subnormal(problem.dtype());
    let mut qv = match dist {
        Dist::Outliers => rng.fill(shape, Rng::outlier),
        Dist::Denormals => rng.fill(shape, |rng| tiny * rng.normal()),
        Dist::ConstantRows | Dist::SignedZeros => rng.fill(shape, |rng| [-0.0, 0.0][rng.below(2)]),
        Dist::Normal | Dist::LargeLogits | Dist::OneHot | Dist::Increasing | Dist::Decreasing | Dist::Low => {
            rng.fill(shape, Rng::normal)
        }
    };
    match poison {
        Poison::BeyondEnd => poison_unused(&mut qv, problem.rows_q()),
        Poison::QueryRow(row) => poison_row(&mut qv, problem.rows_q(), row),
        Poison::None | Poison::KeyRow(_) | Poison::ValueRow(_) => {}
    }
    Some(qv.mapv(|x| round(problem.dtype(), x)))
}

/// A sink for each query head. Most sinks are near the scores. The others are absent (-inf), or far below or above the
/// scores: exp(200) overflows. A larger sink would make the error law's bound larger than O.
fn sinks(problem: &KnownProblem, seed: u64) -> Array1<f32> {
    // Problems with one head get different sinks, too.
    let [q, k] = [problem.q(), problem.k()].map(|x| (x.shape.seqlen + 1000 * x.shape.head_dim) as u64);
    let mut rng = Rng::new(seed ^ (q << 20) ^ (k << 40) ^ 0x519c);
    let sink = |_| match rng.below(12) {
        0 => f32::NEG_INFINITY,
        1 => -60.0,
        2 => 40.0,
        3 => 200.0,
        _ => (1.0 + 2.0 * rng.normal()) as f32,
    };
    (0..problem.heads().q()).map(sink).collect()
}

/// The nearest number of `dtype`; e4m3 saturates.
fn round(dtype: Dtype, x: f64) -> f32 {
    let x = x as f32;
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        Dtype::E4m3 => <E4m3 as Scalar>::from_f32(x).to_f32(),
        Dtype::Int8 => unreachable!("no problem has q of int8"),
    }
}

/// A quarter of the smallest normal number of `dtype`.
fn subnormal(dtype: Dtype) -> f64 {
    let exponent = match dtype {
        Dtype::F32 | Dtype::Bf16 => -126,
        Dtype::F16 => -14,
        Dtype::E4m3 => -6,
        Dtype::Int8 => unreachable!("no problem has q of int8"),
    };
    f64::powi(2.0, exponent - 2)
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Q,
    K,
}

/// Q or K of a distribution that is defined by its scores. Row indices of the tensor stand for sequence positions,
/// which keeps the property for packed sequences.
fn rows(shape: Shape, rng: &mut Rng, dist: Dist, scale: f64, side: Side) -> Array4<f64> {
    // f16 can represent the score 250², and e4m3 the number 250.
    let within = |x: f64| x.min(250.0);
    let peak = |score: f64| within((score / scale).sqrt());
    let count = shape.seqlen as f64;
    // The score changes by a quarter from key to key. Q contributes a factor of 8.
    let step = within(0.25 * count / (8.0 * scale)) / count.max(1.0);
    Array4::from_shape_fn(shape.dims(), |(_, row, _, d)| match dist {
        Dist::LargeLogits if d == 0 => peak(1e4),
        Dist::Low if d == 0 => match side {
            Side::Q => -peak(100.0),
            Side::K => peak(100.0),
        },
        Dist::LargeLogits | Dist::Low => rng.normal(),
        Dist::ConstantRows => match side {
            Side::Q => ((row + d) as f64).sin(),
            Side::K => (d as f64).cos(),
        },
        Dist::OneHot if row % shape.head_dim == d => peak(128.0),
        Dist::OneHot => 0.0,
        Dist::Increasing | Dist::Decreasing => match (side, d) {
            (Side::Q, 0) => 8.0,
            (Side::K, 0) if dist == Dist::Increasing => step * row as f64,
            (Side::K, 0) => step * (count - row as f64),
            _ => 0.25 * rng.normal(),
        },
        Dist::Normal | Dist::Outliers | Dist::Denormals | Dist::SignedZeros => rng.normal(),
    })
}

/// Puts NaN and ±inf into alternating padding rows.
fn poison_unused(x: &mut Array4<f64>, sequences: &SequenceRows) {
    let poison = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    let (batch, seqlen, _, _) = x.dim();
    let mut used = vec![false; batch * seqlen];
    for index in 0..sequences.count() {
        let (entry, first) = sequences.start(index);
        used[entry * seqlen + first..][..sequences.len(index)].fill(true);
    }
    for (i, _) in used.into_iter().enumerate().filter(|(_, used)| !used) {
        row_mut(x, i / seqlen, i % seqlen).fill(poison[i % 3]);
    }
}

/// Puts NaN into this row of every sequence that is long enough.
fn poison_row(x: &mut Array4<f64>, sequences: &SequenceRows, row: usize) {
    for index in (0..sequences.count()).filter(|&index| row < sequences.len(index)) {
        let (batch, first) = sequences.start(index);
        row_mut(x, batch, first + row).fill(f64::NAN);
    }
}

/// One row: (heads, head_dim).
fn row_mut(x: &mut Array4<f64>, batch: usize, row: usize) -> ArrayViewMut2<'_, f64> {
    x.index_axis_mut(Axis(0), batch).index_axis_move(Axis(0), row)
}

/// Random number generator of the cases.
pub(crate) struct Rng(SplitMix64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(SplitMix64::seed_from_u64(seed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in (0, 1).
    fn unit(&mut self) -> f64 {
        ((self.next() >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    pub(crate) fn below(&mut self, n: u64) -> usize {
        (self.next() % n) as usize
    }

    /// A standard normal number.
    pub(crate) fn normal(&mut self) -> f64 {
        StandardNormal.sample(&mut self.0)
    }

    fn outlier(&mut self) -> f64 {
        let spike = if self.unit() < 0.001 { 10.0 * self.normal() } else { 0.0 };
        self.normal() + spike
    }

    fn fill(&mut self, shape: Shape, mut number: impl FnMut(&mut Rng) -> f64) -> Array4<f64> {
        Array4::from_shape_simple_fn(shape.dims(), || number(self))
    }
}
