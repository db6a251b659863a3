//! The forward kernels on a case's values: arrays as they lie in memory, gaps and all, and results out of them.
//!
//! ```text
//! (plan, values) → job and bytes → simulator or GPU → bytes → O, LSE
//! ```

mod fp8;
pub(crate) mod intervals;
mod layout;
pub(crate) mod listed;
mod scores;
pub mod shapes;
mod trials;
pub(crate) mod wide;

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::fwd::{self, buffers};
use fa3_ir::{Buffer, BufferId, BufferRole, Kernel, Program};
use fa3_quant::E4m3;
use fa3_ref::Forward;
use fa3_sched::DeviceLimits;
use fa3_sched::forward::{CtaTile, Plan, PlanError, PlanOptions};
use fa3_sim::{Mode, Policy, ProgramSimulation, SimError};
use fa3_types::{Dtype, KnownProblem, Problem, ProblemSpec, Shape, TensorDesc, ValueLayout};
use half::{bf16, f16};
use ndarray::{Array3, Array4, ArrayView1};
use std::num::NonZeroU32;

use crate::family::Family;
use crate::mutate::forward_targets;
use crate::{Arithmetic, Case, Judge, Scaled, Values};

pub use layout::Layout;
pub use listed::random_packed;

/// Bytes that nobody has written: NaN in every type.
pub(crate) const UNWRITTEN: u8 = 0xFF;

/// The forward kernels.
pub(crate) const FAMILY: Family = Family {
    name: "fwd",
    trials: trials::trials,
    small: trials::small,
    schedules: 5,
    targets: forward_targets,
};

/// A forward kernel with a problem.
pub struct Launch {
    /// The problem.
    pub problem: KnownProblem,
    /// How the problem is computed.
    pub plan: Plan,
    /// The kernel with its arguments; no steps if there is nothing to compute.
    pub program: Program<Kernel>,
}

/// Failure of a launch.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum Fault {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Sim(#[from] SimError),
    #[error("{count} findings under {policy:?}, the first:\n{first}")]
    Findings { count: usize, policy: Policy, first: String },
    #[error("byte {at} of o lies in a gap and was overwritten")]
    Gap { at: usize },
    #[error("the tile counter is {counter} after the launch")]
    Counter { counter: u32 },
}

/// An H100 with another number of SMs: with a few, persistent CTAs compute several tiles of small problems.
///
/// # Panics
/// If there are none.
pub fn device(sms: u32) -> DeviceLimits {
    DeviceLimits::h100_sxm().sms(NonZeroU32::new(sms).expect("a device has SMs"))
}

/// A dense problem, before it is validated.
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

/// The same with a contiguous `qv`.
#[must_use]
pub fn with_qv(spec: ProblemSpec) -> ProblemSpec {
    let qv = TensorDesc::contiguous(spec.q.dtype, spec.o.shape);
    spec.qv(qv)
}

/// Plans with this tile, for any problem that it is large enough for.
pub fn with_tile(tile: CtaTile) -> PlanOptions {
    PlanOptions::default().tile(tile)
}

/// Holds results to the error law: the largest error over what it allows.
///
/// # Errors
/// What breaks the law.
pub fn judged(case: &Case, values: &Values, answer: &Forward<f32>) -> Result<f64, String> {
    let replay = "cargo test -p fa3-tests --test suite";
    let arithmetic = Arithmetic::of_kernels(case.problem.dtype());
    let verdict = Judge::new(case, values).forward(arithmetic, answer, replay);
    let parts = verdict.map_err(|violation| violation.to_string())?;
    Ok(parts.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

impl Launch {
    /// `problem` on a device.
    ///
    /// # Errors
    /// If there is no such plan.
    pub fn new(
        problem: &KnownProblem,
        limits: &DeviceLimits,
        options: &PlanOptions,
    ) -> Result<Launch, Fault> {
        let plan = Plan::with(problem, limits, options)?;
        let program = fwd::program(&plan).map(Spec::kernel);
        Ok(Launch { problem: problem.clone(), plan, program })
    }

    /// Multiplications and additions of the products, padding included. Of listed sequences at most so many.
    pub fn macs(&self) -> u64 {
        let shape = &self.plan.tile();
        let block = u64::from(shape.tile_m * shape.tile_n) * u64::from(shape.head_dim + shape.head_dim_v);
        let blocks = match self.plan.numbered() {
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

    /// Runs the kernel in the simulator.
    ///
    /// # Errors
    /// What the simulator found; a byte outside O, or a counter, that is not as it was.
    pub fn simulate(&self, values: &Values, policy: Policy, mode: Mode) -> Result<Forward<f32>, Fault> {
        if self.program.steps.is_empty() {
            return Ok(nothing(&self.problem));
        }
        let initial = initial(&self.problem, &self.program, values);
        let outcome = ProgramSimulation::new(&self.program).policy(policy).mode(mode).run(&initial)?;
        if let Some(first) = outcome.findings().next() {
            let (count, first) = (outcome.findings().count(), first.to_string());
            return Err(Fault::Findings { count, policy, first });
        }
        results(&self.problem, &self.program, &outcome.buffers)
    }
}

/// The results of a problem without tiles.
fn nothing(problem: &Problem) -> Forward<f32> {
    let o = Array4::zeros(problem.o().shape.dims());
    Forward { o, lse: Array3::from_elem(problem.lse_shape(), f32::NEG_INFINITY) }
}

/// The bytes of every buffer of a forward program before it runs.
///
/// # Panics
/// If an array is not as large as its buffer, or nobody knows what is in it.
pub fn initial(problem: &KnownProblem, program: &Program<Kernel>, values: &Values) -> Vec<Vec<u8>> {
    let arrays: Vec<Vec<u8>> =
        program.buffers.iter().map(|buffer| contents(problem, values, buffer)).collect();
    for (array, bytes) in program.buffers.iter().zip(&arrays) {
        assert_eq!(array.bytes(), bytes.len(), "{} of {problem}", array.name);
    }
    arrays
}

/// The bytes of a buffer of a forward program before it runs.
///
/// # Panics
/// If nobody knows what is in it.
pub(crate) fn contents(problem: &KnownProblem, values: &Values, buffer: &Buffer) -> Vec<u8> {
    let code = |of: Scaled, x: &Array4<f32>| match of.dtype(problem) {
        Dtype::E4m3 => of.codes(problem, x),
        Dtype::F32 | Dtype::F16 | Dtype::Bf16 => x.clone(),
    };
    let scales = |of: Scaled| of_numbers(of.scales(problem), f32::to_le_bytes);
    match (buffer.name, buffer.role) {
        ("q", _) => bytes(problem.q(), &code(Scaled::Q, &values.q)),
        ("k", _) => bytes(problem.k(), &code(Scaled::K, &values.k)),
        ("v", _) => {
            let v = code(Scaled::V, &values.v);
            match problem.v_layout() {
                ValueLayout::Transposed => transposed_bytes(problem, &v),
                ValueLayout::Rows => bytes(problem.v(), &v),
            }
        }
        ("qv", _) => {
            let (desc, qv) = problem.qv().zip(values.qv.as_ref()).expect("values have the problem's qv");
            bytes(desc, qv)
        }
        ("q_descale", _) => scales(Scaled::Q),
        ("k_descale", _) => scales(Scaled::K),
        ("v_descale", _) => scales(Scaled::V),
        ("v_mean", _) => of_numbers(Scaled::means(problem).expect("channels have means"), f32::to_le_bytes),
        ("sink", _) => {
            let sink = values.sink.as_ref().expect("values have the problem's sinks");
            of_numbers(sink.to_vec(), f32::to_le_bytes)
        }
        ("intervals", _) => bounds(problem),
        ("cu_seqlens_q" | "cu_seqlens_k" | "seqused_q" | "seqused_k", _) => list(problem, buffer.name),
        (_, BufferRole::Ticket) => vec![0; buffer.bytes()],
        // Whoever gives a table fills it.
        ("table", BufferRole::Input) => vec![UNWRITTEN; buffer.bytes()],
        (_, BufferRole::Output | BufferRole::OptionalOutput | BufferRole::InOut | BufferRole::Scratch) => {
            vec![UNWRITTEN; buffer.bytes()]
        }
        (name, role) => panic!("nobody knows what is in {name}, which is {role:?}"),
    }
}

/// The bytes of the list of lengths that has this name.
///
/// # Panics
/// If there is none.
pub(crate) fn list(problem: &KnownProblem, name: &str) -> Vec<u8> {
    let numbers = match name {
        "cu_seqlens_q" => problem.rows_q().cu_seqlens(),
        "cu_seqlens_k" => problem.rows_k().cu_seqlens(),
        "seqused_q" => problem.rows_q().seqused(),
        "seqused_k" => problem.rows_k().seqused(),
        _ => panic!("{name} is no list of lengths"),
    };
    of_numbers(numbers, i32::to_le_bytes)
}

/// The bytes of a problem's intervals.
///
/// # Panics
/// If it has none.
pub(crate) fn bounds(problem: &KnownProblem) -> Vec<u8> {
    let intervals = problem.intervals().expect("the problem has intervals");
    of_numbers(intervals.bounds().to_vec(), i32::to_le_bytes)
}

/// Numbers in memory.
fn of_numbers<T>(numbers: Vec<T>, bytes: fn(T) -> [u8; 4]) -> Vec<u8> {
    numbers.into_iter().flat_map(bytes).collect()
}

/// O and LSE from the bytes of every buffer of a forward program after it ran.
///
/// # Errors
/// A gap of O, or a counter, that is not as it was.
///
/// # Panics
/// If the bytes are not those of the problem's arrays.
pub fn results(
    problem: &Problem,
    program: &Program<Kernel>,
    arrays: &[Vec<u8>],
) -> Result<Forward<f32>, Fault> {
    let bytes = &arrays[buffers::O.0];
    let (o, in_gap) = numbers(problem.o(), bytes);
    if let Some(at) = (0..bytes.len()).find(|&at| in_gap[at] && bytes[at] != UNWRITTEN) {
        return Err(Fault::Gap { at });
    }
    let ticket = program.find(buffers::TICKET).map(|BufferId(at)| arrays[at].as_slice());
    if let Some(&[a, b, c, d]) = ticket
        && let counter @ 1.. = u32::from_le_bytes([a, b, c, d])
    {
        return Err(Fault::Counter { counter });
    }
    let (lse, _) = arrays[buffers::LSE.0].as_chunks();
    let lse = lse.iter().copied().map(f32::from_le_bytes).collect();
    let lse = Array3::from_shape_vec(problem.lse_shape(), lse).expect("the array is as large as the tensor");
    Ok(Forward { o, lse })
}

/// A tensor in memory, with NaN in its gaps.
pub(crate) fn bytes(tensor: &TensorDesc, x: &Array4<f32>) -> Vec<u8> {
    let mut bytes = vec![UNWRITTEN; tensor.extent_bytes().0 as usize];
    for (at, row) in rows(tensor).zip(x.rows()) {
        let width = tensor.dtype.bytes();
        for (element, &x) in bytes[at..].chunks_exact_mut(width).zip(row) {
            element.copy_from_slice(&encode(tensor.dtype, x).to_le_bytes()[..width]);
        }
    }
    bytes
}

/// V of e4m3 as it lies in memory transposed.
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

/// A tensor from memory, and which bytes are of none of its elements.
pub(crate) fn numbers(tensor: &TensorDesc, bytes: &[u8]) -> (Array4<f32>, Vec<bool>) {
    let (mut x, mut in_gap) = (Array4::zeros(tensor.shape.dims()), vec![true; bytes.len()]);
    for (at, mut row) in rows(tensor).zip(x.rows_mut()) {
        let (words, _) = bytes[at..][..2 * row.len()].as_chunks();
        in_gap[at..][..2 * row.len()].fill(false);
        row.assign(&ArrayView1::from(words).mapv(|word| decode(tensor.dtype, u16::from_le_bytes(word))));
    }
    (x, in_gap)
}

/// Where each row of a tensor begins, in bytes, in the order of an array's rows.
fn rows(tensor: &TensorDesc) -> impl Iterator<Item = usize> {
    let tensor = *tensor;
    let [batch, seqlen, heads, _] = tensor.shape.dims();
    ndarray::indices((batch, seqlen, heads, 1)).into_iter().map(move |(batch, row, head, _)| {
        tensor.dtype.bytes() * tensor.offset(batch, row, head, 0).0 as usize
    })
}

/// The bits of the number of a type of up to 16 bits that is nearest to `x`.
///
/// # Panics
/// If the type has more.
pub fn encode(dtype: Dtype, x: f32) -> u16 {
    match dtype {
        Dtype::F16 => f16::from_f32(x).to_bits(),
        Dtype::Bf16 => bf16::from_f32(x).to_bits(),
        Dtype::E4m3 => E4m3::from_f32(x).to_bits().into(),
        Dtype::F32 => unreachable!("the forward kernels do not take {dtype}"),
    }
}

/// The number of a type of up to 16 bits that is nearest to `x`.
///
/// # Panics
/// If the type has more.
pub fn rounded(dtype: Dtype, x: f32) -> f32 {
    decode(dtype, encode(dtype, x))
}

/// The number with these bits in a type of up to 16 bits.
///
/// # Panics
/// If the type has more.
pub fn decode(dtype: Dtype, bits: u16) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_bits(bits).to_f32(),
        Dtype::Bf16 => bf16::from_bits(bits).to_f32(),
        Dtype::E4m3 => E4m3::from_bits(bits as u8).to_f32(),
        Dtype::F32 => unreachable!("the forward kernels do not take {dtype}"),
    }
}
