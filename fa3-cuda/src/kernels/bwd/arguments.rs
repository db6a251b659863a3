//! The arguments of a plan's launches.

use std::f32::consts::LOG2_E;

use fa3_ir::{BufferId, Passed, Program};
use fa3_sched::backward::{DensePlan, DqBy, Plan, PlanKind, STATS_ROWS, TileSplit};
use fa3_sched::packed::MemoryRows;
use fa3_sched::{Schedule, Tiling};
use fa3_types::{Mask, TensorDesc};

use super::buffers;
use super::params::{
    BatchStrides, DkvParams, DqAccumParams, DqParams, InOrderParams, Inputs, LseStrides, Parts,
    ReadSumsParams, RoundParams, StatsParams, SummaryParams,
};
use super::q_blocks::{self, QBlocksParams};
use super::reduce::{self, ReduceParams};
use super::row_stats::RowStats;
use super::scratch::{Scratch, SplitBuffers, accum_blocks, groups, padded_blocks, pairs};
use super::spec::cleared_mask;
use super::split_tiles::SplitTilesParams;
use crate::kernels::Spec;
use crate::kernels::params::Host;
use crate::kernels::parts::geometry::Geometry;
use crate::kernels::parts::intervals::IntervalRows;
use crate::kernels::parts::key_tiles::KeyTiles;
use crate::kernels::parts::lookup::Lookup;
use crate::kernels::parts::row_blocks::RowBlocks;
use crate::kernels::parts::score::ScoreParams;
use crate::kernels::parts::scores::units;
use crate::kernels::parts::strided::Strided;
use crate::kernels::parts::summaries::Summaries;
use crate::kernels::parts::table::{PaddedRows, Table};
use crate::kernels::tensors::{ragged_view, view};

/// A tensor that a kernel addresses by rows. A tensor of packed sequences has one batch entry, whose stride becomes 0.
fn strided(plan: &Plan, buffer: BufferId, tensor: &TensorDesc) -> Strided<Host> {
    let mut tensor = *tensor;
    if plan.dense().is_none() && tensor.shape.batch <= 1 {
        tensor.strides.batch = 0;
    }
    Strided::of(buffer, &tensor)
}

/// The buffer of intervals of rows, under a mask of intervals.
fn intervals(plan: &Plan, scratch: &Scratch) -> Option<IntervalRows<Host>> {
    let forward = plan.problem().forward();
    let (form, buffers) = forward.mask().intervals().zip(scratch.intervals)?;
    Some(IntervalRows::of(form, forward.q().shape, buffers.rows))
}

/// The summaries of intervals over blocks of rows, where rows have bounds.
fn summaries(plan: &Plan, scratch: &Scratch) -> Option<Summaries<Host>> {
    let forward = plan.problem().forward();
    let (form, buffer) = forward.mask().bounds().zip(scratch.intervals?.summaries)?;
    Some(Summaries::of(form, forward.q().shape, padded_blocks(plan), buffer))
}

/// The split tiles of keys under a mask of intervals, in a plan for sequences of one length.
pub(super) struct SplitArguments<'a> {
    plan: &'a Plan,
    numbered: &'a DensePlan,
    splits: TileSplit<u32>,
    buffers: SplitBuffers,
    summaries: Summaries<Host>,
}

impl<'a> SplitArguments<'a> {
    /// The split of a plan's tiles; `None` if rows have no bounds.
    pub(super) fn of(plan: &'a Plan, scratch: &Scratch) -> Option<SplitArguments<'a>> {
        let numbered = plan.dense()?;
        let summaries = summaries(plan, scratch)?;
        let (splits, buffers) = (numbered.splits()?, scratch.intervals?.splits?);
        Some(SplitArguments { plan, numbered, splits, buffers, summaries })
    }

    fn geometry(&self, tiling: Tiling<u32>) -> Geometry<u32> {
        Geometry::of(self.numbered.dkv(), tiling, self.numbered.lens().transposed())
    }

    fn tiles(&self) -> KeyTiles<Host> {
        KeyTiles::of(&self.splits, self.buffers.tiles)
    }

    fn parts(&self) -> Parts<Host> {
        let [dk, dv] = self.buffers.parts;
        Parts { dk, dv }
    }

    /// The number of CTAs and the arguments of the launch that finds the blocks of rows that see each tile of keys.
    pub(super) fn q_blocks(&self) -> (u32, QBlocksParams<Host>) {
        let ctas = self.numbered.dkv().num_tiles().div_ceil(q_blocks::TILES);
        let group = self.plan.problem().forward().heads().group_size() as u32;
        let geometry = self.geometry(self.plan.dkv().tiling);
        let (summaries, to) = (self.summaries, self.tiles());
        (ctas, QBlocksParams { geometry, summaries, group, to })
    }

    /// The arguments of the launch that lists split tiles and their parts.
    pub(super) fn list(&self) -> SplitTilesParams<Host> {
        SplitTilesParams { tiles: self.numbered.dkv().num_tiles(), splits: self.splits, to: self.tiles() }
    }

    /// The number of CTAs and the arguments of the launch that adds up parts. Each block of keys of a split tile has
    /// one CTA for dK and one for dV.
    pub(super) fn reduce(&self) -> (u32, ReduceParams<Host>) {
        let problem = self.plan.problem();
        let ctas = 2 * self.plan.dkv().tile.tile_n / reduce::KEYS * self.splits.most_tiles();
        let tiling = Tiling::new(self.plan.dkv().tile.tile_n, 1, 1, Mask::None);
        let params = ReduceParams {
            geometry: self.geometry(tiling),
            tiles: self.tiles(),
            parts: self.parts(),
            dk: strided(self.plan, buffers::DK, problem.dk()),
            dv: strided(self.plan, buffers::DV, problem.dv()),
            softmax_scale: problem.forward().softmax_scale().natural() as f32,
        };
        (ctas, params)
    }
}

impl DqAccumParams<Host> {
    fn of(plan: &Plan, scratch: &Scratch) -> Option<DqAccumParams<Host>> {
        let problem = plan.problem();
        Some(DqAccumParams {
            address: scratch.dq_accum?,
            heads: problem.forward().heads().q() as u32,
            blocks: accum_blocks(plan),
            in_order: scratch
                .last_added
                .map(|last_added| InOrderParams { last_added, dq: strided(plan, buffers::DQ, problem.dq()) }),
        })
    }
}

/// The block of rows of each CTA. In a dense plan, `blocks` numbers the blocks; in a varlen plan, the table of
/// sequences does. The rows see keys under `mask`.
fn row_blocks(plan: &Plan, blocks: Option<&Schedule>, mask: Mask, scratch: &Scratch) -> RowBlocks<Host> {
    let forward = plan.problem().forward();
    match plan.kind() {
        PlanKind::Dense(_) => RowBlocks::Dense {
            seqlen: forward.q().shape.seqlen as u32,
            decoder: blocks.and_then(Schedule::decoder).expect("there is a block"),
        },
        PlanKind::Varlen(tiles) => {
            let table = scratch.tables.expect("sequences are listed").rows;
            let tiling = Tiling::new(tiles.block_rows(), 1, 1, mask);
            RowBlocks::Varlen {
                table: Table::of(tiles.stats(), table, tiling, Some(PaddedRows::OfBlocks)),
                parts: tiles.block_rows() / STATS_ROWS,
            }
        }
    }
}

impl RoundParams<Host> {
    /// The arguments of a launch with at least one block; `None` if tiles do not add to dQ.
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> Option<RoundParams<Host>> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        Some(RoundParams {
            dq_accum: DqAccumParams::of(plan, scratch)?,
            dq: strided(plan, buffers::DQ, problem.dq()),
            softmax_scale: forward.softmax_scale().natural() as f32,
            blocks: row_blocks(plan, plan.dense().and_then(DensePlan::dq), Mask::None, scratch),
        })
    }
}

impl Inputs<Host> {
    pub(super) fn of(
        plan: &Plan,
        program: &Program<Spec>,
        scratch: &Scratch,
        lookup: Lookup<Host>,
        tile_counter: Option<BufferId>,
    ) -> Inputs<Host> {
        let forward = plan.problem().forward();
        let (of_product, into_cap) = units(forward);
        // The function of scores takes products, and gives values in natural units.
        let scale_log2 = if forward.score().is_some() { LOG2_E } else { of_product };
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
            intervals: intervals(plan, scratch),
            tile_counter,
            strides: match plan.kind() {
                PlanKind::Dense(_) => None,
                PlanKind::Varlen(tiles) => {
                    let [q, k, v, dout] = tiles.rows().map(|rows| rows.batch);
                    Some(BatchStrides { q, k, v, dout })
                }
            },
            score: ScoreParams::of(forward, program),
        }
    }
}

/// Q, K, V and dO as kernels load them. A tensor map needs an address, so an empty tensor is replaced by a tensor of
/// the other side. Nothing is loaded from it.
fn views(plan: &Plan) -> [Passed; 4] {
    let (problem, forward) = (plan.problem(), plan.problem().forward());
    let rows = match plan.kind() {
        PlanKind::Dense(_) => [None; 4],
        PlanKind::Varlen(tiles) => tiles.rows().map(Some),
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
            Some(rows) => ragged_view(buffer, tensor, rows),
        }
    };
    [view_of(q, k), view_of(k, q), view_of(tensors[2], q), view_of(tensors[3], k)]
}

impl DkvParams<Host> {
    pub(super) fn of(
        plan: &Plan,
        program: &Program<Spec>,
        stats: Passed,
        scratch: &Scratch,
        tile_counter: Option<BufferId>,
    ) -> DkvParams<Host> {
        let problem = plan.problem();
        let tiling = plan.dkv().tiling;
        let (lookup, tile_counter) = match plan.kind() {
            PlanKind::Dense(tiles) => {
                (Lookup::Dense(Geometry::of(tiles.dkv(), tiling, tiles.lens().transposed())), tile_counter)
            }
            PlanKind::Varlen(tiles) => {
                let tables = scratch.tables.expect("sequences are listed");
                let places = PaddedRows::Firsts { firsts: tables.firsts, most: tiles.places() };
                listed(Table::of(tiles.dkv(), tables.keys, tiling, Some(places)), tile_counter)
            }
        };
        let split = SplitArguments::of(plan, scratch);
        DkvParams {
            inputs: Inputs::of(plan, program, scratch, lookup, tile_counter),
            stats,
            group: problem.forward().heads().group_size() as u32,
            dk: strided(plan, buffers::DK, problem.dk()),
            dv: strided(plan, buffers::DV, problem.dv()),
            dq_accum: DqAccumParams::of(plan, scratch),
            tiles: split.as_ref().map(SplitArguments::tiles),
            summaries: summaries(plan, scratch).filter(|_| split.is_none()),
            parts: split.as_ref().map(SplitArguments::parts),
        }
    }
}

/// The lookup of tiles in a table, with the tile counter that it contains.
fn listed(table: Table<Host>, tile_counter: Option<BufferId>) -> (Lookup<Host>, Option<BufferId>) {
    let tile_counter = tile_counter.expect("tiles of a table are fetched from a counter");
    (Lookup::Varlen { table, tile_counter }, None)
}

impl RowStats<Host> {
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> RowStats<Host> {
        let heads = plan.problem().forward().heads().q() as u32;
        RowStats { address: scratch.stats, pairs: pairs(plan), heads }
    }
}

impl DqParams<Host> {
    /// The arguments of a launch of the dQ kernel; `None` if the plan has no such kernel.
    pub(super) fn of(
        plan: &Plan,
        program: &Program<Spec>,
        scratch: &Scratch,
        tile_counter: Option<BufferId>,
    ) -> Option<DqParams<Host>> {
        let DqBy::Kernel(part) = plan.dq() else { return None };
        let problem = plan.problem();
        let (lookup, tile_counter) = match plan.kind() {
            PlanKind::Dense(tiles) => {
                (Lookup::Dense(Geometry::of(tiles.dq()?, part.tiling, tiles.lens())), tile_counter)
            }
            PlanKind::Varlen(tiles) => {
                let table = scratch.tables.expect("sequences are listed").rows;
                listed(Table::of(tiles.dq()?, table, part.tiling, Some(PaddedRows::OfBlocks)), tile_counter)
            }
        };
        Some(DqParams {
            inputs: Inputs::of(plan, program, scratch, lookup, tile_counter),
            stats: RowStats::of(plan, scratch),
            dq: strided(plan, buffers::DQ, problem.dq()),
            sums: scratch.read_sums.map(|address| ReadSumsParams { address, groups: groups(plan) }),
            line_sums: scratch.lines.map(|lines| lines.params(plan)),
        })
    }
}

impl StatsParams<Host> {
    /// The arguments of a launch with at least one tile.
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> StatsParams<Host> {
        let (problem, forward) = (plan.problem(), plan.problem().forward());
        let numbered = plan.dense();
        let [batch, heads, rows] = forward.lse_shape().map(|extent| extent as u64);
        StatsParams {
            o: strided(plan, buffers::O, forward.o()),
            dout: strided(plan, buffers::DOUT, problem.dout()),
            lse: buffers::LSE,
            dlse: buffers::DLSE,
            stats: scratch.stats,
            pairs: pairs(plan),
            heads: forward.heads().q() as u32,
            blocks: row_blocks(plan, numbered.map(DensePlan::stats), cleared_mask(plan), scratch),
            lse_strides: match numbered {
                Some(_) => None,
                None => Some(LseStrides { batch: if batch > 1 { heads * rows } else { 0 }, head: rows }),
            },
            unvisited: numbered.filter(|_| plan.dkv().tile.adds_in_order()).map(DensePlan::unvisited_rows),
            dq_accum: DqAccumParams::of(plan, scratch),
            summary: intervals(plan, scratch).zip(summaries(plan, scratch)).map(|(rows, to)| SummaryParams {
                rows,
                to,
                keys: numbered.map(|numbered| numbered.lens().k),
            }),
        }
    }
}
