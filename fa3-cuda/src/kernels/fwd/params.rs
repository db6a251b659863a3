//! The parameters of a forward kernel.

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::Scheduler;
use fa3_sched::forward::Plan;
use fa3_types::{TensorDesc, ValueLayout};

use super::FwdSpec;
use super::descales::Descales;
use super::program::buffers;
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm, param, params};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::{transposed_view, view};

params! {
    /// The parameters of a forward kernel.
    struct Params {
        q: tensor,
        k: tensor,
        v: tensor,
        o: all Strided,
        /// At address 0, LSE is not written.
        lse: pointer,
        /// Where scales of e4m3 Q, K and V are.
        descales: maybe all Descales,
        /// Query heads.
        heads: u32,
        /// softmax_scale · log₂e, or of capped scores cap · log₂e: the worth of a score's unit in the exponent of 2.
        scale_log2: f32,
        /// softmax_scale / cap, if scores are capped.
        into_cap: maybe f32,
        geometry: geometry,
        /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`].
        ticket: maybe pointer,
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
            o: Strided::form("o", spec.output),
            lse: Elem::F32,
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
            o: Strided::of("o", buffers::O, problem.o()),
            lse: buffers::LSE,
            descales: FwdSpec::of(plan).is_fp8().then(|| Descales::of(problem)),
            heads: problem.heads().q() as u32,
            scale_log2,
            into_cap,
            geometry: Geometry::of(plan.schedule(), plan.tiling(), plan.lens()),
            ticket: program.find(buffers::TICKET),
        }
    }
}
