//! The arguments of a plan's launches.

use fa3_ir::{BufferId, Passed};
use fa3_sched::backward::{DqBy, Numbered, Plan, STATS_ROWS, Splits, Way};
use fa3_sched::packed::MemoryRows;
use fa3_sched::{Schedule, Tiling};
use fa3_types::{Mask, TensorDesc};

use super::buffers;
use super::join::{self, JoinParams};
use super::params::{
    Apart, DkvParams, DqParams, InOrderParams, Inputs, LseApart, Parts, RoundParams, StatsParams,
    SummaryParams, SumsParams,
};
use super::scratch::{IntervalBuffers, Scratch, pairs, sum_blocks};
use super::seeing::{self, SeeingParams};
use super::spec::cleared_mask;
use super::splits::SplitsParams;
use super::summaries::Summaries;
use crate::kernels::params::Host;
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::parts::lookup::Lookup;
use crate::kernels::parts::row_blocks::RowBlocks;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::table::{PaddedRows, Table};
use crate::kernels::tensors::{rows_view, view};

/// A tensor that a kernel addresses by rows. Packed sequences are one batch entry, whatever their indices.
fn strided(plan: &Plan, name: &'static str, buffer: BufferId, tensor: &TensorDesc) -> Strided<Host> {
    let mut tensor = *tensor;
    if plan.numbered().is_none() && tensor.shape.batch <= 1 {
        tensor.strides.batch = 0;
    }
    Strided::of(name, buffer, &tensor)
}

/// The bounds of rows, and the summaries of what blocks of rows see, under a mask of intervals.
fn intervals(plan: &Plan, scratch: &Scratch) -> Option<(IntervalRows<Host>, Summaries<Host>)> {
    let forward = plan.problem().forward();
    let (form, buffers) = forward.mask().intervals().zip(scratch.intervals)?;
    let q = forward.q().shape;
    Some((IntervalRows::of(form, q, buffers.rows), Summaries::of(form, q, buffers.summaries)))
}

/// The split tiles of keys under a mask of intervals, in a plan for sequences of one length.
pub(super) struct SplitTiles<'a> {
    plan: &'a Plan,
    numbered: &'a Numbered,
    splits: Splits<u32>,
    buffers: IntervalBuffers,
    summaries: Summaries<Host>,
}

impl<'a> SplitTiles<'a> {
    /// The split of a plan's tiles; `None` without a mask of intervals.
    pub(super) fn of(plan: &'a Plan, scratch: &Scratch) -> Option<SplitTiles<'a>> {
        let numbered = plan.numbered()?;
        let (_, summaries) = intervals(plan, scratch)?;
        Some(SplitTiles {
            plan,
            numbered,
            splits: numbered.splits()?,
            buffers: scratch.intervals?,
            summaries,
        })
    }

    fn geometry(&self) -> Geometry<u32> {
        let tile = Tiling::new(self.plan.dkv().tile.tile_n, 1, 1, Mask::None);
        Geometry::of(self.numbered.dkv(), tile, self.numbered.lens().transposed())
    }

    fn tiles(&self) -> KeyTiles<Host> {
        KeyTiles::of(&self.splits, self.buffers.tiles)
    }

    fn parts(&self) -> Parts<Host> {
        let [dk, dv] = self.buffers.parts;
        Parts { dk, dv }
    }

    /// CTAs of the launch that finds blocks.
    pub(super) fn seeing_grid(&self) -> u32 {
        self.numbered.dkv().num_tiles().div_ceil(seeing::TILES)
    }

    /// CTAs of the launch that adds up parts: one each for dK and for dV of each block of a tile.
    pub(super) fn join_grid(&self) -> u32 {
        2 * self.plan.dkv().tile.tile_n / join::KEYS * self.splits.most_tiles()
    }

    /// The arguments of the launch that finds blocks.
    pub(super) fn seeing(&self) -> SeeingParams<Host> {
        SeeingParams {
            geometry: self.geometry(),
            summaries: self.summaries,
            group: self.plan.problem().forward().heads().group_size() as u32,
            to: self.tiles(),
        }
    }

    /// The arguments of the launch that lists tiles and parts.
    pub(super) fn list(&self) -> SplitsParams<Host> {
        SplitsParams { tiles: self.numbered.dkv().num_tiles(), splits: self.splits, to: self.tiles() }
    }

    /// The arguments of the launch that adds up parts.
    pub(super) fn join(&self) -> JoinParams<Host> {
        let problem = self.plan.problem();
        JoinParams {
            geometry: self.geometry(),
            tiles: self.tiles(),
            parts: self.parts(),
            dk: strided(self.plan, "dk", buffers::DK, problem.dk()),
            dv: strided(self.plan, "dv", buffers::DV, problem.dv()),
            softmax_scale: problem.forward().softmax_scale().natural() as f32,
        }
    }
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

/// The rows of each CTA: blocks of sequences of one length, in the numbering of `blocks`, or blocks of a table's
/// sequences, whose rows see keys under `mask`.
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
                table: Table::of(tiles.stats(), table, tiling, Some(PaddedRows::OfBlocks)),
                parts: tiles.block_rows() / STATS_ROWS,
            }
        }
    }
}

impl RoundParams<Host> {
    /// The arguments of a launch with at least one block.
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
    fn of(plan: &Plan, scratch: &Scratch, lookup: Lookup<Host>, ticket: Option<BufferId>) -> Inputs<Host> {
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
            intervals: intervals(plan, scratch).map(|(rows, _)| rows),
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

/// Q, K, V and dO as kernels load them. Nothing is loaded from an empty tensor, but a tensor map needs an address, so
/// an empty tensor is replaced by a tensor of the other side.
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
    /// The arguments of a launch.
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
                let places = PaddedRows::Listed { firsts: tables.firsts, most: tiles.places() };
                listed(Table::of(tiles.dkv(), tables.keys, tiling, Some(places)), ticket)
            }
        };
        let split = SplitTiles::of(plan, scratch);
        DkvParams {
            inputs: Inputs::of(plan, scratch, lookup, ticket),
            stats,
            group: problem.forward().heads().group_size() as u32,
            dk: strided(plan, "dk", buffers::DK, problem.dk()),
            dv: strided(plan, "dv", buffers::DV, problem.dv()),
            sums: SumsParams::of(plan, scratch),
            tiles: split.as_ref().map(SplitTiles::tiles),
            parts: split.as_ref().map(SplitTiles::parts),
        }
    }
}

/// The lookup of a table, which contains the tile counter.
fn listed(table: Table<Host>, ticket: Option<BufferId>) -> (Lookup<Host>, Option<BufferId>) {
    let ticket = ticket.expect("tiles of a table are drawn from a counter");
    (Lookup::Listed { table, ticket }, None)
}

impl DqParams<Host> {
    /// The arguments of a launch of the dQ kernel; `None` if the plan has no such kernel.
    pub(super) fn of(plan: &Plan, scratch: &Scratch, ticket: Option<BufferId>) -> Option<DqParams<Host>> {
        let DqBy::Kernel(part) = plan.dq() else { return None };
        let problem = plan.problem();
        let (lookup, ticket) = match plan.way() {
            Way::Numbered(tiles) => {
                (Lookup::Equal(Geometry::of(tiles.dq()?, part.tiling, tiles.lens())), ticket)
            }
            Way::Listed(tiles) => {
                let table = scratch.tables.expect("sequences are listed").rows;
                listed(Table::of(tiles.dq()?, table, part.tiling, Some(PaddedRows::OfBlocks)), ticket)
            }
        };
        Some(DqParams {
            inputs: Inputs::of(plan, scratch, lookup, ticket),
            stats: scratch.stats,
            pairs: pairs(plan),
            heads: problem.forward().heads().q() as u32,
            dq: strided(plan, "dq", buffers::DQ, problem.dq()),
        })
    }
}

impl StatsParams<Host> {
    /// The arguments of a launch with at least one tile.
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
            summary: intervals(plan, scratch).map(|(rows, to)| SummaryParams {
                rows,
                to,
                keys: forward.k().shape.seqlen as u32,
            }),
        }
    }
}
