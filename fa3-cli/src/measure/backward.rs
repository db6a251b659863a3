//! Times of the backward pass on a GPU, whose gradients were checked.
//!
//! A launch before the timed launches and another one after them are checked. Their dO has one row for each head of K
//! and V of each sequence, and zeros elsewhere, so that f64 computes the gradients from few rows. Each element of dQ,
//! dK and dV is compared. The rows lie around the edges of tiles.

use fa3::cuda::{
    Backward, BackwardOptions, Device, DeviceBuffer, Forward, OperationError, Stream, Tensors, Workspace,
};
use fa3_ref::row_gradients::RowGradients;
use fa3_ref::rows::{RowIndex, SatisfiedRows, telling_rows};
use fa3_ref::{Inputs, Precision};
use fa3_types::{BackwardSpec, Dtype, KnownProblem};
use half::{bf16, f16};
use indicatif::ProgressBar;
use rayon::prelude::*;

use super::oracle::{TILE_ROWS, UnmeasuredDtype, Wrong, normal, view};
use super::{Outcome, Pace, Refusal, Timing, steps};
use crate::launches;

/// The tensors that launches read.
const INPUTS: [&str; 6] = ["q", "k", "v", "o", "lse", "dout"];
/// The tensors that launches write.
const GRADIENTS: [&str; 3] = ["dq", "dk", "dv"];

/// The device memory of a problem, and the laws of its gradients.
struct Fixture<'p> {
    problem: &'p KnownProblem,
    stream: Stream,
    backward: Backward,
    workspace: Workspace,
    inputs: [DeviceBuffer; 6],
    gradients: [DeviceBuffer; 3],
    laws: Laws,
}

/// The laws of single rows of dO.
struct Laws {
    rows: Vec<RowGradients>,
    /// The bytes of Q, K, V, of dO with these rows alone, and of dO with all rows.
    bytes: [Vec<u8>; 5],
    number: fn(u16) -> f32,
}

/// Measures the backward pass of `problem`, on numbers from N(0, 1). `progress` advances by [`steps`].
pub(crate) fn backward(
    device: &Device,
    problem: &KnownProblem,
    pace: Pace,
    progress: &ProgressBar,
) -> Outcome {
    let end = progress.position() + steps(1, pace) as u64;
    let timing = Fixture::new(device, problem).and_then(|mut fixture| fixture.measure(pace, progress));
    progress.set_position(end);
    timing.map_or_else(Outcome::from, Outcome::Checked)
}

impl<'p> Fixture<'p> {
    fn new(device: &Device, problem: &'p KnownProblem) -> Result<Fixture<'p>, Refusal> {
        let of_gradients =
            BackwardSpec::contiguous(problem.spec()).validate().map_err(OperationError::from)?;
        let backward = Backward::with(device, &of_gradients, &BackwardOptions::default())?;
        let stream = device.stream()?;
        let workspace = Workspace::new(device, &stream, backward.workspace_bytes())?;
        let buffer = |name: &str| {
            let (_, bytes) = backward.tensors().find(|(of, _)| *of == name).expect("a pass has this tensor");
            device.alloc(bytes as usize)
        };
        let [q, k, v, o, lse, dout] = INPUTS.map(buffer);
        let [dq, dk, dv] = GRADIENTS.map(buffer);
        let mut inputs = [q?, k?, v?, o?, lse?, dout?];
        let laws = Laws::new(problem)?;
        for (input, bytes) in inputs.iter_mut().zip(&laws.bytes[..3]) {
            input.upload(&stream, bytes)?;
        }
        let forward = Forward::new(device, problem)?;
        let mut of_forward = Workspace::new(device, &stream, forward.workspace_bytes())?;
        let [q, k, v, o, lse, _] = &mut inputs;
        let tensors = Tensors::new([("q", &*q), ("k", &*k), ("v", &*v)], [("o", o), ("lse", lse)]);
        forward.run(&stream, tensors, &mut of_forward)?;
        let gradients = [dq?, dk?, dv?];
        Ok(Fixture { problem, stream, backward, workspace, inputs, gradients, laws })
    }

    fn measure(&mut self, pace: Pace, progress: &ProgressBar) -> Result<Timing, Refusal> {
        let before = self.check()?;
        self.inputs[5].upload(&self.stream, &self.laws.bytes[4])?;
        let (stream, mut launch) = self.launch();
        let launches = launches::fill(stream, pace.slice_ms, &mut launch)?;
        progress.inc(1);
        let millis = (0..pace.rounds).map(|_| {
            progress.inc(1);
            launches::time(stream, launches, &mut launch)
        });
        let millis = millis.collect::<Result<Vec<f64>, OperationError>>()?;
        drop(launch);
        for (what, gradient) in GRADIENTS.into_iter().zip(self.download()?) {
            if let Some(at) = gradient.par_iter().position_first(|x| x.is_nan()) {
                return Err(Wrong::Nan { what, at }.into());
            }
        }
        let after = self.check()?;
        let plan = self.backward.plan().dkv().tile.to_string();
        Ok(Timing::new(plan, launches, millis, before.rows, before.ratio.max(after.ratio)))
    }

    /// The stream, and a function that launches the pass on it.
    fn launch(&mut self) -> (&Stream, impl FnMut() -> Result<(), OperationError>) {
        let Fixture { stream, backward, workspace, inputs, gradients, .. } = self;
        let stream = &*stream;
        (stream, move || {
            let inputs = INPUTS.into_iter().zip(&*inputs);
            let tensors = inputs.fold(Tensors::default(), |tensors, (name, x)| tensors.input(name, x));
            let gradients = GRADIENTS.into_iter().zip(&mut *gradients);
            let tensors = gradients.fold(tensors, |tensors, (name, x)| tensors.output(name, x));
            backward.run(stream, tensors, workspace)
        })
    }

    fn download(&self) -> Result<[Vec<f32>; 3], OperationError> {
        let number = self.laws.number;
        let [dq, dk, dv] = self.gradients.each_ref().map(|x| {
            let bits: Vec<u16> = x.download(&self.stream)?;
            Ok::<_, OperationError>(bits.into_par_iter().map(number).collect())
        });
        Ok([dq?, dk?, dv?])
    }

    /// Computes the gradients of single rows into buffers filled with NaN, and checks them.
    fn check(&mut self) -> Result<SatisfiedRows, Refusal> {
        self.inputs[5].upload(&self.stream, &self.laws.bytes[3])?;
        self.gradients.iter_mut().try_for_each(|x| x.fill(&self.stream, 0xFF))?;
        self.launch().1()?;
        let gradients = self.download()?;
        Ok(self.laws.check(self.problem, &gradients)?)
    }
}

impl Laws {
    fn new(problem: &KnownProblem) -> Result<Laws, UnmeasuredDtype> {
        match problem.dtype() {
            Dtype::F16 => {
                Ok(Laws::of(problem, |x| f16::from_f32(x).to_bits(), |x| f16::from_bits(x).to_f32()))
            }
            Dtype::Bf16 => {
                Ok(Laws::of(problem, |x| bf16::from_f32(x).to_bits(), |x| bf16::from_bits(x).to_f32()))
            }
            dtype @ (Dtype::F32 | Dtype::E4m3 | Dtype::Int8) => Err(UnmeasuredDtype { dtype }),
        }
    }

    fn of(problem: &KnownProblem, bits: fn(f32) -> u16, number: fn(u16) -> f32) -> Laws {
        let tensors = [(problem.q(), 1), (problem.k(), 2), (problem.v(), 3), (problem.o(), 4)];
        let drawn =
            tensors.map(|(x, seed)| normal(x.shape.dims().iter().product(), seed, |x| number(bits(x))));
        let [q, k, v, dout] = [0, 1, 2, 3].map(|at| view(tensors[at].0, &drawn[at]));
        let inputs = Inputs::new(problem, q, k, v).expect("the arrays have the problem's shapes");
        let chosen = rows(problem);
        let precision = Precision::of_output(problem.dtype());
        let at = |row: &RowIndex| ndarray::s![row.sequence, row.row, row.head, ..];
        let laws =
            chosen.par_iter().map(|row| RowGradients::new(&inputs, precision, *row, dout.slice(at(row))));
        let laws = laws.collect();
        let mut alone = ndarray::Array4::<f32>::zeros(dout.dim());
        for row in &chosen {
            alone.slice_mut(at(row)).assign(&dout.slice(at(row)));
        }
        let alone = alone.into_raw_vec_and_offset().0;
        let [q, k, v, dout] = drawn;
        let bytes = [q, k, v, alone, dout];
        let bytes = bytes.map(|x| x.into_iter().flat_map(|x| bits(x).to_ne_bytes()).collect());
        Laws { rows: laws, bytes, number }
    }

    fn check(&self, problem: &KnownProblem, gradients: &[Vec<f32>; 3]) -> Result<SatisfiedRows, Wrong> {
        let [dq, dk, dv] = gradients;
        let gradients = [view(problem.q(), dq), view(problem.k(), dk), view(problem.v(), dv)];
        let each = self.rows.par_iter().map(|law| law.check(gradients));
        let sum = |one: SatisfiedRows, other: SatisfiedRows| SatisfiedRows {
            rows: one.rows + other.rows,
            ratio: one.ratio.max(other.ratio),
        };
        each.try_reduce(SatisfiedRows::default, |one, other| Ok(sum(one, other))).map_err(Wrong::from)
    }
}

/// A row of each head of K and V of each sequence. Its query head is another one from head to head.
fn rows(problem: &KnownProblem) -> Vec<RowIndex> {
    let mut edges: Vec<usize> = telling_rows(problem, &TILE_ROWS).into_iter().map(|at| at.row).collect();
    edges.sort_unstable();
    edges.dedup();
    let (heads, group) = (problem.heads().kv(), problem.heads().group_size());
    let row = |number: usize| RowIndex {
        sequence: number / heads,
        head: number % heads * group + number % group,
        row: edges[number % edges.len()],
    };
    (0..problem.batch() * heads).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3::Attention;
    use fa3_types::{ProblemSpec, Shape};
    use ndarray::Array4;

    /// Gradients of the CPU are right for the rows whose bytes the laws give, and a change of an element is found.
    #[test]
    fn gradients_of_single_rows_are_judged() {
        let shape = Shape { batch: 2, seqlen: 30, heads: 4, head_dim: 16 };
        let spec = ProblemSpec::dense(Dtype::Bf16, shape, Shape { heads: 2, ..shape }).causal();
        let problem = spec.known().unwrap();
        let laws = Laws::new(&problem).unwrap();
        let of_bytes = |at: usize, x: &fa3_types::TensorDesc| {
            let numbers =
                laws.bytes[at].chunks(2).map(|x| bf16::from_ne_bytes(x.try_into().unwrap())).collect();
            Array4::from_shape_vec(x.shape.dims(), numbers).unwrap()
        };
        let [q, k, v, dout] = [(0, problem.q()), (1, problem.k()), (2, problem.v()), (3, problem.o())]
            .map(|(at, x)| of_bytes(at, x));
        let attention = Attention::new(q.view(), k.view(), v.view()).causal();
        let output = attention.forward(&fa3::Device::Cpu).unwrap();
        let gradients = attention.backward(&fa3::Device::Cpu, &output, dout.view()).unwrap();
        let numbers = |x: Array4<bf16>| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let mut gradients = [gradients.dq, gradients.dk, gradients.dv].map(numbers);
        let satisfied = laws.check(&problem, &gradients).unwrap();
        assert!(satisfied.rows == 4 && satisfied.ratio > 0.0 && satisfied.ratio <= 1.0, "{satisfied:?}");
        gradients[1][3] += 9.0;
        assert!(
            matches!(laws.check(&problem, &gradients), Err(Wrong::Row(violation)) if violation.what == "dk")
        );
        assert!(laws.bytes[3] != laws.bytes[4] && laws.bytes[3].len() == laws.bytes[4].len());
    }
}
