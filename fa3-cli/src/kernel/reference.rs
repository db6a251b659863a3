//! What the results of a program must be: attention by the oracle and the error law, all else by plain computations.

mod gradients;

use std::cmp::Ordering;

use fa3_cuda::kernels::fwd::buffers;
use fa3_ir::{BufferId, BufferRole, Elem, Kernel, Program};
use fa3_quant::{E4m3, Granularity, Quantized, StandardFp8, rounded_row_sum_loss};
use fa3_ref::law::{ForwardLaw, Violation};
use fa3_ref::norms::Worst;
use fa3_ref::plain::{self, Expected, Mismatch, TensorCore};
use fa3_ref::{Forward, Inputs, Precision};
use fa3_sim::trace::Factors;
use fa3_types::{BackwardProblem, Dtype, Problem, ValueLayout};
use ndarray::{Array3, Array4, ArrayView3, ArrayView4};

use crate::sim::buffers::numbers;

/// What is computed.
#[derive(Debug)]
pub(crate) enum Reference {
    /// O and LSE of a problem with contiguous tensors.
    Attention(Box<Problem>),
    /// dQ, dK and dV of a problem with contiguous tensors.
    Gradients(Box<BackwardProblem>),
    /// x + y.
    Sum,
    /// The softmax of each row.
    Softmax,
    /// The input itself.
    Copy,
    /// The input, transposed.
    Transpose,
    /// A Bᵀ.
    Product,
}

/// A result that is not what it must be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum Wrong {
    #[error("{what} is {max:e} from the oracle where the error law allows {bound:e}, first at {first}")]
    Law { what: &'static str, max: f64, bound: f64, first: Worst },
    #[error("lse is {max:e} from the oracle where e4m3 is allowed {bound:e}")]
    Lse { max: f64, bound: f64 },
    #[error("{array}: {mismatch}")]
    Element { array: &'static str, mismatch: Mismatch },
}

impl From<Box<Violation>> for Wrong {
    fn from(violation: Box<Violation>) -> Wrong {
        let Violation { what, norms, bound, first, replay: _ } = *violation;
        Wrong::Law { what, max: norms.max, bound, first }
    }
}

impl Reference {
    /// Replaces random inputs of a program that make no sense together.
    pub(crate) fn prepare(&self, program: &Program<Kernel>, before: &mut [Vec<u8>]) {
        if let Reference::Gradients(problem) = self {
            gradients::prepare(problem, program, before);
        }
    }

    /// Gives what products of attention multiply the names that the paper has for it.
    pub(crate) fn name_factors(&self, factors: &mut Factors) {
        if let Reference::Attention(_) = self {
            factors.a.get_or_insert_with(|| "P".to_owned());
        } else if let Reference::Gradients(_) = self {
            gradients::name_factors(factors);
        }
    }

    /// Judges the bytes of a program's buffers after a run by those before it: the largest error, as a part of what is
    /// allowed where it lies.
    ///
    /// # Errors
    /// The first array that is wrong.
    pub(crate) fn judge(
        &self,
        program: &Program<Kernel>,
        before: &[Vec<u8>],
        after: &[Vec<u8>],
    ) -> Result<f64, Wrong> {
        let array = |index: usize| {
            let buffer = &program.buffers[index];
            let bytes = if buffer.role == BufferRole::Input { before } else { after };
            numbers(buffer.elem, &bytes[index])
        };
        let cols = || program.buffers[0].shape.last().map_or(1, |&cols| cols as usize);
        let expected = match self {
            Reference::Attention(problem) => return attention(problem, |BufferId(index)| array(index)),
            Reference::Gradients(problem) => return gradients::judge(problem, program, before, after),
            Reference::Sum => plain::sum(&array(0), &array(1)),
            Reference::Softmax => plain::softmax(&array(0), cols()),
            Reference::Copy => array(0).into_iter().map(Expected::exactly).collect(),
            Reference::Transpose => plain::transposed(&array(0), cols()),
            Reference::Product => {
                let of_e4m3 = program.buffers[0].elem == Elem::E4m3;
                let core = if of_e4m3 { TensorCore::E4M3 } else { TensorCore::HALF };
                let result = program.buffers.last().map_or(Elem::F32, |buffer| buffer.elem);
                plain::product(&array(0), &array(1), cols(), core, rounding(result))
            }
        };
        // The last buffer is the only one that is no input.
        let last = program.buffers.len() - 1;
        plain::check(&array(last), &expected)
            .map_err(|mismatch| Wrong::Element { array: program.buffers[last].name, mismatch })
    }
}

/// What rounding a number to an element may cost, as a part of it.
fn rounding(elem: Elem) -> f64 {
    f64::powi(
        2.0,
        match elem {
            Elem::Bf16 => -8,
            Elem::F16 => -11,
            Elem::E4m3 => -4,
            Elem::F32 | Elem::U8 | Elem::U32 | Elem::U64 => -24,
        },
    )
}

/// What scores of e4m3 may be off by, relative to the size of LSE or to 1.
const SCORES_OF_FP8: f64 = 5e-3;

/// The error law of O and of LSE.
fn attention(problem: &Problem, array: impl Fn(BufferId) -> Vec<f64>) -> Result<f64, Wrong> {
    let tensor = |buffer, shape: fa3_types::Shape| {
        Array4::from_shape_vec(shape.dims(), array(buffer)).expect("contiguous tensors have their elements")
    };
    let [q, k, o] = [(buffers::Q, problem.q()), (buffers::K, problem.k()), (buffers::O, problem.o())]
        .map(|(buffer, desc)| tensor(buffer, desc.shape));
    let v = match problem.v_layout() {
        ValueLayout::Rows => tensor(buffers::V, problem.v().shape),
        ValueLayout::Transposed => in_rows(problem.v().shape, &array(buffers::V)),
    };
    let lse = Array3::from_shape_vec(problem.lse_shape(), array(buffers::LSE));
    let lse = lse.expect("lse has its shape").mapv(|x| x as f32);
    let inputs = Inputs::new(problem, q.view(), k.view(), v.view()).expect("the arrays have their shapes");
    let law = ForwardLaw::new(&inputs, Precision::of_output(problem.dtype()));
    let o = o.mapv(|x| x as f32);
    if problem.dtype() == Dtype::E4m3 {
        return fp8_attention(problem, [&q, &k, &v], &inputs, &law, o.view(), lse.view());
    }
    let satisfied = law.check(&Forward { o, lse }, "")?;
    Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// V that lies transposed.
fn in_rows(shape: fa3_types::Shape, transposed: &[f64]) -> Array4<f64> {
    let keys = ValueLayout::keys_of_row(shape.seqlen);
    Array4::from_shape_fn(shape.dims(), |(batch, key, head, col)| {
        let row = (batch * shape.heads + head) * shape.head_dim + col;
        transposed[row * keys + ValueLayout::place_of_key(key)]
    })
}

/// The same with standard attention in FP8 as the baseline. LSE is of scores with 13 fraction bits and of rounded P.
fn fp8_attention(
    problem: &Problem,
    qkv: [&Array4<f64>; 3],
    inputs: &Inputs<'_, f64>,
    law: &ForwardLaw,
    o: ArrayView4<'_, f32>,
    lse: ArrayView3<'_, f32>,
) -> Result<f64, Wrong> {
    let [q, k, v] = qkv;
    let codes = |x: &Array4<f64>, sequences| {
        let codes = x.mapv(|x| E4m3::from_f32(x as f32));
        Quantized::new(codes, sequences, Granularity::Tensor, vec![1.0]).expect("one scale is right for all")
    };
    let (seqs_q, seqs_k) = (problem.seqs_q(), problem.seqs_k());
    let baseline = StandardFp8.forward(problem, &codes(q, seqs_q), &codes(k, seqs_k), &codes(v, seqs_k));
    let baseline = baseline.expect("the codes are the problem's").o;
    let fp8 = law.with_baseline(inputs, baseline.view(), Precision::of_output(problem.dtype()));
    let ratio = fp8.check_o(o, "")?.ratio;
    let of_sums = rounded_row_sum_loss(seqs_k.max_len());
    for (given, expected) in lse.iter().zip(&law.oracle().lse) {
        let bound = SCORES_OF_FP8 * expected.abs().max(1.0) + of_sums;
        let max = (f64::from(*given) - expected).abs();
        if max.partial_cmp(&bound).is_none_or(Ordering::is_gt) && f64::from(*given) != *expected {
            return Err(Wrong::Lse { max, bound });
        }
    }
    Ok(ratio)
}
