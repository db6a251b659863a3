//! The gradient of a table: the sum over all lines of scores (rows, keys or diagonals) that read an element.
//!
//! Kernels before have written the sums of lines, or of groups of rows of which each reads the same element. Each
//! element has a CTA. The CTA's warps take pairs of a sequence and a head in turn, evaluate the indices of each read
//! there, and add the sums of the lines that read the element. The order of additions is fixed.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};
use fa3_sched::FastDiv;
use fa3_sched::backward::Plan;
use fa3_types::{ReadBy, ScoreExpr, ScoreGradients, ScoreTable, TableRead};

use super::bias;
use super::lines::{self, LinesParams};
use super::pairs::{Pair, Pairs};
use super::params::ReadSumsParams;
use super::read_sums::{GROUP, GroupSums};
use super::scratch::{Scratch, groups};
use super::spec::BwdSpec;
use crate::kernels::Spec;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::parts::score::{ReadLines, ScoreParams};

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
    /// The reads of the table, each with the number of its array of lines.
    fn reads(&self) -> impl Iterator<Item = (TableRead, Option<u32>)> {
        let (mut arrays, table) = (0.., self.table);
        let reads = self.score.table_reads(self.gradients).into_iter();
        let reads = reads.map(move |read| match read.by {
            ReadBy::Head | ReadBy::Row | ReadBy::QueryAndKey { .. } | ReadBy::Score => (read, None),
            ReadBy::Key | ReadBy::Distance => (read, arrays.next()),
        });
        reads.filter(move |(read, _)| read.table == table)
    }

    /// Number of warps: few if there are many elements, of which each has few sums, as if indices change in steps.
    fn warps(&self) -> u32 {
        let is_found = |read: &TableRead| read.by != ReadBy::Head && read.steps.iter().all(Option::is_some);
        if self.reads().any(|(read, _)| is_found(&read)) { 8 } else { 32 }
    }
}

params! {
    struct TableGradientParams {
        score: all ScoreParams,
        sums: all ReadSumsParams,
        lines: maybe all LinesParams,
        dtable: pointer,
        /// The extents of the axes after the first one.
        extent1: maybe div,
        extent2: maybe div,
        extent3: maybe div,
        pairs: all Pairs,
    }
}

impl TableGradientParams<Form> {
    fn form(spec: &TableSpec) -> TableGradientParams<Form> {
        let axes = spec.score.axes()[spec.table];
        let extent = |axis| (axis < axes).then(Form::div);
        TableGradientParams {
            score: ScoreParams::form(&spec.score),
            sums: ReadSumsParams::FORM,
            lines: spec.reads().any(|(_, array)| array.is_some()).then_some(LinesParams::FORM),
            dtable: Elem::F32,
            extent1: extent(1),
            extent2: extent(2),
            extent3: extent(3),
            pairs: Pairs::form(spec.sequences),
        }
    }
}

impl<'k> TableGradientParams<InKernel<'k>> {
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
        let pairs = params.pairs.count(b);
        b.for_each((warp, pairs), warps, |number| {
            let Pair { sequence, head, lens, rows, of_head, first_group } = params.pairs.pair(b, number);
            for (read, array) in spec.reads() {
                let function = (&spec.score, &params.score);
                let of_lines = ReadLines { builder: b, function, read: &read, sequence, head, lens };
                let count = match read.by {
                    ReadBy::Key => lens.k,
                    ReadBy::Distance => lens.q + lens.k,
                    ReadBy::Head | ReadBy::Row | ReadBy::QueryAndKey { .. } | ReadBy::Score => rows,
                };
                let [begin, end] = of_lines.range(&element, count);
                let mut in_groups = of_group.reads.iter();
                let first =
                    in_groups.find(|(other, _)| *other == read).map_or(0, |(_, first)| 4 * *first as i32);
                let sums = |group| of_group.address(&params.sums, of_head, first_group + group).at(first);
                if read.by == ReadBy::Head {
                    // All rows read the element, or none does.
                    let groups = (end + (GROUP - 1)) >> GROUP.ilog2();
                    b.for_each((0, groups), 32, |group| {
                        let group = group + lane;
                        b.if_lanes(group.lt(groups), || sum.update(|sum| sum + b.load::<F32>(sums(group))));
                    });
                    continue;
                }
                b.for_each((begin, end), 32, |line| {
                    let line = line + lane;
                    b.if_lanes(line.lt(end), || {
                        let (at, first) = match array.zip(params.lines) {
                            Some((array, lines)) => (lines.address(array, number, line), 0),
                            None => {
                                let group = first_group + (line >> GROUP.ilog2());
                                let of_group = of_group.address(&params.sums, of_head, group);
                                ((line & (GROUP - 1)).mad_wide(4, of_group), first)
                            }
                        };
                        let of_line =
                            of_lines.is_read(line, &element).select(b.load::<F32>(at.at(first)), 0.0);
                        sum.update(|sum| sum + of_line);
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
    let Some(form) = forward.score() else { return };
    lines::steps(program, plan, scratch);
    let tables = ScoreTable::OF_GRADIENTS.into_iter().zip(form.extents()).enumerate();
    for (table, (name, extents)) in tables.filter(|(table, _)| form.gradients().has(*table)) {
        let dims: Vec<u32> = extents.iter().map(|&extent| extent as u32).collect();
        let dtable = program.buffer(name, Elem::F32, &dims, BufferRole::Output);
        program.align(dtable, 4);
        if let Some(spec) = BwdSpec::bias(plan, form, table) {
            bias::step(program, plan, scratch, spec, dtable);
            continue;
        }
        let spec = BwdSpec::of_table(plan, form, table);
        // Without any rows there may be no sums, and the kernel reads none.
        let address = scratch.read_sums.unwrap_or(scratch.stats);
        let extent = |axis: usize| dims.get(axis).map(|&extent| FastDiv::new(extent));
        let params = TableGradientParams::<Host> {
            score: ScoreParams::of(forward, program).expect("the problem has a function of scores"),
            sums: ReadSumsParams { address, groups: groups(plan) },
            lines: LinesParams::of(plan, scratch).filter(|_| spec.reads().any(|(_, array)| array.is_some())),
            dtable,
            extent1: extent(1),
            extent2: extent(2),
            extent3: extent(3),
            pairs: Pairs::of(plan, scratch),
        };
        let ctas = dims.iter().product();
        program.step(BwdSpec::Table(spec).into(), [ctas, 1, 1], Fill::args(|by| _ = params.pass(by)));
    }
}
