//! Forward trials: writes arrays in their memory layouts, gaps included, and reads the results back.
//!
//! ```text
//! (plan, values) → program and bytes → simulator or GPU → bytes → O, LSE
//! ```

pub mod blocks;
mod fp8;
pub(crate) mod functions;
pub(crate) mod intervals;
mod layout;
pub(crate) mod listed;
mod scores;
pub mod shapes;
mod trials;
pub(crate) mod wide;

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::fwd;
use fa3_ir::{Buffer, Kernel, Program};
use fa3_quant::E4m3;
use fa3_ref::Forward;
use fa3_sched::DeviceLimits;
use fa3_sched::forward::{CtaTile, Plan, PlanError, PlanOptions};
use fa3_sim::{Loaded, Mode, Policy};
use fa3_types::{
    Dtype, KnownProblem, LseForm, Problem, ProblemSpec, ScoreTable, Shape, TensorDesc, ValueLayout,
};
use ndarray::{Array3, Array4, Axis};
use std::num::NonZeroU32;

use crate::memory::{Memory, UNWRITTEN, before, tensor_bytes, words};
use crate::{Arithmetic, Case, Judge, Scaled, Values, simulate};

pub use crate::memory::{decode, encode, rounded};
pub use layout::Layout;
pub use listed::{random_function, random_packed};
pub use trials::trial;
pub(crate) use trials::{small, trials};

/// A planned forward problem.
pub struct Launch {
    /// The problem.
    pub problem: KnownProblem,
    /// The plan.
    pub plan: Plan,
    /// The kernels with their arguments. There are no steps if there is nothing to compute.
    pub program: Program<Kernel>,
}

/// Failure of a launch.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum Fault {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("under {policy:?}: {what}")]
    Run { policy: Policy, what: String },
}

/// The limits of an H100, but with `sms` SMs. With few SMs, persistent CTAs compute several tiles of small problems.
///
/// # Panics
/// If `sms` is 0.
pub fn device(sms: u32) -> DeviceLimits {
    DeviceLimits::h100_sxm().sms(NonZeroU32::new(sms).expect("a device has SMs"))
}

/// The default form of LSE, and two forms that together differ from it in everything.
pub(crate) const LSE_FORMS: [LseForm; 3] = [
    LseForm { base_two: false, without_sink: false, empty_is_infinite: false },
    LseForm { base_two: true, without_sink: false, empty_is_infinite: true },
    LseForm { base_two: false, without_sink: true, empty_is_infinite: true },
];

/// The specification of a dense problem, not yet validated.
pub fn dense(
    dtype: Dtype,
    batch: usize,
    (seqlen_q, seqlen_k): (usize, usize),
    heads: (usize, usize),
    head_dim: usize,
) -> ProblemSpec {
    let q = Shape { batch, seqlen: seqlen_q, heads: heads.0, head_dim };
    ProblemSpec::dense(dtype, q, Shape { seqlen: seqlen_k, heads: heads.1, ..q })
}

/// Adds a contiguous `qv` to the specification.
pub fn with_qv(spec: ProblemSpec) -> ProblemSpec {
    let qv = TensorDesc::contiguous(spec.q.dtype, spec.o.shape);
    spec.qv(qv)
}

/// Plan options with this tile, which the head dimensions must fit.
pub fn with_tile(tile: CtaTile) -> PlanOptions {
    PlanOptions::default().tile(tile)
}

/// Checks results against the error law. Returns the largest ratio of an error to its bound.
///
/// # Errors
/// The violation of the law.
pub fn judged(case: &Case, values: &Values, answer: &Forward<f32>) -> Result<f64, String> {
    let replay = "cargo test -p fa3-tests --test suite";
    let arithmetic = Arithmetic::of_kernels(case.problem.dtype());
    let verdict = Judge::new(case, values).forward(arithmetic, answer, replay);
    let parts = verdict.map_err(|violation| violation.to_string())?;
    Ok(parts.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// Checks the largest score of each row, if the program has it.
///
/// # Errors
/// The first wrong number.
pub(crate) fn check_max_logits(case: &Case, values: &Values, after: Memory<'_>) -> Result<(), String> {
    let Some(given) = after.floats(fwd::buffers::MAX_LOGITS) else { return Ok(()) };
    let (case, values) = case.joined(values);
    let problem = &case.problem;
    let [_, heads, rows] = problem.lse_shape();
    let [q, k] = [&values.q, &values.k].map(|x| x.mapv(f64::from));
    let mut expected = vec![f64::NEG_INFINITY; given.len()];
    for index in 0..problem.batch() {
        let (len, (batch_q, first_q), (batch_k, first_k)) =
            (problem.lengths(index), problem.rows_q().start(index), problem.rows_k().start(index));
        for head in 0..heads {
            let [q, k] = [(&q, batch_q, head), (&k, batch_k, problem.heads().kv_head(head))]
                .map(|(x, batch, head)| x.index_axis(Axis(0), batch).index_axis_move(Axis(1), head));
            let products = q.dot(&k.t());
            for row in 0..len.q {
                let keys = (0..len.k).filter(|&key| problem.allows([index, head, row], key));
                let scores = keys.map(|key| {
                    let score = products[[first_q + row, first_k + key]] * problem.softmax_scale().natural();
                    problem.softcap().map_or(score, |cap| cap.apply(score))
                });
                expected[(batch_q * heads + head) * rows + first_q + row] =
                    scores.fold(f64::NEG_INFINITY, f64::max);
            }
        }
    }
    let is_near =
        |(&x, &y): (&f32, &f64)| f64::from(x) == y || (f64::from(x) - y).abs() <= 1e-4 * y.abs().max(1.0);
    match given.iter().zip(&expected).position(|pair| !is_near(pair)) {
        Some(at) => Err(format!("max_logits at {at} is {}, expected {}", given[at], expected[at])),
        None => Ok(()),
    }
}

impl Launch {
    /// Plans `problem` for a device.
    ///
    /// # Errors
    /// If the planner refuses the problem.
    pub fn new(
        problem: &KnownProblem,
        limits: &DeviceLimits,
        options: &PlanOptions,
    ) -> Result<Launch, Fault> {
        let plan = Plan::with(problem, limits, options)?;
        let program = fwd::program(&plan).map(Spec::kernel);
        Ok(Launch { problem: problem.clone(), plan, program })
    }

    /// Multiply-adds of the matrix products, padding included. For varlen problems this is an upper bound.
    pub fn macs(&self) -> u64 {
        let shape = &self.plan.tile();
        let block = u64::from(shape.tile_m * shape.tile_n) * u64::from(shape.head_dim + shape.head_dim_v);
        let blocks = match self.plan.dense() {
            Some(tiles) => tiles.cost().blocks,
            None => {
                let lengths = (0..self.problem.batch()).map(|index| self.problem.lengths(index));
                let blocks = lengths
                    .map(|len| len.q.div_ceil(shape.tile_m as usize) * len.k.div_ceil(shape.tile_n as usize));
                (blocks.sum::<usize>() * self.problem.heads().q()) as u64
            }
        };
        blocks * block
    }

    /// Runs the program in the simulator.
    ///
    /// # Errors
    /// The simulator's finding, or a changed byte outside of O or in a counter.
    pub fn simulate(&self, values: &Values, policy: Policy, mode: Mode) -> Result<Forward<f32>, Fault> {
        if self.program.steps.is_empty() {
            return Ok(nothing(&self.problem));
        }
        let before = initial(&self.problem, &self.program, values);
        let after = simulate(&self.program.map(Loaded::new), &before, policy, mode).and_then(|after| {
            Memory::new(&self.program, &after).check_rest(&before)?;
            Ok(results(&self.problem, &self.program, &after))
        });
        after.map_err(|what| Fault::Run { policy, what })
    }
}

/// The results of a problem that has no tiles.
fn nothing(problem: &Problem) -> Forward<f32> {
    let o = Array4::zeros(problem.o().shape.dims());
    Forward { o, lse: Array3::from_elem(problem.lse_shape(), f32::NEG_INFINITY) }
}

/// Initial bytes of every buffer of a forward program.
///
/// # Panics
/// If the size of an array differs from its buffer's.
pub fn initial(problem: &KnownProblem, program: &Program<Kernel>, values: &Values) -> Vec<Vec<u8>> {
    before(program, |buffer| input(problem, values, buffer))
}

/// Bytes of a buffer that the caller of this problem fills, except outputs and gradients.
pub(crate) fn input(problem: &KnownProblem, values: &Values, buffer: &Buffer) -> Option<Vec<u8>> {
    let code = |of: Scaled, x: &Array4<f32>| match of.dtype(problem) {
        Dtype::E4m3 | Dtype::Int8 => of.codes(problem, x),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => x.clone(),
    };
    let floats = |numbers: Vec<f32>| words(numbers, f32::to_le_bytes);
    let list = |list: Vec<i32>| words(list, i32::to_le_bytes);
    Some(match buffer.name {
        "q" => tensor_bytes(problem.q(), &code(Scaled::Q, &values.q)),
        "k" => tensor_bytes(problem.k(), &code(Scaled::K, &values.k)),
        "v" => {
            let v = code(Scaled::V, &values.v);
            match problem.v_layout() {
                ValueLayout::Transposed => transposed_bytes(problem, &v),
                ValueLayout::Rows => tensor_bytes(problem.v(), &v),
            }
        }
        "qv" => tensor_bytes(problem.qv()?, values.qv.as_ref()?),
        "q_descale" => floats(Scaled::Q.scales(problem)),
        "k_scales" if let Some(scales) = problem.token_scales() => {
            tensor_bytes(&scales.k, &Scaled::K.token_scales(problem))
        }
        "v_scales" if let Some(scales) = problem.token_scales() => {
            tensor_bytes(&scales.v, &Scaled::V.token_scales(problem))
        }
        "k_descale" => floats(Scaled::K.scales(problem)),
        "v_descale" => floats(Scaled::V.scales(problem)),
        "v_mean" => floats(Scaled::means(problem)?),
        "sink" => floats(values.sink.as_ref()?.to_vec()),
        name if let Some(table) = ScoreTable::NAMES.iter().position(|table| *table == name) => {
            floats(problem.score_function()?.tables().get(table)?.elements().to_vec())
        }
        "intervals" => list(problem.intervals()?.bounds().to_vec()),
        "cu_seqlens_q" => list(problem.rows_q().cu_seqlens()),
        "cu_seqlens_k" => list(problem.rows_k().cu_seqlens()),
        "seqused_q" => list(problem.rows_q().seqused()),
        "seqused_k" => list(problem.rows_k().seqused()),
        // A caller that provides a table also fills it.
        "table" => vec![UNWRITTEN; buffer.bytes()],
        _ => return None,
    })
}

/// O and LSE from the final bytes of every buffer of a forward program.
///
/// # Panics
/// If the sizes of the bytes do not match the problem.
pub fn results(problem: &Problem, program: &Program<Kernel>, arrays: &[Vec<u8>]) -> Forward<f32> {
    outputs(problem, Memory::new(program, arrays))
}

/// O and LSE from the final memory of a forward program.
pub(crate) fn outputs(problem: &Problem, after: Memory<'_>) -> Forward<f32> {
    let lse = Array3::from_shape_vec(problem.lse_shape(), after.floats("lse").unwrap_or_default());
    Forward { o: after.tensor("o"), lse: lse.expect("the array is as large as the tensor") }
}

/// Bytes of e4m3 V that is transposed in memory.
fn transposed_bytes(problem: &Problem, v: &Array4<f32>) -> Vec<u8> {
    let keys = ValueLayout::keys_of_row(problem.v().shape.seqlen);
    let mut bytes = vec![0; problem.v_bytes().0 as usize];
    let (_, _, heads, cols) = v.dim();
    for ((batch, key, head, col), &x) in v.indexed_iter() {
        let row = (batch * heads + head) * cols + col;
        bytes[row * keys + ValueLayout::place_of_key(key)] = E4m3::from_f32(x).to_bits();
    }
    bytes
}
