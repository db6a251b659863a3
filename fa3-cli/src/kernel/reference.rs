//! References for a program's results: the oracle and the error law for attention, plain loops for everything else.

mod cache;
mod gradients;

use fa3_cuda::kernels::fwd::buffers;
use fa3_ir::{BufferId, Elem, Kernel, Program};
use fa3_ref::law::{ForwardLaw, Violation, check_lse_within};
use fa3_ref::norms::Worst;
use fa3_ref::plain::{self, Expected, Mismatch, TensorCore};
use fa3_ref::{Forward, Inputs, Precision};
use fa3_sim::trace::Factors;
use fa3_types::{BackwardProblem, Dtype, KnownProblem, ScoreTable, Shape, ValueLayout};
use ndarray::{Array3, Array4, Axis, concatenate};

use crate::args::cache::CacheProblem;
use crate::fp8;
use crate::sim::buffers::{BufferError, numbers};

/// The computation that a program performs.
#[derive(Debug)]
pub(crate) enum Reference {
    /// O and LSE of attention with contiguous tensors.
    Attention(Box<KnownProblem>),
    /// O and LSE of attention over a cache, after an optional append.
    Cache(Box<CacheProblem>),
    /// dQ, dK and dV of attention with contiguous tensors.
    Gradients {
        problem: Box<BackwardProblem>,
        /// The forward problem, with the tables of its function of scores.
        known: Box<KnownProblem>,
    },
    /// The last buffer, computed from the buffers before it.
    Plain(Plain),
}

/// The computation of one array by plain loops.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Plain {
    /// x + y.
    Sum,
    /// The softmax of each row.
    Softmax,
    /// A copy of the input.
    Copy,
    /// The transposed input.
    Transpose,
    /// A Bᵀ.
    Product,
}

/// A result that is wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum Wrong {
    #[error("{what} is {max:e} from the oracle where the error law allows {bound:e}, first at {first}")]
    Law { what: &'static str, max: f64, bound: f64, first: Worst },
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
    /// FLOP of attention over dense batches; 0 for other programs.
    pub(crate) fn flops(&self) -> f64 {
        match self {
            Reference::Attention(problem) => problem.forward_flops(),
            Reference::Gradients { known, .. } => 2.5 * known.forward_flops(),
            Reference::Cache(_) | Reference::Plain(_) => 0.0,
        }
    }

    /// Writes the inputs that are not random: the ones that address other inputs, such as page tables, and tables of a
    /// function of scores.
    pub(crate) fn place(
        &self,
        program: &Program<Kernel>,
        before: &mut [Vec<u8>],
        seed: u64,
    ) -> Result<(), BufferError> {
        match self {
            Reference::Cache(problem) => cache::write(problem, program, before, seed),
            Reference::Attention(problem) | Reference::Gradients { known: problem, .. } => {
                let tables = problem.score_function().map_or(&[][..], |function| function.tables());
                for (name, table) in ScoreTable::NAMES.into_iter().zip(tables) {
                    if let Some(BufferId(buffer)) = program.find(name) {
                        before[buffer] = table.elements().iter().flat_map(|x| x.to_le_bytes()).collect();
                    }
                }
                Ok(())
            }
            Reference::Plain(_) => Ok(()),
        }
    }

    /// Replaces random inputs of a program that are not consistent with each other.
    pub(crate) fn prepare(&self, program: &Program<Kernel>, before: &mut [Vec<u8>]) {
        if let Reference::Gradients { known, .. } = self {
            gradients::prepare(known, program, before);
        }
    }

    /// Renames the factors of attention's matrix products as in the paper.
    pub(crate) fn name_factors(&self, factors: &mut Factors) {
        if let Reference::Attention(_) | Reference::Cache(_) = self {
            factors.a.get_or_insert_with(|| "P".to_owned());
        } else if let Reference::Gradients { .. } = self {
            gradients::name_factors(factors);
        }
    }

    /// The tolerance of a result, in words.
    pub(crate) fn allowed(&self) -> &'static str {
        match self {
            Reference::Attention(_) | Reference::Cache(_) | Reference::Gradients { .. } => {
                "the error law's bound"
            }
            Reference::Plain(_) => "what computing in f32 and one rounding of the result may cost",
        }
    }

    /// Compares a program's buffers after a run with the reference for the buffers before it. Returns the largest
    /// error, as a fraction of what is allowed for its element.
    pub(crate) fn judge(
        &self,
        program: &Program<Kernel>,
        before: &[Vec<u8>],
        after: &[Vec<u8>],
    ) -> Result<f64, Wrong> {
        let [before, after] = [before, after].map(|bytes| Contents { program, bytes });
        match self {
            Reference::Attention(problem) => attention(problem, &before, &after),
            Reference::Cache(problem) => cache::judge(problem, &before, &after),
            Reference::Gradients { problem, known } => gradients::judge(problem, known, &before, &after),
            Reference::Plain(plain) => plain.judge(&before, &after),
        }
    }
}

impl Plain {
    /// Compares the last buffer, which is the only output.
    fn judge(self, before: &Contents<'_>, after: &Contents<'_>) -> Result<f64, Wrong> {
        let buffers = &before.program.buffers;
        let array = |index| before.numbers(BufferId(index));
        let cols = || buffers[0].shape.last().map_or(1, |&cols| cols as usize);
        let last = buffers.len() - 1;
        let expected = match self {
            Plain::Sum => plain::sum(&array(0), &array(1)),
            Plain::Softmax => plain::softmax(&array(0), cols()),
            Plain::Copy => array(0).into_iter().map(Expected::exactly).collect(),
            Plain::Transpose => plain::transposed(&array(0), cols()),
            Plain::Product => {
                let core = if buffers[0].elem == Elem::E4m3 { TensorCore::E4M3 } else { TensorCore::HALF };
                plain::product(&array(0), &array(1), cols(), core, rounding(buffers[last].elem))
            }
        };
        plain::check(&after.numbers(BufferId(last)), &expected)
            .map_err(|mismatch| Wrong::Element { array: buffers[last].name, mismatch })
    }
}

/// The contents of a program's buffers, before or after a run.
struct Contents<'a> {
    program: &'a Program<Kernel>,
    bytes: &'a [Vec<u8>],
}

impl Contents<'_> {
    fn numbers(&self, BufferId(index): BufferId) -> Vec<f64> {
        numbers(self.program.buffers[index].elem, &self.bytes[index])
    }

    fn tensor(&self, buffer: BufferId, shape: Shape) -> Array4<f64> {
        Array4::from_shape_vec(shape.dims(), self.numbers(buffer))
            .expect("a contiguous tensor has its elements")
    }

    /// A tensor of f32, such as LSE.
    fn floats(&self, buffer: BufferId, dims: [usize; 3]) -> Array3<f32> {
        let numbers = self.numbers(buffer).into_iter().map(|x| x as f32).collect();
        Array3::from_shape_vec(dims, numbers).expect("the tensor has its shape")
    }

    /// The buffer with this name.
    fn find(&self, name: &str) -> BufferId {
        self.program.find(name).expect("the program has the problem's tensors")
    }
}

/// The largest relative error when a number is rounded to `elem`.
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

/// Checks O and LSE by the error law.
fn attention(problem: &KnownProblem, before: &Contents<'_>, after: &Contents<'_>) -> Result<f64, Wrong> {
    let [q, k] = [(buffers::Q, problem.q()), (buffers::K, problem.k())]
        .map(|(buffer, desc)| before.tensor(buffer, desc.shape));
    let codes = match problem.v_layout() {
        ValueLayout::Rows => before.tensor(buffers::V, problem.v().shape),
        ValueLayout::Transposed => in_rows(problem.v().shape, &before.numbers(buffers::V)),
    };
    // All scales are 1, but the means of V's channels are arbitrary.
    let v_mean = problem.v_mean_shape().map(|shape| before.floats(buffers::V_MEAN, shape));
    let qv = before.program.find(buffers::QV).map(|qv| before.tensor(qv, problem.o().shape));
    let o = after.tensor(buffers::O, problem.o().shape).mapv(|x| x as f32);
    let lse = after.floats(buffers::LSE, problem.lse_shape());
    hold(problem, [q, k, codes], qv, v_mean, Forward { o, lse })
}

/// Checks O and LSE by the error law. `codes` is V without the means of its channels, and `qv` the part of Q that V is
/// multiplied by, if any.
fn hold(
    problem: &KnownProblem,
    [q, k, codes]: [Array4<f64>; 3],
    qv: Option<Array4<f64>>,
    v_mean: Option<Array3<f32>>,
    forward: Forward<f32>,
) -> Result<f64, Wrong> {
    let v = match &v_mean {
        None => codes.clone(),
        Some(mean) => Array4::from_shape_fn(codes.dim(), |at @ (batch, _, head, column)| {
            codes[at] + f64::from(mean[[batch, head, column]])
        }),
    };
    let problem = &problem.joined();
    let (q, k) = match qv {
        None => (q, k),
        Some(qv) => (side_by_side(&qv, &q), side_by_side(&v, &k)),
    };
    let inputs = Inputs::new(problem, q.view(), k.view(), v.view()).expect("the arrays have their shapes");
    let law = ForwardLaw::new(&inputs, Precision::of_output(problem.dtype()));
    let satisfied = if problem.dtype() == Dtype::E4m3 {
        let fp8 = fp8::law(&law, &inputs, [q.view(), k.view(), codes.view()], v_mean.as_ref());
        let tolerance = fp8::lse_tolerance(problem);
        let o = fp8.check_o(forward.o.view(), "")?;
        [o, check_lse_within(tolerance, forward.lse.view(), law.oracle().lse.view(), "")?]
    } else {
        law.check(&forward, "")?
    };
    Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// Concatenates the columns of two tensors.
fn side_by_side(first: &Array4<f64>, second: &Array4<f64>) -> Array4<f64> {
    concatenate(Axis(3), &[first.view(), second.view()])
        .expect("tensors of a valid problem have the same rows")
}

/// V in rows, from its transposed layout.
fn in_rows(shape: Shape, transposed: &[f64]) -> Array4<f64> {
    let keys = ValueLayout::keys_of_row(shape.seqlen);
    Array4::from_shape_fn(shape.dims(), |(batch, key, head, col)| {
        let row = (batch * shape.heads + head) * shape.head_dim + col;
        transposed[row * keys + ValueLayout::place_of_key(key)]
    })
}
