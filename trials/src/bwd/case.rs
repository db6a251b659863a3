//! A backward problem with its inputs, and what must come out.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::bwd::{self, buffers};
use fa3_ir::{BufferId, BufferRole, Kernel, Program};
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Forward, Gradients, OutputGradients, Precision, oracle};
use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, Plan, PlanOptions};
use fa3_types::{BackwardProblem, BackwardSpec, KnownProblem, SequenceRows, Shape, TensorDesc};
use ndarray::{Array1, Array2, Array3, Array4, Axis};

use crate::family::{Bits, Trial};
use crate::fwd::{Layout, UNWRITTEN, bounds, bytes, list, numbers, rounded};
use crate::values::Rng;
use crate::{Case, Poison, Values};

/// A case, and how its gradients lie in memory.
#[derive(Clone, Debug)]
pub struct BwdCase {
    /// The forward pass, with its inputs and the gradient of O.
    pub case: Case,
    /// Layouts of dO, dQ, dK and dV.
    pub layout: Layout,
    /// Whether LSE has a gradient.
    pub dlse: bool,
    /// How many times the error that the law allows gradients may have: 1, unless chance makes it more.
    pub slack: f64,
}

/// Inputs of a backward pass besides Q, K, V and dO.
struct Given {
    /// O, rounded to its type, and LSE.
    forward: Forward<f32>,
    /// NaN where LSE is -inf; zeros if LSE has no gradient.
    dlse: Array3<f32>,
}

impl Given {
    /// Makes NaN of the rows that take no part in attention.
    fn poison_unused(&mut self, problem: &KnownProblem) {
        let used = used_rows(problem.rows_q(), problem.q().shape);
        let Given { forward: Forward { o, lse }, dlse } = self;
        for ((batch, row), _) in used.indexed_iter().filter(|(_, used)| !**used) {
            o.index_axis_mut(Axis(0), batch).index_axis_move(Axis(0), row).fill(f32::NAN);
            for x in [&mut *lse, &mut *dlse] {
                x.index_axis_mut(Axis(0), batch).index_axis_move(Axis(1), row).fill(f32::NAN);
            }
        }
    }
}

/// The rows of a tensor of this shape that take part in attention, (batch, seqlen).
fn used_rows(rows: &SequenceRows, shape: Shape) -> Array2<bool> {
    let mut used = Array2::from_elem((shape.batch, shape.seqlen), false);
    for index in 0..rows.count() {
        let (batch, first) = rows.start(index);
        let of_index = (first..first + rows.len(index)).into();
        used.index_axis_mut(Axis(0), batch).slice_axis_move(Axis(0), of_index).fill(true);
    }
    used
}

impl BwdCase {
    /// The problem.
    ///
    /// # Panics
    /// If the forward problem is e4m3.
    pub fn problem(&self) -> BackwardProblem {
        let forward = self.forward_spec();
        let mut spec = BackwardSpec::contiguous(forward);
        for gradient in [&mut spec.dout, &mut spec.dq, &mut spec.dk, &mut spec.dv] {
            gradient.strides = self.layout.strides(gradient);
        }
        spec.validate().unwrap_or_else(|error| panic!("{}: {error}", self.case.problem))
    }

    fn forward_spec(&self) -> fa3_types::ProblemSpec {
        let problem = &self.case.problem;
        let [q, k, v, o] = [problem.q(), problem.k(), problem.v(), problem.o()].map(|x| *x);
        let spec = fa3_types::ProblemSpec::new(q, k, v, o).mask(problem.mask());
        let mut spec = spec.seqs_q(problem.seqs_q()).seqs_k(problem.seqs_k());
        spec.softmax_scale = Some(problem.softmax_scale().natural());
        spec.softcap = problem.softcap().map(|cap| cap.bound());
        spec.sink = problem.has_sink();
        spec
    }

    /// As a trial on a device of so many SMs.
    ///
    /// # Panics
    /// If it cannot be planned.
    pub fn trial(self, limits: &DeviceLimits, options: &PlanOptions) -> Trial {
        let plan = Plan::with(&self.problem(), limits, options);
        let plan = plan.unwrap_or_else(|error| panic!("{}: {error}", self.case.problem));
        let program = bwd::program(&plan).map(Spec::kernel);
        let values = self.case.values();
        let given = self.given(&values);
        let dsink = program.find("dsink");
        Trial {
            name: format!("{plan}\n{}, {:?}, dlse {}", self.case.name, self.layout, self.dlse),
            before: self.before(plan.problem(), &program, &values, &given),
            program,
            bits: match plan.dkv().tile.adds_dq {
                Some(AddOrder::Any) => Bits::Schedule,
                Some(AddOrder::LastKeysFirst) | None => Bits::Approximations,
            },
            judge: Box::new(move |_, after| self.judge(&values, &given, dsink, after).map(|_| ())),
        }
    }

    fn given(&self, values: &Values) -> Given {
        let problem = &self.case.problem;
        let Forward { o, lse } = oracle::forward(&values.inputs(problem));
        let dtype = problem.o().dtype;
        let o = o.mapv(|x| rounded(dtype, x as f32));
        let lse = lse.mapv(|x| x as f32);
        let mut rng = Rng::new(self.case.seed ^ 0xd15e);
        // Merging parts by logaddexp makes NaN of the gradient of -inf.
        let dlse = lse.mapv(|lse| match (self.dlse, lse == f32::NEG_INFINITY) {
            (false, _) => 0.0,
            (true, false) => rng.normal() as f32,
            (true, true) => f32::NAN,
        });
        let mut given = Given { forward: Forward { o, lse }, dlse };
        if self.case.poison == Poison::BeyondEnd {
            given.poison_unused(problem);
        }
        given
    }

    /// The bytes of every buffer before the program runs.
    fn before(
        &self,
        problem: &BackwardProblem,
        program: &Program<Kernel>,
        values: &Values,
        given: &Given,
    ) -> Vec<Vec<u8>> {
        let forward = problem.forward();
        let floats = |x: &Array3<f32>| x.iter().flat_map(|x| x.to_le_bytes()).collect();
        let unwritten = |x: &TensorDesc| vec![UNWRITTEN; x.extent_bytes().0 as usize];
        let mut arrays: Vec<Vec<u8>> = vec![
            bytes(forward.q(), &values.q),
            bytes(forward.k(), &values.k),
            bytes(forward.v(), &values.v),
            bytes(forward.o(), &given.forward.o),
            floats(&given.forward.lse),
            bytes(problem.dout(), &values.dout),
            floats(&given.dlse),
            unwritten(problem.dq()),
            unwritten(problem.dk()),
            unwritten(problem.dv()),
        ];
        let rest = program.buffers[buffers::OF_CALLER..].iter();
        let rest = rest.map(|buffer| match (buffer.name, buffer.role, &values.sink) {
            ("sink", _, Some(sink)) => sink.iter().flat_map(|x| x.to_le_bytes()).collect(),
            ("intervals", ..) => bounds(&self.case.problem),
            (name, BufferRole::Input, _) => list(&self.case.problem, name),
            (_, BufferRole::Ticket, _) => vec![0; buffer.bytes()],
            _ => vec![UNWRITTEN; buffer.bytes()],
        });
        arrays.extend(rest);
        for (array, bytes) in program.buffers.iter().zip(&arrays) {
            assert_eq!(array.bytes(), bytes.len(), "{} of {problem}", array.name);
        }
        arrays
    }

    /// Holds gradients to the error law, and what nothing depends on to 0: the largest error over what is allowed.
    fn judge(
        &self,
        values: &Values,
        given: &Given,
        dsink: Option<BufferId>,
        after: &[Vec<u8>],
    ) -> Result<f64, String> {
        let (problem, forward) = (self.problem(), &self.case.problem);
        let read = |name: &str, BufferId(at): BufferId, tensor: &TensorDesc| -> Result<Array4<f32>, String> {
            let (x, in_gap) = numbers(tensor, &after[at]);
            match (0..after[at].len()).find(|&byte| in_gap[byte] && after[at][byte] != UNWRITTEN) {
                Some(byte) => Err(format!("byte {byte} of {name} lies in a gap and was overwritten")),
                None => Ok(x),
            }
        };
        let gradients = Gradients {
            dq: read("dq", buffers::DQ, problem.dq())?,
            dk: read("dk", buffers::DK, problem.dk())?,
            dv: read("dv", buffers::DV, problem.dv())?,
            dsink: dsink.map(|BufferId(at)| floats(&after[at])),
        };
        let output = OutputGradients { dout: values.dout.view(), dlse: Some(given.dlse.view()) };
        let precision = Precision::of_output(forward.dtype());
        let law = BackwardLaw::new(&values.inputs(forward), output, precision);
        let law = law.map_err(|error| error.to_string())?.loosened(self.slack);
        let replay = "FA3_FAMILY=bwd cargo test -p fa3-tests --test suite families";
        let satisfied = law.check(&gradients, replay).map_err(|violation| violation.to_string())?;
        check_independent(forward, &gradients)?;
        Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
    }
}

/// Numbers in memory.
fn floats(bytes: &[u8]) -> Array1<f32> {
    let (words, _) = bytes.as_chunks();
    words.iter().copied().map(f32::from_le_bytes).collect()
}

/// Rows that see no key, keys that no row sees, and rows that take no part have gradients of 0, exactly.
fn check_independent(problem: &KnownProblem, gradients: &Gradients<f32>) -> Result<(), String> {
    let [mut rows, mut keys] = [problem.q(), problem.k()]
        .map(|tensor| Array2::from_elem((tensor.shape.batch, tensor.shape.seqlen), false));
    for index in 0..problem.batch() {
        let len = problem.lengths(index);
        let [of_q, of_k] = [problem.rows_q(), problem.rows_k()].map(|rows| rows.start(index));
        for (row, key) in (0..len.q).flat_map(|row| (0..len.k).map(move |key| (row, key))) {
            let heads = if problem.intervals().is_some() { problem.heads().q() } else { 1 };
            if (0..heads).any(|head| problem.allows([index, head, row], key)) {
                rows[(of_q.0, of_q.1 + row)] = true;
                keys[(of_k.0, of_k.1 + key)] = true;
            }
        }
    }
    let parts = [("dq", &gradients.dq, &rows), ("dk", &gradients.dk, &keys), ("dv", &gradients.dv, &keys)];
    for (name, gradient, depends) in parts {
        let wrong =
            gradient.indexed_iter().find(|((batch, row, _, _), x)| **x != 0.0 && !depends[(*batch, *row)]);
        if let Some((at, x)) = wrong {
            return Err(format!("{name} at {at:?} is {x}, and nothing depends on it"));
        }
    }
    Ok(())
}
