//! Random problems for the backward kernels.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::PlanOptions;
use fa3_types::{Dtype, KnownProblem, Lengths, Mask, ProblemSpec, ScoreFunction, SequenceRows};

use super::{BwdCase, Form};
use crate::Trial;
use crate::fwd::intervals::OWN;
use crate::fwd::listed::{GIVEN, LAYOUTS, random_lengths, spec};
use crate::fwd::{Layout, dense, device};
use crate::intervals::{Kind, under};
use crate::values::Rng;
use crate::{Case, Dist, Poison, chunks, strategies};

/// Smallest length of Q, K and V, and the number of possible lengths. The error law allows twice the largest error of
/// standard attention, and with fewer rows that error varies too much by chance.
const ROWS: (usize, u64) = (32, 400);

/// Factor on the bound of the error law. In one of 3,000 problems standard attention happens to round one outlier well:
/// the bound on its dQ is 0.290 and the error is 0.297.
pub(super) const SLACK: f64 = 1.125;

/// The properties of a random problem that select its kernels.
struct OfKernels {
    dims: (usize, usize),
    mask: Mask,
    dtype: Dtype,
    softcap: Option<f64>,
    options: PlanOptions,
    sms: u32,
    /// The kind of intervals, and whether sequences and heads have their own.
    intervals: (Option<Kind>, (bool, bool)),
    function: Option<ScoreFunction>,
}

impl OfKernels {
    fn random(of_kernel: &mut Rng, rng: &mut Rng) -> OfKernels {
        let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (128, 32)];
        let (head_dim, head_dim_v) = dims[of_kernel.below(7)];
        let [near, far] = [0, 0].map(|_| rng.below(200) as u32);
        let masks = [
            Mask::None,
            Mask::Causal,
            Mask::Window { left: Some(near), right: Some(far) },
            Mask::Window { left: Some(near), right: None },
            chunks(1 + near, Some(far)),
        ];
        let (mask, dtype) = (masks[of_kernel.below(5)], [Dtype::F16, Dtype::Bf16][of_kernel.below(2)]);
        let softcap = (of_kernel.below(3) == 0).then(|| 2.0 + rng.below(50) as f64);
        let (way, sms) = (of_kernel.below(4), [2, 132][of_kernel.below(2)]);
        // Masks of intervals have no additions in order.
        let has_intervals = of_kernel.below(2) == 0 && WAYS[way] != Some(Form::OrderOfKeys);
        let kinds = Kind::WITH_GRADIENTS;
        let kind = has_intervals.then(|| kinds[of_kernel.below(kinds.len() as u64)]);
        OfKernels {
            dims: (head_dim, head_dim_v),
            mask,
            dtype,
            softcap,
            options: options([head_dim as u32, head_dim_v as u32], WAYS[way]),
            sms,
            intervals: (kind, OWN[of_kernel.below(3)]),
            function: None,
        }
    }

    /// The problem of these sequences with these properties.
    fn of(&self, spec: ProblemSpec, rows: [SequenceRows; 2], layout: Layout) -> KnownProblem {
        let mut spec = layout.of(spec.head_dim_v(self.dims.1)).mask(self.mask);
        spec.softcap = self.softcap;
        let (kind, own) = self.intervals;
        let problem = under(kind, spec, rows, own);
        match &self.function {
            None => problem,
            Some(function) => problem.with_score(function),
        }
    }
}

impl BwdCase {
    /// A random problem with the tile sizes that the planner chooses. Seeds that are equal modulo `kernels` share their
    /// kernels, so that many problems need few of them.
    ///
    /// # Panics
    /// If the planner refuses the problem.
    pub fn random(seed: u64, kernels: u64) -> Trial {
        let (mut of_kernel, mut rng) = (Rng::new(seed % kernels), Rng::new(seed ^ 0xbac << 32));
        let of_kernels = OfKernels::random(&mut of_kernel, &mut rng);
        BwdCase::random_dense(seed, &mut rng, &of_kernels)
    }

    /// A random problem with a random function of the scores. `seed` is used as in `random`.
    ///
    /// # Panics
    /// If the planner refuses the problem.
    pub fn random_function(seed: u64, kernels: u64) -> Trial {
        let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0xf7c), Rng::new(seed ^ 0xf7c << 32));
        let of_function = seed % kernels;
        let function = strategies::seeded(strategies::smooth_score_function(), of_function);
        let mut of_kernels = OfKernels::random(&mut of_kernel, &mut rng);
        // Every second function has gradients of its tables, for which a dQ kernel is needed.
        if of_function.is_multiple_of(2) {
            let most = ROWS.0 + ROWS.1 as usize;
            of_kernels.function = Some(strategies::learned(&function, Lengths { q: most, k: most }));
            of_kernels.options = PlanOptions::default();
        } else {
            of_kernels.function = Some(function);
        }
        BwdCase::random_dense(seed, &mut rng, &of_kernels)
    }

    fn random_dense(seed: u64, rng: &mut Rng, of_kernels: &OfKernels) -> Trial {
        let [seqlen_q, seqlen_k] = [0, 0].map(|_| length(rng));
        let (heads_kv, group) = (1 + rng.below(3), 1 + rng.below(3));
        let heads = (heads_kv * group, heads_kv);
        let batch = 1 + rng.below(2);
        let spec = dense(of_kernels.dtype, batch, (seqlen_q, seqlen_k), heads, of_kernels.dims.0);
        let [layout, of_gradients] = [0, 0].map(|_| Layout::ALL[rng.below(4)]);
        let rows = [seqlen_q, seqlen_k].map(|rows| SequenceRows::dense(batch, rows));
        let problem = of_kernels.of(spec, rows, layout);
        random_case(seed, rng, problem, of_gradients, Poison::None, of_kernels)
    }

    /// A random varlen problem: packed sequences, or dense sequences with seqused. `seed` is used as in `random`.
    ///
    /// # Panics
    /// If the planner refuses the problem.
    pub fn random_packed(seed: u64, kernels: u64) -> Trial {
        let (mut of_kernel, mut rng) = (Rng::new((seed % kernels) ^ 0x9ac), Rng::new(seed ^ 0x9ac << 32));
        let of_kernels = OfKernels::random(&mut of_kernel, &mut rng);
        let given = GIVEN[of_kernel.below(GIVEN.len() as u64)];
        let (heads_kv, group) = (1 + rng.below(3), 1 + rng.below(3));
        let lengths = random_lengths(&mut rng, length);
        let [layout, of_gradients] = [0, 0].map(|_| given.layout(LAYOUTS[rng.below(3)]));
        let heads = (heads_kv * group, heads_kv);
        let (spec, rows) = spec(given, of_kernels.dtype, heads, of_kernels.dims.0, &lengths);
        let problem = of_kernels.of(spec, rows, layout);
        random_case(seed, &mut rng, problem, of_gradients, Poison::BeyondEnd, &of_kernels)
    }
}

/// A random case of a problem with these properties.
fn random_case(
    seed: u64,
    rng: &mut Rng,
    problem: KnownProblem,
    layout: Layout,
    poison: Poison,
    of_kernels: &OfKernels,
) -> Trial {
    let dist = Dist::ALL[rng.below(Dist::ALL.len() as u64)];
    let case = Case { name: format!("random {seed}, {dist:?}"), problem, dist, poison, seed };
    let dlse = rng.below(2) == 0;
    BwdCase { case, layout, dlse, slack: SLACK }.trial(&device(of_kernels.sms), &of_kernels.options)
}

/// A random length. Short lengths are more likely than long ones.
fn length(rng: &mut Rng) -> usize {
    let (fewest, more) = ROWS;
    let more = 1 + rng.below(more);
    fewest + rng.below(more as u64)
}

/// Ways to compute dQ: the planner's choice, a dQ kernel, and additions in one of the two orders.
const WAYS: [Option<Form>; 4] = [None, Some(Form::DqKernel), Some(Form::AnyOrder), Some(Form::OrderOfKeys)];

/// Plan options for a way to compute dQ.
fn options(dims: [u32; 2], way: Option<Form>) -> PlanOptions {
    let options = way.and_then(|form| form.options(dims, &DeviceLimits::h100_sxm()));
    options.unwrap_or_default()
}
