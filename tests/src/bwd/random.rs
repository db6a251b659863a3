//! Random problems for the backward kernels.

use fa3_sched::DeviceLimits;
use fa3_sched::backward::PlanOptions;
use fa3_types::{Dtype, Mask};

use super::{BwdCase, Form};
use crate::family::Trial;
use crate::fwd::{Layout, dense, device};
use crate::values::Rng;
use crate::{Case, Dist, Poison};

/// The fewest rows of Q, and of K and V, and how many more there may be. The error law allows twice the largest error
/// of standard attention: with fewer rows, how large that is is luck.
const ROWS: (usize, u64) = (32, 700);

/// How many times the error that the law allows. Of 3,000 problems one has outliers that standard attention happens to
/// round well: its dQ may be off by 0.290 and is off by 0.297.
const SLACK: f64 = 1.125;

impl BwdCase {
    /// A random problem, with tiles that plans choose. Seeds that are equal modulo `kernels` have the same kernels, so
    /// that many problems take few.
    ///
    /// # Panics
    /// If it cannot be planned.
    pub fn random(seed: u64, kernels: u64) -> Trial {
        let mut of_kernel = Rng(seed % kernels);
        let mut rng = Rng(seed ^ 0xbac << 32);
        let dims = [(64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72), (128, 32)];
        let (head_dim, head_dim_v) = dims[of_kernel.below(7)];
        let [near, far] = [0, 0].map(|_| rng.below(200) as u32);
        let masks = [
            Mask::None,
            Mask::Causal,
            Mask::Window { left: Some(near), right: Some(far) },
            Mask::Window { left: Some(near), right: None },
        ];
        let mask = masks[of_kernel.below(4)];
        let dtype = [Dtype::F16, Dtype::Bf16][of_kernel.below(2)];
        let softcap = (of_kernel.below(3) == 0).then(|| 2.0 + rng.below(50) as f64);
        let options = options([head_dim as u32, head_dim_v as u32], of_kernel.below(4));
        let sms = [2, 132][of_kernel.below(2)];

        let [seqlen_q, seqlen_k] = [0, 0].map(|_| length(&mut rng));
        let (heads_kv, group) = (1 + rng.below(3), 1 + rng.below(3));
        let heads = (heads_kv * group, heads_kv);
        let spec = dense(dtype, 1 + rng.below(2), (seqlen_q, seqlen_k), heads, head_dim);
        let mut spec = spec.head_dim_v(head_dim_v).mask(mask);
        spec.softcap = softcap;
        let [layout, of_gradients] = [0, 0].map(|_| Layout::ALL[rng.below(4)]);
        let problem = layout.of(spec).known().expect("all of it is valid");
        let dist = Dist::ALL[rng.below(Dist::ALL.len() as u64)];
        let case =
            Case { name: format!("random {seed}, {dist:?}"), problem, dist, poison: Poison::None, seed };
        let dlse = rng.below(2) == 0;
        BwdCase { case, layout: of_gradients, dlse, slack: SLACK }.trial(&device(sms), &options)
    }
}

/// Short lengths as often as long ones.
fn length(rng: &mut Rng) -> usize {
    let (fewest, more) = ROWS;
    let more = 1 + rng.below(more);
    fewest + rng.below(more as u64)
}

/// One of the ways to compute dQ: the one that plans choose, a kernel of its own, additions in either order.
fn options(dims: [u32; 2], way: usize) -> PlanOptions {
    let forms = [None, Some(Form::DqKernel), Some(Form::AnyOrder), Some(Form::OrderOfKeys)];
    let options = forms[way].and_then(|form| form.options(dims, &DeviceLimits::h100_sxm()));
    options.unwrap_or_default()
}
