//! The parameters of a forward kernel.

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::Scheduler;
use fa3_sched::forward::Plan;
use fa3_types::{TensorDesc, ValueLayout};

use super::FwdSpec;
use super::descales::Descales;
use super::program::buffers;
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::scores::units;
use crate::kernels::tensors::{strides, transposed_view, view};

/// The arguments of a forward kernel.
#[derive(Debug)]
pub(super) struct Params<S: Side> {
    pub(super) q: S::Tensor,
    pub(super) k: S::Tensor,
    pub(super) v: S::Tensor,
    pub(super) o: S::Pointer,
    /// At address 0, LSE is not written.
    pub(super) lse: S::Pointer,
    /// Bytes from one sequence, head, row of O to the next.
    pub(super) o_strides: [S::U64; 3],
    /// Where scales of e4m3 Q, K and V are.
    pub(super) descales: Option<Descales<S>>,
    /// Query heads.
    pub(super) heads: S::U32,
    /// softmax_scale · log₂e, or of capped scores cap · log₂e: what a unit of a score is worth in the exponent of 2.
    pub(super) scale_log2: S::F32,
    /// softmax_scale / cap, if scores are capped.
    pub(super) into_cap: Option<S::F32>,
    pub(super) geometry: Geometry<S::U32>,
    /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`].
    pub(super) ticket: Option<S::Pointer>,
}

impl<A: Side> Params<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Params<B> {
        let [batch, head, row] = self.o_strides;
        Params {
            q: by.tensor("q", self.q),
            k: by.tensor("k", self.k),
            v: by.tensor("v", self.v),
            o: by.pointer("o", self.o),
            lse: by.pointer("lse", self.lse),
            o_strides: [
                by.u64("o_batch_bytes", batch),
                by.u64("o_head_bytes", head),
                by.u64("o_row_bytes", row),
            ],
            descales: self.descales.map(|descales| descales.pass(by)),
            heads: by.u32("heads", self.heads),
            scale_log2: by.f32("scale_log2", self.scale_log2),
            into_cap: self.into_cap.map(|factor| by.f32("into_cap", factor)),
            geometry: self.geometry.pass(by),
            ticket: self.ticket.map(|buffer| by.pointer("ticket", buffer)),
        }
    }
}

impl Params<Form> {
    /// The arguments' form in a kernel of this spec.
    pub(super) fn form(spec: &FwdSpec) -> Params<Form> {
        let tile = &spec.tile;
        let tensor =
            |rows, cols| TensorForm { tile: TileShape::new(spec.elem, rows, cols), rank: 4, rows: 2 };
        // What a CTA loads of a block.
        let keys = tile.tile_n / spec.cluster;
        let v = match spec.v_is_transposed() {
            false => tensor(keys, tile.head_dim_v),
            true => TensorForm { rows: 1, ..tensor(tile.head_dim_v, tile.tile_n) },
        };
        Params {
            q: tensor(tile.tile_m, tile.head_dim),
            k: tensor(keys, tile.head_dim),
            v,
            o: spec.output,
            lse: Elem::F32,
            o_strides: [(); 3],
            descales: spec.is_fp8().then(|| Descales::form(spec)),
            heads: (),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            geometry: Geometry::form(spec.order, spec.mask),
            ticket: (spec.scheduler == Scheduler::DynamicPersistent).then_some(Elem::U32),
        }
    }
}

impl Params<Host> {
    /// The values of a launch.
    pub(super) fn of<K>(plan: &Plan, program: &Program<K>) -> Params<Host> {
        let problem = plan.problem();
        // Without keys nothing is loaded of K and V, but a tensor map must be of something.
        let view_of = |buffer, tensor: &TensorDesc| {
            if tensor.extent().0 == 0 { view(buffers::Q, problem.q()) } else { view(buffer, tensor) }
        };
        let (scale_log2, into_cap) = units(problem);
        Params {
            q: view(buffers::Q, problem.q()),
            k: view_of(buffers::K, problem.k()),
            v: match (problem.v_layout(), program.find(buffers::V_TRANSPOSED)) {
                (_, Some(codes)) => transposed_view(codes, problem.v().shape),
                (ValueLayout::Transposed, _) if problem.v_bytes().0 > 0 => {
                    transposed_view(buffers::V, problem.v().shape)
                }
                (ValueLayout::Rows | ValueLayout::Transposed, _) => view_of(buffers::V, problem.v()),
            },
            o: buffers::O,
            lse: buffers::LSE,
            o_strides: strides(problem.o()),
            descales: FwdSpec::of(plan).is_fp8().then(|| Descales::of(problem)),
            heads: problem.heads().q() as u32,
            scale_log2,
            into_cap,
            geometry: Geometry::of(plan.schedule(), plan.tiling(), plan.lens()),
            ticket: program.find(buffers::TICKET),
        }
    }
}
