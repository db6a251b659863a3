//! The gradient of a table that is read by head or by query: the sum over all rows that read an element.
//!
//! The dQ kernel has written sums of its groups of rows. Each element has a CTA. The CTA's warps take pairs of a sequence
//! and a head in turn, evaluate the indices of each read there, and add the sums of the rows that read the element. The
//! order of additions is fixed.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};
use fa3_sched::backward::{Plan, PlanKind};
use fa3_sched::{FastDiv, Order, SeqLens, Tiling};
use fa3_types::{Mask, ReadBy, ScoreExpr, ScoreGradients, ScoreTable, TableRead};

use super::params::ReadSumsParams;
use super::read_sums::{GROUP, GroupSums};
use super::scratch::{Scratch, groups};
use super::spec::BwdSpec;
use crate::kernels::Spec;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::parts::score::{ReadRows, ScoreParams};
use crate::kernels::parts::table::{PaddedRows, Table};

/// The spec of the kernel that computes the gradient of a table.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableSpec {
    /// The function of scores.
    pub score: ScoreExpr,
    /// The tables whose gradients the backward pass computes.
    pub gradients: ScoreGradients,
    /// The table, which is one of them.
    pub table: usize,
    /// Where lengths of sequences are known.
    pub sequences: SequenceForm,
}

impl TableSpec {
    /// Number of warps. Many sums belong to an element that is read by head, and there are many elements that are read
    /// by query.
    fn warps(&self) -> u32 {
        let reads = self.score.table_reads(self.gradients);
        let by_row = |read: &TableRead| read.table == self.table && read.by != ReadBy::Head;
        if reads.iter().any(by_row) { 8 } else { 32 }
    }
}

params! {
    struct TableGradientParams {
        score: all ScoreParams,
        sums: all ReadSumsParams,
        dtable: pointer,
        /// The extents of the axes after the first one.
        extent1: maybe div,
        extent2: maybe div,
        extent3: maybe div,
        /// Number of query heads.
        heads: div,
        equal: maybe all EqualSequences,
        listed: maybe all Table,
    }

    /// Sequences of one length.
    struct EqualSequences {
        sequences: u32,
        seqlen_q: u32,
        seqlen_k: u32,
    }
}

impl TableGradientParams<Form> {
    fn form(spec: &TableSpec) -> TableGradientParams<Form> {
        let axes = spec.score.axes()[spec.table];
        let extent = |axis| (axis < axes).then(Form::div);
        let (equal, listed) = match spec.sequences {
            SequenceForm::Dense => (Some(EqualSequences { sequences: (), seqlen_q: (), seqlen_k: () }), None),
            SequenceForm::Varlen => {
                (None, Some(Table::form(Order::Linear, Mask::None, Some(PaddedRows::OfBlocks))))
            }
        };
        TableGradientParams {
            score: ScoreParams::form(&spec.score),
            sums: ReadSumsParams::FORM,
            dtable: Elem::F32,
            extent1: extent(1),
            extent2: extent(2),
            extent3: extent(3),
            heads: Form::div(),
            equal,
            listed,
        }
    }
}

/// A sequence and a head.
struct Pair<'k> {
    sequence: U32<'k>,
    head: U32<'k>,
    lens: SeqLens<U32<'k>>,
    /// Number of rows that have sums.
    rows: U32<'k>,
    /// The index of the sequence and the head in the array of sums, and their first group there.
    of_head: U32<'k>,
    first_group: U32<'k>,
}

impl<'k> TableGradientParams<InKernel<'k>> {
    #[track_caller]
    fn sequences(&self, b: &'k Builder) -> U32<'k> {
        match (&self.equal, &self.listed) {
            (Some(equal), _) => equal.sequences,
            (None, Some(table)) => table.sequences,
            (None, None) => b.value(0),
        }
    }

    /// The pair with this number. Without a table, pairs are numbered as in the array of sums.
    #[track_caller]
    fn pair(&self, b: &'k Builder, number: U32<'k>) -> Pair<'k> {
        let ((sequence, head), zero) = (self.heads.div_rem(number), b.value(0));
        if let Some(EqualSequences { seqlen_q: q, seqlen_k: k, .. }) = self.equal {
            let lens = SeqLens { q, k };
            return Pair { sequence, head, lens, rows: q, of_head: number, first_group: zero };
        }
        let table = self.listed.expect("sequences are equal or listed");
        let (record, first_row) = table.record_at(b, sequence);
        let lens = SeqLens { q: record.q_len, k: record.k_len };
        let rows = record.q_len.min(record.blocks * table.tiling.tile_m());
        let first_group = first_row.expect("the table has padded rows") >> GROUP.ilog2();
        Pair { sequence: record.sequence, head, lens, rows, of_head: head, first_group }
    }

    /// The places of the CTA's element along the axes.
    #[track_caller]
    fn element(&self, b: &'k Builder) -> Vec<U32<'k>> {
        let (mut rest, mut places) = (b.cta_x(), vec![]);
        for extent in [self.extent3, self.extent2, self.extent1].into_iter().flatten() {
            let (quotient, place) = extent.div_rem(rest);
            places.push(place);
            rest = quotient;
        }
        places.push(rest);
        places.reverse();
        places
    }
}

pub(super) fn kernel(spec: &TableSpec) -> Kernel {
    let warps = spec.warps();
    Kernel::build("bwd_dtable", Launch::threads(32 * warps), |b| {
        let params = TableGradientParams::form(spec).pass(&mut Declare(b));
        let (parts, stored) = (b.region("parts", 4 * warps, 16), b.barrier("parts", 32 * warps));
        b.launch_dependents();
        b.grid_dependency_wait();

        let (warp, lane) = ((b.tid() >> 5).shfl_idx(0), b.lane_id());
        let (element, of_group) = (params.element(b), GroupSums::of(&spec.score, spec.gradients));
        let sum = b.var("sum", 0.0);
        let pairs = params.sequences(b) * params.heads.divisor();
        b.for_each((warp, pairs), warps, |number| {
            let Pair { sequence, head, lens, rows, of_head, first_group } = params.pair(b, number);
            for (read, first) in of_group.reads.iter().filter(|(read, _)| read.table == spec.table) {
                let function = (&spec.score, &params.score);
                let of_rows = ReadRows { builder: b, function, read, sequence, head, lens };
                let [begin, end] = of_rows.range(&element, rows);
                let sums = |group| of_group.address(&params.sums, of_head, first_group + group);
                let first = 4 * *first as i32;
                if read.by == ReadBy::Head {
                    // All rows read the element, or none does.
                    let groups = (end + (GROUP - 1)) >> GROUP.ilog2();
                    b.for_each((0, groups), 32, |group| {
                        let group = group + lane;
                        b.if_lanes(group.lt(groups), || {
                            sum.update(|sum| sum + b.load::<F32>(sums(group).at(first)))
                        });
                    });
                    continue;
                }
                b.for_each((begin, end), 32, |row| {
                    let row = row + lane;
                    b.if_lanes(row.lt(end), || {
                        let at = (row & (GROUP - 1)).mad_wide(4, sums(row >> GROUP.ilog2()));
                        let of_row = of_rows.is_read(row, &element).select(b.load::<F32>(at.at(first)), 0.0);
                        sum.update(|sum| sum + of_row);
                    });
                });
            }
        });

        let parts = b.address(parts);
        let part = over_warp(sum.get(), |x, y| x + y);
        b.once_per_warp(|| b.store(warp.mad(4, parts), part));
        b.sync(stored);
        b.if_uniform(warp.eq(0), || {
            // Lanes of a group as large as the number of warps have all parts.
            let part = b.load::<F32>((lane & (warps - 1)).mad(4, parts));
            let distances = (0..warps.ilog2()).map(|bit| 1 << bit);
            let sum = distances.fold(part, |sum, lanes: u32| sum + sum.shfl_bfly(lanes));
            b.once_per_warp(|| b.store(b.cta_x().mad_wide(4, params.dtable), sum));
        });
    })
}

/// Adds the buffers of the gradients of tables, and the steps that compute them.
pub(super) fn steps(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch) {
    let forward = plan.problem().forward();
    let (Some(form), Some(address)) = (forward.score(), scratch.read_sums) else { return };
    let heads = FastDiv::new(forward.heads().q() as u32);
    let tables = ScoreTable::OF_GRADIENTS.into_iter().zip(form.extents()).enumerate();
    for (table, (name, extents)) in tables.filter(|(table, _)| form.gradients().has(*table)) {
        let dims: Vec<u32> = extents.iter().map(|&extent| extent as u32).collect();
        let dtable = program.buffer(name, Elem::F32, &dims, BufferRole::Output);
        program.align(dtable, 4);
        let (equal, listed) = match plan.kind() {
            PlanKind::Dense(tiles) => {
                let (sequences, SeqLens { q, k }) = (forward.batch() as u32, tiles.lens());
                (Some(EqualSequences { sequences, seqlen_q: q, seqlen_k: k }), None)
            }
            PlanKind::Varlen(tiles) => {
                let address = scratch.tables.expect("sequences are listed").rows;
                let tiling = Tiling::new(tiles.block_rows(), 1, 1, Mask::None);
                (None, Some(Table::of(tiles.stats(), address, tiling, Some(PaddedRows::OfBlocks))))
            }
        };
        let extent = |axis: usize| dims.get(axis).map(|&extent| FastDiv::new(extent));
        let params = TableGradientParams::<Host> {
            score: ScoreParams::of(forward, program).expect("the problem has a function of scores"),
            sums: ReadSumsParams { address, groups: groups(plan) },
            dtable,
            extent1: extent(1),
            extent2: extent(2),
            extent3: extent(3),
            heads,
            equal,
            listed,
        };
        let ctas = dims.iter().product();
        let spec = BwdSpec::table(plan, form, table);
        program.step(spec.into(), [ctas, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
}
