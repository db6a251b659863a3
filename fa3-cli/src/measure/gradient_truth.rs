//! Q, K, V and dO of packed sequences, and what their gradients must be.

use std::ops::Range;

use fa3_ref::law::BackwardLaw;
use fa3_ref::{Gradients, Inputs, Precision};
use fa3_types::{Dtype, KnownProblem, ProblemError, ProblemSpec, SequenceRows, Shape, TensorDesc};
use half::{bf16, f16};
use ndarray::{Array4, ArrayView4, Axis, Slice};
use rayon::prelude::*;

use super::truth::{Wrong, normal};

/// The most rows of a sequence whose gradients are judged. The oracle takes the square of them.
const MOST: usize = 512;

/// Tensors of a problem, and the error law of some of its gradients.
///
/// Lengths are data. So what is measured is judged with other ones: each sequence is cut to at most [`MOST`] rows. The
/// shortest sequence and the longest one are judged, on the last head of K and V.
pub(super) struct GradientTruth {
    /// The bits of Q, K, V and dO.
    pub(super) tensors: [Vec<u16>; 4],
    /// The same problem of sequences that are cut.
    pub(super) cut: KnownProblem,
    decode: fn(u16) -> f32,
    parts: Vec<Part>,
}

/// A sequence that is judged.
struct Part {
    rows: Range<usize>,
    keys: Range<usize>,
    law: BackwardLaw,
}

/// Rows of Q or keys that were compared with the oracle, and their largest error as a part of what is allowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SatisfiedGradients {
    pub(super) rows: usize,
    pub(super) ratio: f64,
}

impl GradientTruth {
    /// Draws f16 or bf16 tensors, packed and contiguous, and runs the oracle.
    ///
    /// # Errors
    /// None that a valid problem has.
    pub(super) fn new(spec: &ProblemSpec, problem: &KnownProblem) -> Result<GradientTruth, ProblemError> {
        let is_f16 = problem.dtype() == Dtype::F16;
        let encode: fn(f32) -> u16 =
            if is_f16 { |x| f16::from_f32(x).to_bits() } else { |x| bf16::from_f32(x).to_bits() };
        let decode: fn(u16) -> f32 =
            if is_f16 { |x| f16::from_bits(x).to_f32() } else { |x| bf16::from_bits(x).to_f32() };
        let descs = [problem.q(), problem.k(), problem.v(), problem.o()];
        let mut seeds = 1..;
        let tensors =
            descs.map(|x| normal(x.shape.dims().iter().product(), seeds.next().unwrap_or(0), encode));
        let [rows_q, rows_k] = [problem.rows_q(), problem.rows_k()].map(cut);
        let cut = spec.clone().with_rows(rows_q, rows_k)?;
        let mut truth = GradientTruth { tensors, cut, decode, parts: Vec::new() };
        truth.parts = truth.judged().map(|sequence| truth.part(spec, sequence)).collect::<Result<_, _>>()?;
        Ok(truth)
    }

    /// The shortest sequence that has rows, and the longest one.
    fn judged(&self) -> impl Iterator<Item = usize> + use<> {
        let lengths: Vec<usize> = (0..self.cut.batch()).map(|index| self.cut.lengths(index).q).collect();
        let some = |index: &usize| lengths[*index] > 0;
        let shortest = (0..lengths.len()).filter(some).min_by_key(|&index| lengths[index]);
        let longest = (0..lengths.len()).filter(some).max_by_key(|&index| lengths[index]);
        shortest.into_iter().chain(longest.filter(|_| longest != shortest))
    }

    /// A sequence with its law.
    fn part(&self, spec: &ProblemSpec, sequence: usize) -> Result<Part, ProblemError> {
        let span = |rows: &SequenceRows| {
            let (_, first) = rows.start(sequence);
            first..first + rows.len(sequence)
        };
        let (rows, keys) = (span(self.cut.rows_q()), span(self.cut.rows_k()));
        let group = self.cut.heads().group_size();
        let q = Shape { batch: 1, seqlen: rows.len(), heads: group, head_dim: self.cut.head_dim() };
        let kv = Shape { seqlen: keys.len(), heads: 1, ..q };
        let mut alone = ProblemSpec::dense(self.cut.dtype(), q, kv).head_dim_v(self.cut.head_dim_v());
        (alone.mask, alone.softcap) = (spec.mask.clone(), spec.softcap);
        let alone = alone.known()?;
        let [q, k, v, dout] = self.tensors.each_ref().map(Vec::as_slice);
        let [q, dout] = [(self.cut.q(), q), (self.cut.o(), dout)].map(|(x, bits)| self.own(x, bits, &rows));
        let [k, v] = [(self.cut.k(), k), (self.cut.v(), v)].map(|(x, bits)| self.own(x, bits, &keys));
        let inputs = Inputs::new(&alone, q.view(), k.view(), v.view()).expect("they are one sequence's");
        let law = BackwardLaw::new(&inputs, dout.view(), Precision::of_output(self.cut.dtype()));
        Ok(Part { rows, keys, law: law.expect("dout has the shape of o") })
    }

    /// These rows of a tensor in the last head of K and V, or in the heads of Q that share it.
    fn own(&self, x: &TensorDesc, bits: &[u16], rows: &Range<usize>) -> Array4<f32> {
        let all =
            ArrayView4::from_shape(x.shape.dims(), bits).expect("contiguous tensors have their elements");
        let heads = x.shape.heads / self.cut.heads().kv();
        let heads = Slice::from(x.shape.heads - heads..);
        let own = all.slice_axis_move(Axis(1), Slice::from(rows.clone())).slice_axis_move(Axis(2), heads);
        own.mapv(self.decode)
    }

    /// Judges the bits of dQ, dK and dV of the sequences that are cut.
    ///
    /// # Errors
    /// What breaks the law.
    pub(super) fn check(&self, gradients: &[Vec<u16>; 3]) -> Result<SatisfiedGradients, Wrong> {
        let mut satisfied = SatisfiedGradients { rows: 0, ratio: 0.0 };
        self.check_numbers(gradients)?;
        let [dq, dk, dv] = gradients;
        for Part { rows, keys, law } in &self.parts {
            let of = Gradients {
                dq: self.own(self.cut.q(), dq, rows),
                dk: self.own(self.cut.k(), dk, keys),
                dv: self.own(self.cut.v(), dv, keys),
                dsink: None,
            };
            let parts =
                law.check(&of, "fa3 bench").map_err(|violation| Wrong::Gradient(violation.to_string()))?;
            satisfied.rows += rows.len() + 2 * keys.len();
            satisfied.ratio = parts.iter().fold(satisfied.ratio, |most, part| most.max(part.ratio));
        }
        Ok(satisfied)
    }

    /// No bits of dQ, dK and dV are NaN.
    ///
    /// # Errors
    /// [`Wrong::Nan`].
    pub(super) fn check_numbers(&self, gradients: &[Vec<u16>; 3]) -> Result<(), Wrong> {
        for (what, bits) in ["dq", "dk", "dv"].into_iter().zip(gradients) {
            let is_nan = |&bits: &u16| (self.decode)(bits).is_nan();
            if let Some(at) = bits.par_iter().position_first(is_nan) {
                return Err(Wrong::Nan { what, at });
            }
        }
        Ok(())
    }
}

/// The same sequences of at most [`MOST`] rows.
fn cut(rows: &SequenceRows) -> SequenceRows {
    let lengths: Vec<usize> = (0..rows.count()).map(|index| rows.len(index).min(MOST)).collect();
    SequenceRows::packed_lengths(&lengths)
}

#[cfg(test)]
mod tests {
    use fa3::{Attention, Device};
    use half::slice::HalfBitsSliceExt;

    use super::*;

    /// Gradients of the CPU are right, and whatever is changed in what is judged is found.
    #[test]
    fn wrong_gradients_are_found() {
        let rows = SequenceRows::packed_lengths(&[30, 700, 0, 1]);
        let spec = ProblemSpec::packed(Dtype::Bf16, (4, 2), 32, &rows, &rows).causal();
        let problem = spec.clone().with_rows(rows.clone(), rows).unwrap();
        let truth = GradientTruth::new(&spec, &problem).unwrap();
        assert_eq!([0, 1, 2, 3].map(|index| truth.cut.lengths(index).q), [30, 512, 0, 1]);
        let array = |x: &TensorDesc, bits: &Vec<u16>| {
            Array4::from_shape_vec(x.shape.dims(), bits.reinterpret_cast::<bf16>().to_vec()).unwrap()
        };
        let [q, k, v, dout] = &truth.tensors;
        let (q, k, v) = (array(problem.q(), q), array(problem.k(), k), array(problem.v(), v));
        let (dout, ends) = (array(problem.o(), dout), truth.cut.rows_q().cu_seqlens());
        let attention = Attention::new(&q, &k, &v).causal().packed(&ends, &ends);
        let output = attention.forward(&Device::Cpu).unwrap();
        let gradients = attention.backward(&Device::Cpu, &output, &dout).unwrap();
        let mut bits = [&gradients.dq, &gradients.dk, &gradients.dv]
            .map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<u16>>());
        let satisfied = truth.check(&bits).unwrap();
        // The longest one, cut, and that of one row.
        assert!(satisfied.rows == 3 * 513 && satisfied.ratio < 1.0, "{satisfied:?}");
        // Row 500 of the longest one, in the last head.
        let at = (530 * 2 + 1) * 32;
        let right = std::mem::replace(&mut bits[1][at], bf16::from_f32(99.0).to_bits());
        assert!(matches!(truth.check(&bits), Err(Wrong::Gradient(why)) if why.contains("dk")));
        bits[1][at] = right;
        // Of a row that is not judged.
        bits[2][3] = 0xFFFF;
        assert_eq!(truth.check(&bits), Err(Wrong::Nan { what: "dv", at: 3 }));
    }
}
