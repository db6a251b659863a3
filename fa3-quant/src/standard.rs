//! Standard attention in FP8: the baseline of the paper's Table 3.

use fa3_types::{KnownProblem, Problem, TensorName};
use half::f16;

use crate::key_block::{self, KeyBlock};
use crate::tiles::{self, QueryTile, TileOutput};
use crate::{Accumulation, E4m3, Granularity, Output, QuantError, Quantized, Row};

/// Attention step by step in FP8: one scale for each tensor, float accumulators, and intermediates in half precision
/// (§4.3, Table 3).
///
/// ```text
/// S = f16(cap(softmax_scale · Q Kᵀ)),   P = f16(softmax(S)),   O = f16(e4m3(448 P) V / 448)
/// ```
///
/// The rules of [`crate::Fp8Attention`] about keys past the end, masked keys and NaN apply here too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StandardFp8;

/// Keys whose products with a tile of queries are computed together.
const KEY_BLOCK: usize = 128;

impl StandardFp8 {
    /// O, rounded to half precision, and LSE of the problem on these tensors.
    ///
    /// # Errors
    /// If a tensor is not of the problem's shape and sequences, or has more than one scale: see
    /// [`QuantError`].
    pub fn forward(
        &self,
        problem: &KnownProblem,
        q: &Quantized,
        k: &Quantized,
        v: &Quantized,
    ) -> Result<Output, QuantError> {
        tiles::check(problem, q, k, v)?;
        for (tensor, x) in [(TensorName::Q, q), (TensorName::K, k), (TensorName::V, v)] {
            if x.scales().granularity() != Granularity::Tensor {
                return Err(QuantError::NotPerTensor { tensor });
            }
        }
        let prepare = |sequence, head| key_block::key_blocks(problem, sequence, head, k, v, KEY_BLOCK);
        Ok(tiles::forward_tiles(problem, prepare, |blocks, queries| tile(problem, q, blocks, queries)))
    }
}

/// O and LSE of a tile.
fn tile(problem: &Problem, q: &Quantized, blocks: &[KeyBlock], tile: &QueryTile) -> TileOutput {
    let mut o = vec![vec![0.0; problem.head_dim_v()]; tile.rows.len()];
    let mut lse = vec![f32::NEG_INFINITY; tile.rows.len()];
    let mut p = scores(problem, q, blocks, tile);
    for (p, lse) in p.iter_mut().zip(&mut lse) {
        *lse = softmax(p);
        p.iter_mut().for_each(|p| *p = E4m3::round(*p * E4m3::MAX));
    }
    for block in blocks {
        let keys = block.values.rows();
        for (p, o) in p.iter().zip(&mut o) {
            let p = Row::of_values(p[block.first..block.first + keys].to_vec());
            Accumulation::Fp32.chain(&p, &block.values, 0..keys, o);
        }
    }
    let factor = blocks.first().map_or(0.0, |block| block.scale_v) / E4m3::MAX;
    o.iter_mut().flatten().for_each(|o| *o = to_half(*o * factor));
    TileOutput { o, lse }
}

/// S of a tile, row after row, -inf where masked.
fn scores(problem: &Problem, q: &Quantized, blocks: &[KeyBlock], tile: &QueryTile) -> Vec<Vec<f32>> {
    let queries: Vec<(Row, f32)> = tile.rows.clone().map(|row| tile.query(q, row)).collect();
    let mut scores = vec![vec![0.0; tile.len.k]; tile.rows.len()];
    for block in blocks {
        let keys = block.first..block.first + block.values.rows();
        for ((row, (q, scale_q)), scores) in tile.rows.clone().zip(&queries).zip(&mut scores) {
            let scores = &mut scores[keys.clone()];
            Accumulation::Fp32.chain(q, &block.keys, 0..problem.head_dim(), scores);
            let factor = f64::from(*scale_q) * f64::from(block.scale_k) * problem.softmax_scale().natural();
            for (key, score) in keys.clone().zip(scores) {
                let scaled = *score * factor as f32;
                let capped = problem.softcap().map_or(scaled, |cap| cap.apply(scaled.into()) as f32);
                let visible = problem.mask().allows(row, key, tile.len);
                *score = if visible { to_half(capped) } else { f32::NEG_INFINITY };
            }
        }
    }
    scores
}

/// Turns scores into probabilities in half precision and returns their log-sum-exp; zeros and -inf if no score is above
/// -inf.
fn softmax(scores: &mut [f32]) -> f32 {
    let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
    scores.iter_mut().for_each(|score| *score = (*score - base).exp());
    let sum: f32 = scores.iter().sum();
    if sum == 0.0 {
        return f32::NEG_INFINITY;
    }
    scores.iter_mut().for_each(|p| *p = to_half(*p / sum));
    base + sum.ln()
}

fn to_half(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Mask, ProblemSpec, SequenceRows, Shape};
    use ndarray::Array4;

    use super::*;
    use crate::Preparation;
    use crate::testing::{self, tensor};

    const Q: Shape = Shape { batch: 1, seqlen: 40, heads: 2, head_dim: 64 };
    const KV: Shape = Shape { batch: 1, seqlen: 150, heads: 1, head_dim: 64 };

    fn quantize(x: &Array4<f32>, sequences: &SequenceRows, granularity: Granularity) -> Quantized {
        Preparation::new(granularity).quantize(x.view(), sequences).unwrap()
    }

    /// The only roundings are S to 11 bits, P to 11 and then to 4 bits (a subnormal P by up to 2^-10 / 448), and O to
    /// 11 bits.
    #[test]
    fn it_is_attention_up_to_its_own_rounding() {
        let used = SequenceRows::dense(1, 150).with_used(&[131]).unwrap();
        let dense = || ProblemSpec::dense(Dtype::E4m3, Q, KV);
        let in_full = [
            dense(),
            dense().causal(),
            dense().softcap(3.0),
            dense().mask(Mask::Window { left: Some(9), right: Some(0) }),
        ];
        let in_part = dense().with_rows(SequenceRows::dense(Q.batch, Q.seqlen), used).unwrap();
        for problem in in_full.into_iter().map(|spec| spec.known().unwrap()).chain([in_part]) {
            let q = quantize(&tensor(Q, 1), problem.rows_q(), Granularity::Tensor);
            let [k, v] =
                [2, 3].map(|seed| quantize(&tensor(KV, seed), problem.rows_k(), Granularity::Tensor));
            let Output { o, lse } = StandardFp8.forward(&problem, &q, &k, &v).unwrap();
            let [q, k, v] = [&q, &k, &v].map(Quantized::dequantize);
            let exact = testing::reference(&problem, &q, &k, &v);
            // LSE, and so each visible score, is below 8. Rounding a score to f16 changes it, and LSE, by up to 2^-9.
            assert!(exact.lse.iter().all(|lse| *lse < 8.0));
            let score = 2f64.powi(-9) + 1e-5;
            assert!(lse.iter().zip(&exact.lse).all(|(lse, exact)| (f64::from(*lse) - exact).abs() < score));
            let p = 2f64.powi(-4) + 2f64.powi(-11) + 2.1 * score;
            let subnormal = v.iter().map(|v| f64::from(v.abs())).sum::<f64>() / 64.0 * 2f64.powi(-10) / 448.0;
            for ((o, exact), size) in o.iter().zip(&exact.o).zip(&exact.size) {
                let limit = size * p + exact.abs() * 2f64.powi(-11) + 2.0 * subnormal;
                assert!((f64::from(*o) - exact).abs() <= limit, "{o} {exact} {limit}");
                assert_eq!(f16::from_f32(*o).to_f32(), *o);
            }
        }
    }

    #[test]
    fn equal_scores_average_v_exactly() {
        // P = 1/128 and 448 P = 3.5 are e4m3 numbers, and so are the small integers of V: nothing is rounded.
        let shape = Shape { seqlen: 128, ..KV };
        let problem = ProblemSpec::dense(Dtype::E4m3, shape, shape).known().unwrap();
        let code = |key: usize, d: usize| E4m3::from_f32((key * 5 + d * 3) as f32 % 7.0 - 3.0);
        let of =
            |codes, scale| Quantized::new(codes, problem.rows_q(), Granularity::Tensor, vec![scale]).unwrap();
        let codes = Array4::from_shape_fn(shape.dims(), |(_, key, _, d)| code(key, d));
        let zeros = of(Array4::from_elem(shape.dims(), E4m3::ZERO), 1.0);
        let o = StandardFp8.forward(&problem, &zeros, &of(codes.clone(), 1.0), &of(codes, 4.0)).unwrap().o;
        let mean = |d: usize| (0..128).map(|key| code(key, d).to_f32() * 4.0).sum::<f32>() / 128.0;
        assert!(o.indexed_iter().all(|((_, _, _, d), &o)| (o - mean(d)).abs() < 1e-7), "{o}");
    }

    /// Attention with scores (softmax_scale, 0) of two keys and V = (1, 0): O is P of the first key.
    fn two_keys(softmax_scale: f64) -> Output {
        let shape = Shape { batch: 1, seqlen: 2, heads: 1, head_dim: 32 };
        let problem =
            ProblemSpec::dense(Dtype::E4m3, shape, shape).softmax_scale(softmax_scale).known().unwrap();
        let ones = |which: fn(usize, usize) -> bool| {
            let code = |(_, row, _, d)| E4m3::from_f32(f32::from(u8::from(which(row, d))));
            let codes = Array4::from_shape_fn(shape.dims(), code);
            Quantized::new(codes, problem.rows_q(), Granularity::Tensor, vec![1.0]).unwrap()
        };
        let (q, k, v) = (ones(|_, d| d == 0), ones(|key, d| key == 0 && d == 0), ones(|key, _| key == 0));
        StandardFp8.forward(&problem, &q, &k, &v).unwrap()
    }

    #[test]
    fn scores_are_rounded_to_half() {
        // 1 + 2^-11 lies between two numbers in half and goes to 1.
        let lse = two_keys(2049.0 / 2048.0).lse[[0, 0, 0]];
        assert!((f64::from(lse) - (1f64.exp() + 1.0).ln()).abs() < 1e-6, "{lse}");
    }

    #[test]
    fn probabilities_are_rounded_to_half_and_take_the_whole_range() {
        // P = 0.67854 rounds to 0.67871 in half. 448 P is then above 304, the midpoint of 288 and 320, while 448 times
        // the unrounded P is below; and 256 P would round to 176.
        let o = two_keys(1530.0 / 2048.0).o[[0, 0, 0, 0]];
        assert_eq!(o, f16::from_f32(320.0 / 448.0).to_f32());
    }

    #[test]
    fn rows_without_a_key_are_zero() {
        let problem =
            ProblemSpec::dense(Dtype::E4m3, KV, Shape { seqlen: 40, ..KV }).causal().known().unwrap();
        let q = quantize(&tensor(KV, 1), problem.rows_q(), Granularity::Tensor);
        let kv = quantize(&tensor(problem.k().shape, 2), problem.rows_k(), Granularity::Tensor);
        let Output { o, lse } = StandardFp8.forward(&problem, &q, &kv, &kv).unwrap();
        assert!(lse.indexed_iter().all(|((_, _, row), lse)| (*lse == f32::NEG_INFINITY) == (row < 110)));
        assert!(o.indexed_iter().all(|((_, row, ..), &o)| row >= 110 || o == 0.0));
    }

    #[test]
    fn only_one_scale_a_tensor_is_taken() {
        let problem = ProblemSpec::dense(Dtype::E4m3, KV, KV).known().unwrap();
        let of = |granularity| quantize(&tensor(KV, 1), problem.rows_k(), granularity);
        let (one, many) = (of(Granularity::Tensor), of(Granularity::Head));
        let error = StandardFp8.forward(&problem, &one, &many, &one).unwrap_err();
        assert_eq!(error, QuantError::NotPerTensor { tensor: TensorName::K });
    }
}
