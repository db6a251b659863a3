//! The parameters of the backward kernels.

use fa3_ir::lang::*;
use fa3_ir::{BufferId, Passed};
use fa3_sched::backward::{AddOrder, DkvTile, DqBy, DqTile, Numbered, Plan, STATS_ROWS, Way};
use fa3_sched::packed::MemoryRows;
use fa3_sched::{Longest, Order, Schedule, Tiling};
use fa3_types::{Mask, TensorDesc};

use super::program::{buffers, pairs, sum_blocks};
use super::spec::cleared_mask;
use super::{Cleared, PartSpec, RoundSpec, StatsSpec};
use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, TensorForm, param, params};
use crate::kernels::parts::geometry::{Geometry, Work};
use crate::kernels::parts::loader::Sequence;
use crate::kernels::parts::lookup::{Lookup, SequenceForm};
use crate::kernels::parts::row_blocks::{RowBlocks, RowsForm};
use crate::kernels::parts::rows_view::{self, RowSpan};
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::table::{Places, Table};
use crate::kernels::tensors::{rows_view, view};

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
        lookup: all Lookup,
        /// From which CTAs fetch their tiles, under [`Scheduler::DynamicPersistent`], if sequences are equal.
        ticket: maybe pointer,
        /// How far sequences lie apart, if they are listed.
        apart: maybe all Apart,
    }

    /// Distances in rows between sequences of a batch; 0 where they are packed.
    struct Apart {
        q: u32 = "q_rows_apart",
        k: u32 = "k_rows_apart",
        v: u32 = "v_rows_apart",
        dout: u32 = "dout_rows_apart",
    }

    /// Distances in numbers of LSE.
    struct LseApart {
        /// From a sequence to the next; 0 where they are packed.
        batch: u64 = "lse_batch",
        head: u64 = "lse_head",
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
        pairs: u32,
        heads: u32,
        blocks: all RowBlocks,
        /// How far numbers of LSE lie apart, if sequences are listed.
        lse_apart: maybe all LseApart,
        /// The sums, or who has added to them, to be cleared.
        sums: maybe all SumsParams,
        /// If parts of dQ are added in order and sequences are equal, how many rows of one no tile visits. They are the
        /// first ones.
        unvisited: maybe u32 = "unvisited_rows",
    }

    /// The parameters of the kernel that rounds sums.
    struct RoundParams {
        sums: all SumsParams,
        dq: all Strided,
        softmax_scale: f32,
        blocks: all RowBlocks,
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
            blocks: RowBlocks::form(spec.rows, BLOCKS),
        }
    }
}

impl Inputs<Form> {
    /// The parameters of a kernel with tiles of `rows` of Q and dO, and of `keys`.
    /// Rows of listed sequences have these places.
    fn form<T: Copy>(
        spec: &PartSpec<T>,
        [rows, keys]: [u32; 2],
        [dim, dim_v]: [u32; 2],
        places: Places<Form>,
    ) -> Inputs<Form> {
        let tensor = |rows, cols| {
            let tile = TileShape::new(spec.elem, rows, cols);
            match spec.sequences {
                SequenceForm::Equal => TensorForm { tile, rank: 4, rows: 2 },
                SequenceForm::Listed => rows_view::form(tile),
            }
        };
        let places = (spec.sequences == SequenceForm::Listed).then_some(places);
        Inputs {
            q: tensor(rows, dim),
            k: tensor(keys, dim),
            v: tensor(keys, dim_v),
            dout: tensor(rows, dim_v),
            scale_log2: (),
            into_cap: spec.softcap.then_some(()),
            softmax_scale: (),
            lookup: match places {
                None => Lookup::Equal(Geometry::form(spec.order, spec.mask)),
                Some(places) => {
                    let table = Table::form(spec.order, spec.mask, Some(places));
                    Lookup::Listed { table, ticket: Elem::U32 }
                }
            },
            ticket: spec.draws_numbers().then_some(Elem::U32),
            apart: places.is_some().then_some(Apart { q: (), k: (), v: (), dout: () }),
        }
    }
}

impl<'k> Inputs<InKernel<'k>> {
    /// The sequence of a work, as loads of Q and of dO find it. Tiles cut this side of the attention matrix.
    #[track_caller]
    pub(super) fn rows(&self, work: &Work<V<'k, B32>>, of: TilesOf) -> [Sequence<'k>; 2] {
        self.sequence(work, of == TilesOf::Rows, |apart| [apart.q, apart.dout])
    }

    /// The sequence of a work, as loads of K and of V find it.
    #[track_caller]
    pub(super) fn keys(&self, work: &Work<V<'k, B32>>, of: TilesOf) -> [Sequence<'k>; 2] {
        self.sequence(work, of == TilesOf::Keys, |apart| [apart.k, apart.v])
    }

    /// The sequence of a work in two tensors of the side that tiles cut, or of the other one.
    #[track_caller]
    fn sequence(
        &self,
        work: &Work<V<'k, B32>>,
        is_cut: bool,
        apart: impl Fn(&Apart<InKernel<'k>>) -> [V<'k, B32>; 2],
    ) -> [Sequence<'k>; 2] {
        let (Some(listed), Some(all)) = (work.listed, &self.apart) else {
            return [work.batch.into(); 2];
        };
        let (first, count) = if is_cut { (listed.q_row, work.lens.q) } else { (listed.k_row, work.lens.k) };
        apart(all).map(|apart| Sequence::Rows(RowSpan::new(work.batch.mad(apart, first), count)))
    }
}

impl DkvParams<Form> {
    /// The parameters of a kernel.
    pub(super) fn form(spec: &PartSpec<DkvTile>) -> DkvParams<Form> {
        let DkvTile { head_dim, head_dim_v, tile_n, tile_m, .. } = spec.tile;
        DkvParams {
            inputs: Inputs::form(
                spec,
                [tile_m, tile_n],
                [head_dim, head_dim_v],
                Places::Listed { firsts: Elem::U32, most: () },
            ),
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
            inputs: Inputs::form(spec, [tile_m, tile_n], [head_dim, head_dim_v], Places::OfBlocks),
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
        let is_listed = spec.rows != RowsForm::Equal;
        StatsParams {
            o: Strided::form("o", spec.elem),
            dout: Strided::form("dout", spec.elem),
            lse: Elem::F32,
            dlse: Elem::F32,
            stats: Elem::F32,
            pairs: (),
            heads: (),
            blocks: RowBlocks::form(spec.rows, BLOCKS),
            lse_apart: is_listed.then_some(LseApart { batch: (), head: () }),
            sums: match spec.cleared {
                Cleared::Nothing => None,
                Cleared::Sums(_) => Some(SumsParams::form(AddOrder::Any, spec.elem)),
                Cleared::InOrder(_) => Some(SumsParams::form(AddOrder::LastKeysFirst, spec.elem)),
            },
            unvisited: (matches!(spec.cleared, Cleared::InOrder(_)) && !is_listed).then_some(()),
        }
    }
}

/// The buffers that kernels of a backward program hand each other.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    /// Statistics of rows.
    pub(super) stats: BufferId,
    /// Sums of dQ, if it is added up.
    pub(super) sums: Option<BufferId>,
    /// Who has been the last to add to sums, if parts are added in order.
    pub(super) last_added: Option<BufferId>,
    /// The tables, if sequences are listed.
    pub(super) tables: Option<Tables>,
}

/// The tables of sequences.
#[derive(Clone, Copy)]
pub(super) struct Tables {
    /// The table of blocks of rows.
    pub(super) rows: BufferId,
    /// The table of tiles of keys.
    pub(super) keys: BufferId,
    /// The first place of each sequence.
    pub(super) firsts: BufferId,
}

/// A tensor whose rows a kernel finds. Packed sequences are one entry of the batch, whatever their numbers.
fn strided(plan: &Plan, name: &'static str, buffer: BufferId, tensor: &TensorDesc) -> Strided<Host> {
    let mut tensor = *tensor;
    if plan.numbered().is_none() && tensor.shape.batch <= 1 {
        tensor.strides.batch = 0;
    }
    Strided::of(name, buffer, &tensor)
}

impl SumsParams<Host> {
    fn of(plan: &Plan, scratch: &Scratch) -> Option<SumsParams<Host>> {
        let problem = plan.problem();
        Some(SumsParams {
            address: scratch.sums?,
            heads: problem.forward().heads().q() as u32,
            blocks: sum_blocks(plan),
            in_order: scratch.last_added.map(|last_added| InOrderParams {
                last_added,
                dq: strided(plan, "dq", buffers::DQ, problem.dq()),
            }),
        })
    }
}

/// The rows of CTAs that have `blocks` of sequences of one length, or those of a table, which see keys under this mask.
fn row_blocks(plan: &Plan, blocks: Option<&Schedule>, mask: Mask, scratch: &Scratch) -> RowBlocks<Host> {
    let forward = plan.problem().forward();
    match plan.way() {
        Way::Numbered(_) => RowBlocks::Equal {
            seqlen: forward.q().shape.seqlen as u32,
            decoder: blocks.and_then(Schedule::decoder).expect("there is a block"),
        },
        Way::Listed(tiles) => {
            let table = scratch.tables.expect("sequences are listed").rows;
            let tiling = Tiling::new(tiles.block_rows(), 1, 1, mask);
            RowBlocks::Listed {
                table: Table::of(tiles.stats(), table, tiling, Some(Places::OfBlocks)),
                parts: tiles.block_rows() / STATS_ROWS,
            }
        }
    }
}

impl RoundParams<Host> {
    /// The values of a launch with at least one block.
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> Option<RoundParams<Host>> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        Some(RoundParams {
            sums: SumsParams::of(plan, scratch)?,
            dq: strided(plan, "dq", buffers::DQ, problem.dq()),
            softmax_scale: forward.softmax_scale().natural() as f32,
            blocks: row_blocks(plan, plan.numbered().and_then(Numbered::dq), Mask::None, scratch),
        })
    }
}

impl Inputs<Host> {
    fn of(plan: &Plan, lookup: Lookup<Host>, ticket: Option<BufferId>) -> Inputs<Host> {
        let forward = plan.problem().forward();
        let (scale_log2, into_cap) = units(forward);
        let [q, k, v, dout] = views(plan);
        Inputs {
            q,
            k,
            v,
            dout,
            scale_log2,
            into_cap,
            softmax_scale: forward.softmax_scale().natural() as f32,
            lookup,
            ticket,
            apart: match plan.way() {
                Way::Numbered(_) => None,
                Way::Listed(tiles) => {
                    let [q, k, v, dout] = tiles.rows().map(|rows| rows.batch);
                    Some(Apart { q, k, v, dout })
                }
            },
        }
    }
}

/// Q, K, V and dO as kernels load them. Of an empty tensor nothing is loaded, but a tensor map must be of something: of
/// one of the other side.
fn views(plan: &Plan) -> [Passed; 4] {
    let (problem, forward) = (plan.problem(), plan.problem().forward());
    let rows = match plan.way() {
        Way::Numbered(_) => [None; 4],
        Way::Listed(tiles) => tiles.rows().map(Some),
    };
    let tensors = [
        (buffers::Q, forward.q(), rows[0]),
        (buffers::K, forward.k(), rows[1]),
        (buffers::V, forward.v(), rows[2]),
        (buffers::DOUT, problem.dout(), rows[3]),
    ];
    let [q, k, ..] = tensors;
    let view_of = |given: (BufferId, &TensorDesc, Option<MemoryRows>), other| {
        let (buffer, tensor, rows) = if given.1.extent().0 == 0 { other } else { given };
        match rows {
            None => view(buffer, tensor),
            Some(rows) => rows_view(buffer, tensor, rows),
        }
    };
    [view_of(q, k), view_of(k, q), view_of(tensors[2], q), view_of(tensors[3], k)]
}

impl DkvParams<Host> {
    /// The values of a launch.
    pub(super) fn of(
        plan: &Plan,
        stats: Passed,
        scratch: &Scratch,
        ticket: Option<BufferId>,
    ) -> DkvParams<Host> {
        let problem = plan.problem();
        let tiling = plan.dkv().tiling;
        let (lookup, ticket) = match plan.way() {
            Way::Numbered(tiles) => {
                (Lookup::Equal(Geometry::of(tiles.dkv(), tiling, tiles.lens().transposed())), ticket)
            }
            Way::Listed(tiles) => {
                let tables = scratch.tables.expect("sequences are listed");
                let places = Places::Listed { firsts: tables.firsts, most: tiles.places() };
                listed(Table::of(tiles.dkv(), tables.keys, tiling, Some(places)), ticket)
            }
        };
        DkvParams {
            inputs: Inputs::of(plan, lookup, ticket),
            stats,
            group: problem.forward().heads().group_size() as u32,
            dk: strided(plan, "dk", buffers::DK, problem.dk()),
            dv: strided(plan, "dv", buffers::DV, problem.dv()),
            sums: SumsParams::of(plan, scratch),
        }
    }
}

/// The lookup of a table, which has the counter of tiles.
fn listed(table: Table<Host>, ticket: Option<BufferId>) -> (Lookup<Host>, Option<BufferId>) {
    let ticket = ticket.expect("tiles of a table are drawn from a counter");
    (Lookup::Listed { table, ticket }, None)
}

impl DqParams<Host> {
    /// The values of a launch of the kernel of dQ, if there is one.
    pub(super) fn of(plan: &Plan, scratch: &Scratch, ticket: Option<BufferId>) -> Option<DqParams<Host>> {
        let DqBy::Kernel(part) = plan.dq() else { return None };
        let problem = plan.problem();
        let (lookup, ticket) = match plan.way() {
            Way::Numbered(tiles) => {
                (Lookup::Equal(Geometry::of(tiles.dq()?, part.tiling, tiles.lens())), ticket)
            }
            Way::Listed(tiles) => {
                let table = scratch.tables.expect("sequences are listed").rows;
                listed(Table::of(tiles.dq()?, table, part.tiling, Some(Places::OfBlocks)), ticket)
            }
        };
        Some(DqParams {
            inputs: Inputs::of(plan, lookup, ticket),
            stats: scratch.stats,
            pairs: pairs(plan),
            heads: problem.forward().heads().q() as u32,
            dq: strided(plan, "dq", buffers::DQ, problem.dq()),
        })
    }
}

impl StatsParams<Host> {
    /// The values of a launch with at least one tile.
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> StatsParams<Host> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        let numbered = plan.numbered();
        let [batch, heads, rows] = forward.lse_shape().map(|extent| extent as u64);
        StatsParams {
            o: strided(plan, "o", buffers::O, forward.o()),
            dout: strided(plan, "dout", buffers::DOUT, problem.dout()),
            lse: buffers::LSE,
            dlse: buffers::DLSE,
            stats: scratch.stats,
            pairs: pairs(plan),
            heads: forward.heads().q() as u32,
            blocks: row_blocks(plan, numbered.map(Numbered::stats), cleared_mask(plan), scratch),
            lse_apart: match numbered {
                Some(_) => None,
                None => Some(LseApart { batch: if batch > 1 { heads * rows } else { 0 }, head: rows }),
            },
            unvisited: numbered.filter(|_| plan.dkv().tile.adds_in_order()).map(Numbered::unvisited_rows),
            sums: SumsParams::of(plan, scratch),
        }
    }
}
