//! Q, K and V: one random head, or tensors of a file.

use fa3_quant::{Channels, Preparation, QuantError, Quantized};
use fa3_ref::{Forward, Inputs, oracle};
use fa3_types::{Dtype, KnownProblem, ProblemError, ProblemSpec, Shape, TensorDesc};
use half::f16;
use ndarray::Array4;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

/// Names one of a sample's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tensor {
    Q,
    K,
    V,
}

/// Q, K and V in f64, and the f64 attention of exactly these numbers.
pub(super) struct Sample {
    pub(super) problem: KnownProblem,
    pub(super) q: Array4<f64>,
    pub(super) k: Array4<f64>,
    pub(super) v: Array4<f64>,
    pub(super) exact: Forward<f64>,
}

impl Sample {
    /// Draws one head of `queries` × `keys`; `distribution` draws each entry.
    pub(super) fn draw(
        seed: u64,
        (queries, keys, head_dim): (usize, usize, usize),
        mut distribution: impl FnMut(&mut Xoshiro256PlusPlus, Tensor) -> f64,
    ) -> Result<Sample, ProblemError> {
        let q_shape = Shape { batch: 1, seqlen: queries, heads: 1, head_dim };
        let kv_shape = Shape { seqlen: keys, ..q_shape };
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed);
        let mut tensor = |shape: Shape, which| {
            Array4::from_shape_simple_fn(shape.dims(), || distribution(&mut rng, which))
        };
        let (q, k, v) =
            (tensor(q_shape, Tensor::Q), tensor(kv_shape, Tensor::K), tensor(kv_shape, Tensor::V));
        Sample::new(q, k, v)
    }

    /// The sample of three given tensors, each (batch, seqlen, heads, head_dim).
    pub(super) fn new(q: Array4<f64>, k: Array4<f64>, v: Array4<f64>) -> Result<Sample, ProblemError> {
        let desc = |x: &Array4<f64>| {
            let (batch, seqlen, heads, head_dim) = x.dim();
            TensorDesc::contiguous(Dtype::F16, Shape { batch, seqlen, heads, head_dim })
        };
        let mut spec = ProblemSpec::dense(Dtype::F16, desc(&q).shape, desc(&k).shape);
        (spec.v, spec.o.shape.head_dim) = (desc(&v), desc(&v).shape.head_dim);
        spec.o = TensorDesc::contiguous(Dtype::F16, spec.o.shape);
        let problem = spec.known()?;
        let inputs =
            Inputs::new(&problem, q.view(), k.view(), v.view()).expect("the arrays have these shapes");
        let exact = oracle::forward(&inputs);
        Ok(Sample { problem, q, k, v, exact })
    }

    /// Q, K and V, rounded to fp16.
    pub(super) fn fp16(&self) -> [Array4<f16>; 3] {
        [&self.q, &self.k, &self.v].map(|x| x.mapv(f16::from_f64))
    }

    /// Q, K and V as FP8 with scale 1. They must be exact e4m3 numbers.
    pub(super) fn codes(&self) -> Result<[Quantized; 3], QuantError> {
        let as_they_are = Preparation::with_scale(1.0);
        self.quantize(&as_they_are, &as_they_are)
    }

    /// V in FP8, quantized per channel, with the channels' scales and means.
    pub(super) fn v_by_channels(&self) -> Result<(Channels, Quantized), QuantError> {
        let v = self.v.mapv(|x| x as f32);
        let channels = Channels::of(v.view());
        let codes = channels.quantize(v.view())?;
        Ok((channels, codes))
    }

    /// Q, K and V in FP8; `qk` prepares both Q and K.
    pub(super) fn quantize(
        &self,
        qk: &Preparation<'_>,
        v: &Preparation<'_>,
    ) -> Result<[Quantized; 3], QuantError> {
        let [seqs_q, seqs_k] = [self.problem.rows_q(), self.problem.rows_k()];
        let quantize = |by: &Preparation<'_>, x: &Array4<f64>, sequences| {
            by.quantize(x.mapv(|x| x as f32).view(), sequences)
        };
        Ok([quantize(qk, &self.q, seqs_q)?, quantize(qk, &self.k, seqs_k)?, quantize(v, &self.v, seqs_k)?])
    }
}
