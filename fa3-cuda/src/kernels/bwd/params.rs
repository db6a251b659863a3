//! The parameters of the backward kernels.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed};
use fa3_sched::backward::{ADDED_ROWS, AddOrder, DkvTile, DqTile, Part, Plan};
use fa3_sched::{Decoder, Longest, Order, Schedule, Scheduler};
use fa3_types::TensorDesc;

use super::program::{buffers, pairs};
use super::{Cleared, PartSpec, RoundSpec, StatsSpec};
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm, param, params};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::view;

params! {
    /// The parameters of both kernels with products.
    struct Inputs {
        q: tensor,
        k: tensor,
        v: tensor,
        dout: tensor,
        /// softmax_scale · log₂e, or of capped scores cap · log₂e: the worth of a unit of a score in the exponent of 2.
        scale_log2: f32,
        /// softmax_scale / cap, if scores are capped.
        into_cap: maybe f32,
        /// The factor of dQ and dK.
        softmax_scale: f32,
        geometry: geometry,
        /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`].
        ticket: maybe pointer,
    }

    /// The sums of dQ.
    struct SumsParams {
        address: pointer = "sums",
        /// Query heads.
        heads: u32 = "sums_heads",
        /// Blocks of rows of a head.
        blocks: u32 = "sums_blocks",
        in_order: maybe all InOrderParams,
    }

    /// The parameters besides, if parts of dQ are added in order.
    struct InOrderParams {
        /// For each block the first key of the tile that has added last.
        last_added: pointer,
        /// Where the sums go, rounded.
        dq: all Strided,
    }

    /// The parameters of the dK/dV kernel.
    struct DkvParams {
        inputs: all Inputs,
        stats: tensor,
        /// Query heads that share a head of K and V.
        group: u32,
        dk: all Strided,
        dv: all Strided,
        sums: maybe all SumsParams,
    }

    /// The parameters of the dQ kernel.
    struct DqParams {
        inputs: all Inputs,
        stats: pointer,
        /// Pairs of rows of a head.
        pairs: u32,
        /// Query heads.
        heads: u32,
        dq: all Strided,
    }

    /// The parameters of the kernel of row statistics.
    struct StatsParams {
        o: all Strided,
        dout: all Strided,
        lse: pointer,
        /// At address 0 the gradient of LSE is 0.
        dlse: pointer,
        stats: pointer,
        seqlen: u32,
        pairs: u32,
        heads: u32,
        decoder: decoder,
        /// The sums, or who has added to them, to be cleared.
        sums: maybe all SumsParams,
        /// If parts of dQ are added in order, how many rows of a sequence no tile visits. They are the first ones.
        unvisited: maybe u32 = "unvisited_rows",
    }

    /// The parameters of the kernel that rounds sums.
    struct RoundParams {
        sums: all SumsParams,
        dq: all Strided,
        softmax_scale: f32,
        seqlen: u32,
        decoder: decoder,
    }
}

/// The order of blocks of rows in the kernels that have a CTA for each; the size of its sections does not matter here.
const BLOCKS: Order = Order::LongestFirst { section: 1, longest: Longest::First };

impl SumsParams<Form> {
    /// The parameters of tiles that add to dQ of these elements.
    fn form(order: AddOrder, dq: Elem) -> SumsParams<Form> {
        let in_order = match order {
            AddOrder::Any => None,
            AddOrder::LastKeysFirst => {
                Some(InOrderParams { last_added: Elem::U32, dq: Strided::form("dq", dq) })
            }
        };
        SumsParams { address: Elem::F32, heads: (), blocks: (), in_order }
    }
}

impl RoundParams<Form> {
    /// The parameters of a kernel.
    pub(super) fn form(spec: &RoundSpec) -> RoundParams<Form> {
        RoundParams {
            sums: SumsParams::form(AddOrder::Any, spec.elem),
            dq: Strided::form("dq", spec.elem),
            softmax_scale: (),
            seqlen: (),
            decoder: Form::decoder(BLOCKS),
        }
    }
}

impl Inputs<Form> {
    /// The parameters of a kernel with tiles of `rows` of Q and dO, and of `keys`.
    fn form<T: Copy>(spec: &PartSpec<T>, [rows, keys]: [u32; 2], [dim, dim_v]: [u32; 2]) -> Inputs<Form> {
        let tensor =
            |rows, cols| TensorForm { tile: TileShape::new(spec.elem, rows, cols), rank: 4, rows: 2 };
        Inputs {
            q: tensor(rows, dim),
            k: tensor(keys, dim),
            v: tensor(keys, dim_v),
            dout: tensor(rows, dim_v),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            softmax_scale: (),
            geometry: Geometry::form(spec.order, spec.mask),
            ticket: (spec.scheduler == Scheduler::DynamicPersistent).then_some(Elem::U32),
        }
    }
}

impl DkvParams<Form> {
    /// The parameters of a kernel.
    pub(super) fn form(spec: &PartSpec<DkvTile>) -> DkvParams<Form> {
        let DkvTile { head_dim, head_dim_v, tile_n, tile_m, .. } = spec.tile;
        DkvParams {
            inputs: Inputs::form(spec, [tile_m, tile_n], [head_dim, head_dim_v]),
            stats: TensorForm { tile: stats_tile(tile_m), rank: 4, rows: 1 },
            group: (),
            dk: Strided::form("dk", spec.elem),
            dv: Strided::form("dv", spec.elem),
            sums: spec.tile.adds_dq.map(|order| SumsParams::form(order, spec.elem)),
        }
    }
}

/// A block's part of the row statistics: a pair of rows in a row.
pub(super) fn stats_tile(rows: u32) -> TileShape {
    TileShape::new(Elem::F32, rows / 2, 4)
}

impl DqParams<Form> {
    /// The parameters of a kernel.
    pub(super) fn form(spec: &PartSpec<DqTile>) -> DqParams<Form> {
        let DqTile { head_dim, head_dim_v, tile_m, tile_n, .. } = spec.tile;
        DqParams {
            inputs: Inputs::form(spec, [tile_m, tile_n], [head_dim, head_dim_v]),
            stats: Elem::F32,
            pairs: (),
            heads: (),
            dq: Strided::form("dq", spec.elem),
        }
    }
}

impl StatsParams<Form> {
    /// The parameters of a kernel.
    pub(super) fn form(spec: &StatsSpec) -> StatsParams<Form> {
        StatsParams {
            o: Strided::form("o", spec.elem),
            dout: Strided::form("dout", spec.elem),
            lse: Elem::F32,
            dlse: Elem::F32,
            stats: Elem::F32,
            seqlen: (),
            pairs: (),
            heads: (),
            decoder: Form::decoder(BLOCKS),
            sums: match spec.cleared {
                Cleared::Nothing => None,
                Cleared::Sums(_) => Some(SumsParams::form(AddOrder::Any, spec.elem)),
                Cleared::InOrder(_) => Some(SumsParams::form(AddOrder::LastKeysFirst, spec.elem)),
            },
            unvisited: matches!(spec.cleared, Cleared::InOrder(_)).then_some(()),
        }
    }
}

/// Blocks of rows of a head that have sums of dQ: of all blocks of the dK/dV kernel, whose last may reach further than
/// the rows.
pub(super) fn sum_blocks(plan: &Plan) -> u32 {
    let tile_m = plan.dkv().tile.tile_m;
    (plan.problem().forward().q().shape.seqlen as u32).div_ceil(tile_m) * (tile_m / ADDED_ROWS)
}

/// The buffer of sums, and if parts are added in order that of who has added last.
type Sums = (BufferId, Option<BufferId>);

impl SumsParams<Host> {
    fn of(plan: &Plan, (address, last_added): Sums) -> SumsParams<Host> {
        let problem = plan.problem();
        let in_order = last_added
            .map(|last_added| InOrderParams { last_added, dq: Strided::of("dq", buffers::DQ, problem.dq()) });
        let heads = problem.forward().heads().q() as u32;
        SumsParams { address, heads, blocks: sum_blocks(plan), in_order }
    }
}

impl RoundParams<Host> {
    /// The values of a launch with at least one block, which are numbered by `blocks`.
    pub(super) fn of(plan: &Plan, blocks: &Schedule, sums: Sums) -> RoundParams<Host> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        RoundParams {
            sums: SumsParams::of(plan, sums),
            dq: Strided::of("dq", buffers::DQ, problem.dq()),
            softmax_scale: forward.softmax_scale().natural() as f32,
            seqlen: forward.q().shape.seqlen as u32,
            decoder: blocks.decoder().expect("there is a block"),
        }
    }
}

impl Inputs<Host> {
    fn of<T>(plan: &Plan, part: &Part<T>, ticket: Option<BufferId>) -> Inputs<Host> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        // Of an empty tensor nothing is loaded, but a tensor map must be of something: of one of the other side.
        let view_of = |buffer, tensor: &TensorDesc, other, other_tensor| {
            if tensor.extent().0 == 0 { view(other, other_tensor) } else { view(buffer, tensor) }
        };
        let (q, k) = ((buffers::Q, forward.q()), (buffers::K, forward.k()));
        let (scale_log2, into_cap) = units(forward);
        Inputs {
            q: view_of(q.0, q.1, k.0, k.1),
            k: view_of(k.0, k.1, q.0, q.1),
            v: view_of(buffers::V, forward.v(), q.0, q.1),
            dout: view_of(buffers::DOUT, problem.dout(), k.0, k.1),
            scale_log2,
            into_cap,
            softmax_scale: forward.softmax_scale().natural() as f32,
            geometry: Geometry::of(&part.schedule, part.tiling, part.lens),
            ticket,
        }
    }
}

impl DkvParams<Host> {
    /// The values of a launch.
    pub(super) fn of(
        plan: &Plan,
        stats: Passed,
        sums: Option<Sums>,
        ticket: Option<BufferId>,
    ) -> DkvParams<Host> {
        let problem = plan.problem();
        DkvParams {
            inputs: Inputs::of(plan, plan.dkv(), ticket),
            stats,
            group: problem.forward().heads().group_size() as u32,
            dk: Strided::of("dk", buffers::DK, problem.dk()),
            dv: Strided::of("dv", buffers::DV, problem.dv()),
            sums: sums.map(|sums| SumsParams::of(plan, sums)),
        }
    }
}

impl DqParams<Host> {
    /// The values of a launch.
    pub(super) fn of(
        plan: &Plan,
        part: &Part<DqTile>,
        stats: BufferId,
        ticket: Option<BufferId>,
    ) -> DqParams<Host> {
        let problem = plan.problem();
        DqParams {
            inputs: Inputs::of(plan, part, ticket),
            stats,
            pairs: pairs(problem),
            heads: problem.forward().heads().q() as u32,
            dq: Strided::of("dq", buffers::DQ, problem.dq()),
        }
    }
}

impl StatsParams<Host> {
    /// The values of a launch with at least one tile.
    pub(super) fn of(plan: &Plan, stats: BufferId, sums: Option<Sums>) -> StatsParams<Host> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        StatsParams {
            o: Strided::of("o", buffers::O, forward.o()),
            dout: Strided::of("dout", buffers::DOUT, problem.dout()),
            lse: buffers::LSE,
            dlse: buffers::DLSE,
            stats,
            seqlen: forward.q().shape.seqlen as u32,
            pairs: pairs(problem),
            heads: forward.heads().q() as u32,
            decoder: plan.stats().decoder().expect("there is a tile"),
            unvisited: plan.dkv().tile.adds_in_order().then(|| plan.unvisited_rows()),
            sums: sums.map(|sums| SumsParams::of(plan, sums)),
        }
    }
}
