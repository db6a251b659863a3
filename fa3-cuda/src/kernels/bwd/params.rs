//! The parameters of the backward kernels.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed};
use fa3_sched::backward::{ADDED_ROWS, AddOrder, DkvTile, DqTile, Part, Plan};
use fa3_sched::{Decoder, Order, Schedule, Scheduler, TileCounts};
use fa3_types::TensorDesc;

use super::program::{buffers, pairs};
use super::{Cleared, PartSpec, RoundSpec, StatsSpec};
use crate::kernels::params::{Form, Host, Pass, Side, TensorForm};
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::view;

/// What both kernels with products take.
pub(super) struct Inputs<S: Side> {
    pub(super) q: S::Tensor,
    pub(super) k: S::Tensor,
    pub(super) v: S::Tensor,
    pub(super) dout: S::Tensor,
    /// softmax_scale · log₂e, or of capped scores cap · log₂e: what a unit of a score is worth in the exponent of 2.
    pub(super) scale_log2: S::F32,
    /// softmax_scale / cap, if scores are capped.
    pub(super) into_cap: Option<S::F32>,
    /// What dQ and dK are multiplied by.
    pub(super) softmax_scale: S::F32,
    pub(super) geometry: Geometry<S::U32>,
    /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`].
    pub(super) ticket: Option<S::Pointer>,
}

/// The sums of dQ.
pub(super) struct SumsParams<S: Side> {
    pub(super) address: S::Pointer,
    /// Query heads.
    pub(super) heads: S::U32,
    /// Blocks of rows of a head.
    pub(super) blocks: S::U32,
    /// If parts are added in order.
    pub(super) in_order: Option<InOrderParams<S>>,
}

/// What there is besides if parts of dQ are added in order.
pub(super) struct InOrderParams<S: Side> {
    /// For each block the first key of the tile that has added last.
    pub(super) last_added: S::Pointer,
    /// Where the sums go, rounded.
    pub(super) dq: Strided<S>,
}

/// What the dK/dV kernel takes.
pub(super) struct DkvParams<S: Side> {
    pub(super) inputs: Inputs<S>,
    pub(super) stats: S::Tensor,
    /// Query heads that share a head of K and V.
    pub(super) group: S::U32,
    pub(super) dk: Strided<S>,
    pub(super) dv: Strided<S>,
    pub(super) sums: Option<SumsParams<S>>,
}

/// What the dQ kernel takes.
pub(super) struct DqParams<S: Side> {
    pub(super) inputs: Inputs<S>,
    pub(super) stats: S::Pointer,
    /// Pairs of rows of a head.
    pub(super) pairs: S::U32,
    /// Query heads.
    pub(super) heads: S::U32,
    pub(super) dq: Strided<S>,
}

/// What the kernel of row statistics takes.
pub(super) struct StatsParams<S: Side> {
    pub(super) o: Strided<S>,
    pub(super) dout: Strided<S>,
    pub(super) lse: S::Pointer,
    /// At address 0 the gradient of LSE is 0.
    pub(super) dlse: S::Pointer,
    pub(super) stats: S::Pointer,
    pub(super) seqlen: S::U32,
    pub(super) pairs: S::U32,
    pub(super) heads: S::U32,
    pub(super) decoder: Decoder<S::U32>,
    /// What is cleared.
    pub(super) sums: Option<SumsParams<S>>,
    /// If parts of dQ are added in order, how many rows of a sequence no tile visits. They are the first ones.
    pub(super) unvisited: Option<S::U32>,
}

/// What the kernel that rounds sums takes.
pub(super) struct RoundParams<S: Side> {
    pub(super) sums: SumsParams<S>,
    pub(super) dq: Strided<S>,
    pub(super) softmax_scale: S::F32,
    pub(super) seqlen: S::U32,
    pub(super) decoder: Decoder<S::U32>,
}

impl<A: Side> Inputs<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Inputs<B> {
        Inputs {
            q: by.tensor("q", self.q),
            k: by.tensor("k", self.k),
            v: by.tensor("v", self.v),
            dout: by.tensor("dout", self.dout),
            scale_log2: by.f32("scale_log2", self.scale_log2),
            into_cap: self.into_cap.map(|factor| by.f32("into_cap", factor)),
            softmax_scale: by.f32("softmax_scale", self.softmax_scale),
            geometry: self.geometry.pass(by),
            ticket: self.ticket.map(|buffer| by.pointer("ticket", buffer)),
        }
    }
}

impl<A: Side> DkvParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> DkvParams<B> {
        DkvParams {
            inputs: self.inputs.pass(by),
            stats: by.tensor("stats", self.stats),
            group: by.u32("group", self.group),
            dk: self.dk.pass(by),
            dv: self.dv.pass(by),
            sums: self.sums.map(|sums| sums.pass(by)),
        }
    }
}

impl<A: Side> DqParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> DqParams<B> {
        DqParams {
            inputs: self.inputs.pass(by),
            stats: by.pointer("stats", self.stats),
            pairs: by.u32("pairs", self.pairs),
            heads: by.u32("heads", self.heads),
            dq: self.dq.pass(by),
        }
    }
}

impl<A: Side> StatsParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> StatsParams<B> {
        StatsParams {
            o: self.o.pass(by),
            dout: self.dout.pass(by),
            lse: by.pointer("lse", self.lse),
            dlse: by.pointer("dlse", self.dlse),
            stats: by.pointer("stats", self.stats),
            seqlen: by.u32("seqlen", self.seqlen),
            pairs: by.u32("pairs", self.pairs),
            heads: by.u32("heads", self.heads),
            decoder: self.decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
            sums: self.sums.map(|sums| sums.pass(by)),
            unvisited: self.unvisited.map(|rows| by.u32("unvisited_rows", rows)),
        }
    }
}

impl<A: Side> SumsParams<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> SumsParams<B> {
        SumsParams {
            address: by.pointer("sums", self.address),
            heads: by.u32("sums_heads", self.heads),
            blocks: by.u32("sums_blocks", self.blocks),
            in_order: self.in_order.map(|order| InOrderParams {
                last_added: by.pointer("last_added", order.last_added),
                dq: order.dq.pass(by),
            }),
        }
    }
}

impl<A: Side> RoundParams<A> {
    /// Goes over them in the order in which they are passed.
    #[track_caller]
    pub(super) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> RoundParams<B> {
        RoundParams {
            sums: self.sums.pass(by),
            dq: self.dq.pass(by),
            softmax_scale: by.f32("softmax_scale", self.softmax_scale),
            seqlen: by.u32("seqlen", self.seqlen),
            decoder: self.decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
        }
    }
}

impl SumsParams<Form> {
    /// Those of tiles that add to dQ of these elements.
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
    /// Those of a kernel.
    pub(super) fn form(spec: &RoundSpec, order: Order) -> RoundParams<Form> {
        RoundParams {
            sums: SumsParams::form(AddOrder::Any, spec.elem),
            dq: Strided::form("dq", spec.elem),
            softmax_scale: (),
            seqlen: (),
            decoder: Decoder::new(TileCounts::ONE, order).map(|_| ()),
        }
    }
}

impl Inputs<Form> {
    /// Of a kernel with tiles of `rows` of Q and dO, and of `keys`.
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
    /// Those of a kernel.
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
    /// Those of a kernel.
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
    /// Those of a kernel.
    pub(super) fn form(spec: &StatsSpec, order: Order) -> StatsParams<Form> {
        StatsParams {
            o: Strided::form("o", spec.elem),
            dout: Strided::form("dout", spec.elem),
            lse: Elem::F32,
            dlse: Elem::F32,
            stats: Elem::F32,
            seqlen: (),
            pairs: (),
            heads: (),
            decoder: Decoder::new(TileCounts::ONE, order).map(|_| ()),
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
