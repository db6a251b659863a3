//! Q, K and V, and the expected attention of them.

use fa3_quant::E4m3;
use fa3_ref::rows::{RowIndex, RowViolation, RowsLaw, SatisfiedRows, telling_rows};
use fa3_ref::{Element, Inputs, Precision};
use fa3_types::{Dtype, KnownProblem, TensorDesc};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use ndarray::{ArrayView3, ArrayView4};
use rand::SeedableRng;
use rand_distr::{Distribution, StandardNormal};
use rand_xoshiro::Xoshiro256PlusPlus;
use rayon::prelude::*;

use crate::fp8;

/// Numbers of rows of the kernels' tiles.
pub(super) const TILE_ROWS: [usize; 3] = [64, 128, 192];
/// How many random numbers a thread draws at a time.
const CHUNK: usize = 1 << 16;

/// Checks the bits of O, and LSE.
pub(super) type Check = Box<dyn Fn(&[u16], &[f32]) -> Result<SatisfiedRows, Wrong>>;

/// An element type that cannot be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("f16, bf16 and e4m3 are measured, not {dtype}")]
pub(super) struct UnmeasuredDtype {
    pub(super) dtype: Dtype,
}

/// Q, K and V of a problem with contiguous tensors, and the error law for some rows of O and LSE.
pub(super) struct Oracle {
    /// The bytes of Q, K and V.
    pub(super) qkv: [Vec<u8>; 3],
    pub(super) check: Check,
}

/// Why a result is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Wrong {
    #[error("element {at} of {what} was not written or is NaN")]
    Nan { what: &'static str, at: usize },
    #[error(transparent)]
    Row(#[from] RowViolation),
    #[error("a launch after the timed ones gave another result than the first one")]
    Changed,
}

impl Oracle {
    pub(super) fn new(problem: &KnownProblem) -> Result<Oracle, UnmeasuredDtype> {
        let half = |inputs: &Inputs<'_, f32>, rows: &[RowIndex]| {
            RowsLaw::new(inputs, Precision::of_output(inputs.problem().dtype()), rows)
        };
        let as_bf16: fn(&[u16]) -> &[bf16] = |bits| bits.reinterpret_cast();
        match problem.dtype() {
            Dtype::F16 => {
                let as_f16: fn(&[u16]) -> &[f16] = |bits| bits.reinterpret_cast();
                Ok(Oracle::of(problem, f16::from_f32, f16::to_ne_bytes, as_f16, half))
            }
            Dtype::Bf16 => Ok(Oracle::of(problem, bf16::from_f32, bf16::to_ne_bytes, as_bf16, half)),
            Dtype::E4m3 => Ok(Oracle::of(problem, E4m3::from_f32, |x| [x.to_bits()], as_bf16, fp8::rows_law)),
            dtype @ (Dtype::F32 | Dtype::Int8) => Err(UnmeasuredDtype { dtype }),
        }
    }

    /// Draws inputs of type `T`. O has type `O`, whose numbers are behind bits.
    fn of<T: Element, O: Element + 'static, const BYTES: usize>(
        problem: &KnownProblem,
        encode: fn(f32) -> T,
        bytes: fn(T) -> [u8; BYTES],
        numbers: fn(&[u16]) -> &[O],
        law: impl Fn(&Inputs<'_, f32>, &[RowIndex]) -> RowsLaw,
    ) -> Oracle {
        let tensors = [(problem.q(), 1), (problem.k(), 2), (problem.v(), 3)];
        let qkv = tensors.map(|(x, seed)| normal(x.shape.dims().iter().product(), seed, encode));
        let [q, k, v] = qkv.each_ref().map(|x| x.par_iter().map(|&x| x.into() as f32).collect::<Vec<_>>());
        let inputs =
            Inputs::new(problem, view(problem.q(), &q), view(problem.k(), &k), view(problem.v(), &v))
                .expect("the arrays have the problem's shapes");
        let law = law(&inputs, &telling_rows(problem, &TILE_ROWS));
        let (o_desc, lse_shape) = (*problem.o(), problem.lse_shape());
        let check = move |o: &[u16], lse: &[f32]| {
            if let Some(at) = numbers(o).par_iter().position_first(|&x| x.into().is_nan()) {
                return Err(Wrong::Nan { what: "o", at });
            }
            if let Some(at) = lse.par_iter().position_first(|x| x.is_nan()) {
                return Err(Wrong::Nan { what: "lse", at });
            }
            let lse = ArrayView3::from_shape(lse_shape, lse).expect("lse has its shape");
            Ok(law.check(view(&o_desc, numbers(o)), lse)?)
        };
        Oracle { qkv: qkv.map(|x| x.into_iter().flat_map(bytes).collect()), check: Box::new(check) }
    }
}

/// Numbers from N(0, 1), encoded. The same seed gives the same numbers on every machine.
pub(super) fn normal<T: Element>(count: usize, seed: u64, encode: impl Fn(f32) -> T + Sync) -> Vec<T> {
    let mut numbers = vec![encode(0.0); count];
    numbers.par_chunks_mut(CHUNK).enumerate().for_each(|(chunk, numbers)| {
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(seed ^ ((chunk as u64) << 32));
        numbers.fill_with(|| encode(StandardNormal.sample(&mut rng)));
    });
    numbers
}

/// A view of a contiguous tensor.
pub(super) fn view<'a, T>(x: &TensorDesc, numbers: &'a [T]) -> ArrayView4<'a, T> {
    ArrayView4::from_shape(x.shape.dims(), numbers).expect("contiguous tensors have their elements")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3::{Attention, Scalar};
    use fa3_types::{ProblemSpec, Shape};
    use ndarray::Array4;

    const SHAPE: Shape = Shape { batch: 2, seqlen: 200, heads: 3, head_dim: 64 };

    fn problem(dtype: Dtype) -> KnownProblem {
        ProblemSpec::dense(dtype, SHAPE, Shape { heads: 1, ..SHAPE }).causal().known().unwrap()
    }

    /// Bits of O, and LSE, computed on the CPU.
    fn on_the_cpu<T: Scalar>(
        problem: &KnownProblem,
        qkv: &[Vec<u8>; 3],
        number: fn(&[u8]) -> T,
        bits: fn(T::Output) -> u16,
    ) -> (Vec<u16>, Vec<f32>) {
        let [q, k, v] =
            [(problem.q(), &qkv[0]), (problem.k(), &qkv[1]), (problem.v(), &qkv[2])].map(|(x, bytes)| {
                let numbers = bytes.chunks(size_of::<T>()).map(number).collect();
                Array4::from_shape_vec(x.shape.dims(), numbers).unwrap()
            });
        let output =
            Attention::new(q.view(), k.view(), v.view()).causal().forward(&fa3::Device::Cpu).unwrap();
        (output.o.iter().map(|&x| bits(x)).collect(), output.lse.iter().copied().collect())
    }

    fn number(bytes: &[u8]) -> bf16 {
        bf16::from_ne_bytes(bytes.try_into().unwrap())
    }

    #[test]
    fn tensors_are_normal_and_not_alike() {
        let [q, k, v] = Oracle::new(&problem(Dtype::Bf16)).unwrap().qkv;
        assert!(q != k && k != v && v[..200] != q[..200]);
        let q: Vec<f64> = q.chunks(2).map(|x| number(x).into()).collect();
        let mean = q.iter().sum::<f64>() / q.len() as f64;
        let variance = q.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / q.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }

    #[test]
    fn right_results_are_right() {
        let problem = problem(Dtype::Bf16);
        let Oracle { qkv, check } = Oracle::new(&problem).unwrap();
        let (o, lse) = on_the_cpu(&problem, &qkv, number, bf16::to_bits);
        let satisfied = check(&o, &lse).unwrap();
        assert!(satisfied.rows > 30 && satisfied.ratio < 1.0, "{satisfied:?}");
    }

    /// Any change of the results is found.
    #[test]
    fn other_results_are_wrong() {
        let problem = problem(Dtype::Bf16);
        let Oracle { qkv, check } = Oracle::new(&problem).unwrap();
        let (mut o, mut lse) = on_the_cpu(&problem, &qkv, number, bf16::to_bits);
        let first = o[0];
        o[0] = bf16::from_f32(9.0).to_bits();
        assert!(matches!(check(&o, &lse), Err(Wrong::Row(RowViolation { what: "o", .. }))));
        o[0] = first;
        // These elements lie in rows that are not compared with the oracle.
        (o[76_700], lse[1000]) = (0xFFFF, f32::NAN);
        assert_eq!(check(&o, &lse), Err(Wrong::Nan { what: "o", at: 76_700 }));
        o[76_700] = 0;
        assert_eq!(check(&o, &lse), Err(Wrong::Nan { what: "lse", at: 1000 }));
    }

    /// The law of FP8 takes what e4m3 tensors give, which have a byte each, and no larger error.
    #[test]
    fn e4m3_has_its_own_law() {
        let problem = problem(Dtype::E4m3);
        let Oracle { qkv, check } = Oracle::new(&problem).unwrap();
        assert_eq!(qkv[0].len(), problem.q().shape.dims().iter().product::<usize>());
        let (mut o, lse) = on_the_cpu(&problem, &qkv, |x| E4m3::from_bits(x[0]), bf16::to_bits);
        assert!(check(&o, &lse).unwrap().ratio < 1.0);
        o[0] = bf16::from_f32(bf16::from_bits(o[0]).to_f32() + 0.7).to_bits();
        assert!(matches!(check(&o, &lse), Err(Wrong::Row(RowViolation { what: "o", .. }))));
    }

    #[test]
    fn other_types_have_no_truth() {
        let of = |dtype| Oracle::new(&problem(dtype)).err();
        assert_eq!(of(Dtype::F32), Some(UnmeasuredDtype { dtype: Dtype::F32 }));
    }
}
