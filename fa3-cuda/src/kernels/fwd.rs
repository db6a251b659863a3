//! The forward pass: a producer warpgroup loads; one to three consumer warpgroups compute 64 rows each, or load too.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! [`FwdSpec`] builds the kernel, and [`program`] lowers a plan to its launches.
//! The roles are in `producer.rs` and `consumer.rs`, which cite the lines of the paper's Algorithms 1, 2 and 4 (arXiv
//! 2407.08608) that they are.

// What a launch is.
mod params;
mod program;
mod spec;

// The roles.
mod chains;
mod channels;
mod consumer;
mod descales;
mod epilogue;
mod ones;
mod p_type;
mod producer;
mod row_softmax;
mod transpose;

// The consumer's main loops.
mod algorithm1;
mod algorithm2;
mod algorithm4;
mod self_loading;
mod two_levels;

#[cfg(test)]
mod listed_tests;

pub use super::parts::lookup::SequenceForm;
pub use program::{buffers, program};
pub use spec::FwdSpec;

use fa3_ir::lang::*;
use fa3_sched::Lens;
use fa3_sched::forward::ROW_SUM_COLS;
use fa3_types::softcap;

use super::KernelSpec;
use super::params::{Declare, Form, InKernel};
use super::parts::geometry::Work;
use super::parts::loader::{Feed, Sequence};
use super::parts::ping_pong::PingPong;
use super::parts::rows_view::RowSpan;
use super::parts::scores::{Scores, Visible};
use super::parts::works::Works;
use p_type::PType;
use params::Params;
use transpose::Transposed;

/// State that the roles of a kernel share.
struct Fwd<'k> {
    builder: &'k Builder,
    spec: FwdSpec,
    params: Params<InKernel<'k>>,
    works: Works<'k>,
    q: Feed<'k>,
    k: Feed<'k>,
    v: Feed<'k>,
    /// V of e4m3, if it is to be transposed.
    transposed: Option<Transposed<'k>>,
    p: PType,
    ping_pong: Option<PingPong<'k>>,
}

impl KernelSpec for FwdSpec {
    /// Builds the kernel. The spec must come from [`FwdSpec::of`], or differ from such a one only in a tile that passes
    /// [`CtaTile::check`](fa3_sched::forward::CtaTile::check) and has a producer.
    fn kernel(&self) -> Kernel {
        kernel(self)
    }
}

fn kernel(spec: &FwdSpec) -> Kernel {
    let tile = &spec.tile;
    Kernel::build("fwd", Launch::threads(tile.threads()).cluster(spec.cluster), |b| {
        if spec.guards_all() {
            b.guard_all();
        }
        let fwd = Fwd::declare(b, spec);
        fwd.store_ones();
        b.init_mbarriers();
        // CTAs of the next kernel may take their places as ours leave them, and begin when all of ours are done.
        b.launch_dependents();
        b.grid_dependency_wait();

        let (registers, all) = (tile.registers(), tile.threads() / 32);
        if let Some(registers) = registers.producer {
            b.role(Role::new("producer", 0..4).registers(registers), || {
                producer::run(&fwd);
                fwd.leave_together();
            });
        }
        let consumers = all - 4 * tile.consumers..all;
        b.role(Role::new("consumer", consumers).registers(registers.consumer), || {
            consumer::run(&fwd);
            fwd.leave_together();
        });
    })
}

impl<'k> Fwd<'k> {
    fn declare(b: &'k Builder, spec: &FwdSpec) -> Fwd<'k> {
        let tile = &spec.tile;
        let params = Params::<Form>::form(spec).pass(&mut Declare(b));
        let warps = 4 * tile.consumers;
        let transposed = tile.precision.transposes_v().then(|| Transposed::declare(b, tile));
        let (of_v, of_works) = match transposed {
            None => (warps, warps),
            Some(_) => (transpose::WARPS, warps + transpose::WARPS),
        };
        let ty = match (spec.is_fp8(), spec.output) {
            (true, _) => WgmmaType::E4m3,
            (false, Elem::F16) => WgmmaType::F16,
            (false, _) => WgmmaType::Bf16,
        };
        Fwd {
            builder: b,
            spec: *spec,
            q: Feed::declare(b, "q", params.q, 1, warps),
            k: Feed::declare_shared(b, "k", params.k, tile.stages, warps),
            v: match spec.v_is_transposed() {
                false => Feed::declare_shared(b, "v", params.v, tile.stages, of_v),
                true => Feed::declare_transposed(b, "v", params.v, ROW_SUM_COLS, tile.stages, of_v),
            },
            transposed,
            p: PType(ty),
            ping_pong: tile.ping_pong.then(|| PingPong::declare(b, tile.consumers)),
            works: Works::declare(b, spec.scheduler, &params.lookup, params.ticket, of_works),
            params,
        }
    }

    /// The other CTA of a cluster may still load into this one's shared memory, or arrive at its mbarriers.
    #[track_caller]
    fn leave_together(&self) {
        if self.spec.cluster > 1 {
            self.builder.cluster_sync();
        }
    }

    /// Stores what stays in slots of V that is transposed in memory, before threads have roles.
    #[track_caller]
    fn store_ones(&self) {
        let (b, tile) = (self.builder, &self.spec.tile);
        if self.spec.v_is_transposed() {
            for slot in 0..tile.stages {
                let [to] = self.v.ring().tiles_of(slot);
                ones::store(b, to, b.tid(), tile.threads());
            }
            b.fence(FenceInst::ProxyAsyncShared);
        }
    }

    /// The sequence of a work, as loads of Q, K and V find it.
    #[track_caller]
    fn sequences(&self, work: &Work<V<'k, B32>>) -> [Sequence<'k>; 3] {
        let (Some(listed), Some(apart)) = (work.listed, &self.params.apart) else {
            return [work.batch.into(); 3];
        };
        let rows = |apart: V<'k, B32>, row: V<'k, B32>, count: V<'k, B32>| {
            Sequence::Rows(RowSpan::new(work.batch.mad(apart, row), count))
        };
        let Lens { q, k } = work.lens;
        [rows(apart.q, listed.q_row, q), rows(apart.k, listed.k_row, k), rows(apart.v, listed.k_row, k)]
    }

    /// The functions of scores: the soft cap, in whose units they are then, and the mask.
    fn scores(&self, lens: Lens<V<'k, B32>>) -> Scores<'k> {
        let (lookup, (left, _)) = (self.params.lookup, self.spec.mask.reach());
        Scores {
            modify: self.spec.softcap.then(|| Box::new(softcap) as _),
            visible: Box::new(move |row| {
                let keys = lookup.keys(row, lens);
                Visible { start: left.map(|_| keys.start), end: keys.end }
            }),
        }
    }
}
