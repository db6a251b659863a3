//! A backward problem with its inputs and the checks of its gradients.

use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::bwd;
use fa3_ref::law::BackwardLaw;
use fa3_ref::{Forward, Gradients, OutputGradients, Precision, oracle};
use fa3_sched::DeviceLimits;
use fa3_sched::backward::{AddOrder, Plan, PlanOptions};
use fa3_types::{BackwardProblem, BackwardSpec, KnownProblem, ScoreTable, SequenceRows, Shape};
use ndarray::{Array1, Array2, Array3, Axis};

use crate::fwd::{self, Layout};
use crate::memory::{Memory, before, rounded, tensor_bytes, words};
use crate::values::Rng;
use crate::{Bits, Case, Poison, Trial, Values};

/// A backward case and the memory layout of its gradients.
#[derive(Clone, Debug)]
pub struct BwdCase {
    /// The forward pass, with its inputs and the gradient of O.
    pub case: Case,
    /// Layouts of dO, dQ, dK and dV.
    pub layout: Layout,
    /// Whether LSE has a gradient.
    pub dlse: bool,
    /// Factor on the bound of the error law. It is 1, unless the baseline's error is too small by chance.
    pub slack: f64,
}

/// Inputs of a backward pass other than Q, K, V and dO.
struct Given {
    /// O, rounded to its type, and LSE.
    forward: Forward<f32>,
    /// Gradient of LSE: NaN where LSE is -inf, all zeros if LSE has no gradient.
    dlse: Array3<f32>,
}

impl Given {
    /// Sets padding rows to NaN.
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

/// Whether each row of a tensor of this shape is valid: (batch, seqlen).
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
    /// Builds the backward problem.
    ///
    /// # Panics
    /// If the forward problem is e4m3.
    pub fn problem(&self) -> BackwardProblem {
        let mut spec = BackwardSpec::contiguous(self.case.problem.spec());
        for gradient in [&mut spec.dout, &mut spec.dq, &mut spec.dk, &mut spec.dv] {
            gradient.strides = self.layout.strides(gradient);
        }
        spec.validate().unwrap_or_else(|error| panic!("{}: {error}", self.case.problem))
    }

    /// Builds the trial of this case, planned for these device limits.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self, limits: &DeviceLimits, options: &PlanOptions) -> Trial {
        let plan = Plan::with(&self.problem(), limits, options);
        let plan = plan.unwrap_or_else(|error| panic!("{}: {error}", self.case.problem));
        let program = bwd::program(&plan).map(Spec::kernel);
        let values = self.case.values();
        let given = self.given(&values);
        let name = format!("{plan}\n{}, {:?}, dlse {}", self.case.name, self.layout, self.dlse);
        let bits = match plan.dkv().tile.adds_dq {
            Some(AddOrder::Any) => Bits::Schedule,
            Some(AddOrder::LastKeysFirst) | None => Bits::Approximations,
        };
        let problem = plan.problem();
        let floats = |x: &Array3<f32>| Some(words(x.iter().copied(), f32::to_le_bytes));
        let before = before(&program, |buffer| match buffer.name {
            "o" => Some(tensor_bytes(problem.forward().o(), &given.forward.o)),
            "lse" => floats(&given.forward.lse),
            "dout" => Some(tensor_bytes(problem.dout(), &values.dout)),
            "dlse" => floats(&given.dlse),
            _ => fwd::input(&self.case.problem, &values, buffer),
        });
        Trial::new(name, bits, program, before, move |after| self.judge(&values, &given, after).map(|_| ()))
    }

    fn given(&self, values: &Values) -> Given {
        let problem = &self.case.problem;
        let Forward { o, lse } = oracle::forward(&values.inputs(problem));
        let dtype = problem.o().dtype;
        let o = o.mapv(|x| rounded(dtype, x as f32));
        let lse = lse.mapv(|x| x as f32);
        let mut rng = Rng::new(self.case.seed ^ 0xd15e);
        // A caller who reduces splits by logaddexp gives NaN as the gradient of an LSE of -inf.
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

    /// Checks gradients against the error law, and checks that gradients without contributions are 0. Returns the
    /// largest ratio of an error to its bound.
    fn judge(&self, values: &Values, given: &Given, after: Memory<'_>) -> Result<f64, String> {
        let forward = &self.case.problem;
        let [dq, dk, dv] = ["dq", "dk", "dv"].map(|name| after.tensor(name));
        let mut dtables = forward.score_zeros();
        for (dtable, name) in dtables.iter_mut().zip(ScoreTable::OF_GRADIENTS) {
            *dtable = after.floats(name).unwrap_or_default();
        }
        let dsink = after.floats("dsink").map(Array1::from);
        let gradients = Gradients { dq, dk, dv, dsink, dtables };
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

/// Fully masked rows, keys that no row sees, and padding rows must have gradients of exactly 0.
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
