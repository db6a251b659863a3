//! The split-KV reduction, a step that follows the attention kernel if CTAs split keys (see
//! [`parts::shares`](crate::kernels::parts::shares)).
//!
//! The attention kernel tells the reduction which work units are split. It writes a [`Reduction`] message for each
//! unit, or for each CTA about the unit that begins in it and that others continue. CTA (i, j) reduces the rows of
//! message i, from row j on. A unit that begins in CTA c has its first split at index 2c + 1, and the others at 2c + 2,
//! 2c + 4, ... ([`fa3_sched::WorkDecomposition`]).
//!
//! Splits of fixed size need no messages: their number follows from the lengths of a sequence. CTA (i, j) reduces the
//! rows of pair i of a sequence and a tile's heads, from row j on, and split p of all rows is at index p. It begins
//! with the split whose keys a tile visits first: the last one, or the first one of a list.

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::combine::Team;
use fa3_sched::forward::{Plan, ReductionSource, SplitKvPlan};
use fa3_sched::{FastDiv, Int};
use fa3_types::Mask;

use super::buffers;
use super::params::{out_strides, part_rows};
use super::spec::FwdSpec;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::combine::{Combine, Combined, Part};
use crate::kernels::parts::geometry::sides;
use crate::kernels::parts::lse_form::StoredLse;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::parts::reduction::Reduction;
use crate::kernels::parts::shares::{ShareForm, Shares};
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::elem;
use crate::kernels::{self, KernelSpec};

/// Everything that the reduction kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FwdCombineSpec {
    /// The elements of O.
    pub output: Elem,
    /// Columns of V and O.
    pub head_dim_v: u32,
    /// Rows of a tile, and of a split's buffer.
    pub tile_m: u32,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// Whether LSE leaves out the sinks.
    pub lse_without_sink: bool,
    /// Whether LSE is stored in another form than the default one.
    pub stored_lse: bool,
    /// Whether the largest score of each row is a result.
    pub max_logits: bool,
    /// The team of warps that reduces a row.
    pub team: Team,
    /// How the kernel finds lengths, and the mask, if splits have a fixed size.
    pub pieces: Option<(ShareForm, Mask)>,
}

params! {
    struct Params {
        o: named Strided,
        lse: pointer,
        /// The form of LSE, if it is not the default.
        stored_lse: maybe all StoredLse,
        sink: maybe pointer,
        lse_batch: u64,
        lse_head: u64,
        begun: maybe pointer,
        o_partial: pointer,
        lse_partial: pointer,
        /// The largest scores, if they are a result, of rows and of their splits.
        max_logits: maybe pointer,
        max_logits_partial: maybe pointer,
        /// Number of query heads in a tile.
        pack: div,
        /// Number of elements of LSE in a split, and the lengths of sequences, if splits have a fixed size.
        rows: maybe u64 = "part_rows",
        shares: maybe all Shares,
    }
}

impl FwdCombineSpec {
    /// The spec of the reduction in a split-KV plan.
    pub fn of(plan: &Plan, shared: &SplitKvPlan) -> FwdCombineSpec {
        let head_dim_v = plan.problem().head_dim_v() as u32;
        FwdCombineSpec {
            output: elem(plan.problem().o().dtype),
            head_dim_v,
            tile_m: plan.tile().tile_m,
            sink: plan.problem().has_sink(),
            lse_without_sink: plan.problem().lse_form().without_sink,
            stored_lse: StoredLse::of(plan.problem().lse_form()).is_some(),
            max_logits: plan.problem().has_max_logits(),
            team: shared.team(head_dim_v),
            pieces: FwdSpec::of(plan)
                .shares
                .filter(|shares| shares.said_by == ReductionSource::Lengths)
                .map(|shares| (shares, sides(plan.problem().mask()))),
        }
    }

    fn form(&self) -> Params<Form> {
        Params {
            o: Strided::form(self.output),
            lse: Elem::F32,
            stored_lse: self.stored_lse.then_some(StoredLse::FORM),
            sink: self.sink.then_some(Elem::F32),
            lse_batch: (),
            lse_head: (),
            begun: self.pieces.is_none().then_some(Elem::U32),
            o_partial: Elem::F32,
            lse_partial: Elem::F32,
            max_logits: self.max_logits.then_some(Elem::F32),
            max_logits_partial: self.max_logits.then_some(Elem::F32),
            pack: FastDiv::new(1).map(|_| ()),
            rows: self.pieces.map(|_| ()),
            shares: self.pieces.map(|(form, mask)| Shares::form(form, mask)),
        }
    }
}

/// Adds the step that reduces the splits of the preceding attention step.
pub(super) fn step(program: &mut Program<kernels::Spec>, plan: &Plan, shared: &SplitKvPlan) {
    let find = |name| program.find(name).expect("a program of shares has their results");
    let (o, [lse_batch, lse_head]) = out_strides(plan.problem());
    let spec = FwdCombineSpec::of(plan, shared);
    let params: Params<Host> = Params {
        o,
        lse: buffers::LSE,
        stored_lse: StoredLse::of(plan.problem().lse_form()),
        sink: program.find(buffers::SINK),
        lse_batch,
        lse_head,
        begun: program.find(buffers::BEGUN),
        o_partial: find(buffers::O_PARTIAL),
        lse_partial: find(buffers::LSE_PARTIAL),
        max_logits: program.find(buffers::MAX_LOGITS),
        max_logits_partial: program.find(buffers::MAX_LOGITS_PARTIAL),
        pack: FastDiv::new(shared.pack()),
        rows: part_rows(plan.problem(), shared),
        shares: spec
            .pieces
            .map(|(form, _)| Shares::of((shared, form), plan.tiling(), None, |name| program.find(name))),
    };
    let teams = shared.unit_rows(plan.problem()).div_ceil(spec.team.rows());
    // Rows behind the last sequence have a single split without keys.
    let behind = u32::from(shared.reduces_whole_units() && shared.sequences().q().arrays.cu_seqlens);
    let of_heads = (shared.sequences().count() + behind) * shared.heads();
    let grid = [shared.reduction_entries().unwrap_or(of_heads), teams, 1];
    program.step(spec.into(), grid, Fill::args(|by| _ = params.pass(by)));
}

impl KernelSpec for FwdCombineSpec {
    fn kernel(&self) -> Kernel {
        Kernel::build("merge", Launch::threads(32 * self.team.cta_warps()), |b| {
            let params = self.form().pass(&mut Declare(b));
            let combine = Combine::declare(b, Elem::F32, self.head_dim_v, self.team);
            b.launch_dependents();
            b.grid_dependency_wait();
            let unit = match (params.begun, &params.shares) {
                (Some(begun), _) => said(b, begun),
                (None, Some(shares)) => of_lengths(b, shares),
                (None, None) => unreachable!("units say what is to be combined of them, or lengths do"),
            };
            let rows = unit.rows;
            let teams = self.team.rows();
            b.for_each((b.cta_y() * teams, rows), b.grid_y() * teams, |from| {
                self.combine(&params, &combine, &unit, from + combine.row_of_cta());
                b.sync_cta();
            });
        })
    }
}

/// The unit that the message of this CTA describes.
#[track_caller]
fn said<'k>(b: &'k Builder, begun: U64<'k>) -> Reduction<'k> {
    Reduction::load(b, Reduction::at(begun, b.cta_x()))
}

/// All units of a sequence and of a tile's heads, whose numbers of partial results are equal. No rows if there are
/// none: the units wrote their results.
#[track_caller]
fn of_lengths<'k>(b: &'k Builder, shares: &Shares<InKernel<'k>>) -> Reduction<'k> {
    let batch = b.cta_x().div(shares.heads());
    let heads = b.cta_x() - batch * shares.heads();
    let (q, parts) = shares.pieces_of(b, batch).expect("splits have a fixed size");
    let rows = parts.gt(0).select::<B32>(q.rows * shares.pack, 0);
    let zero = b.value(0);
    Reduction { rows, splits: parts, batch, heads, q_row: q.row, first: zero, used: q.len, cta: zero }
}

impl FwdCombineSpec {
    /// Reduces a row of a unit, if the unit has that row.
    #[track_caller]
    fn combine<'k>(
        &self,
        params: &Params<InKernel<'k>>,
        combine: &Combine<'k>,
        unit: &Reduction<'k>,
        row: U32<'k>,
    ) {
        let b = combine.builder();
        let &Reduction { rows, splits: parts, batch, heads, q_row, first, used, cta } = unit;
        let is_there = row.lt(rows);
        let row = row.min(rows - 1);
        let pack = params.pack;
        let (position, head) = pack.div_rem(row);
        let (position, head) = (first + position, heads * pack.divisor() + head);
        // A padding row has no sink.
        let sink = params.sink.map(|sinks| {
            let sink = b.load::<F32>(head.mad_wide(4, sinks));
            position.lt(used).select(sink, f32::NEG_INFINITY)
        });
        let in_memory = q_row + position;
        let before = batch.to_u64() * params.lse_batch + head.to_u64() * params.lse_head;
        let number = before + in_memory.to_u64();
        let lse = params.lse + (number << 2);
        let to = Combined {
            lse: params.lse.ne(0u64).select(lse, params.lse),
            o: params.o.global().at([batch, head, in_memory]),
            elem: self.output,
            is_there,
            stored_lse: params.stored_lse,
            lse_without_sink: self.lse_without_sink,
        };
        let part = |part| match params.rows {
            None => self.part(params, row, cta, part),
            Some(rows) => {
                let is_listed = self.pieces.is_some_and(|(shares, _)| shares.lists.is_some());
                let piece = if is_listed { part } else { parts - 1 - part };
                self.piece(params, piece.to_u64() * rows + number)
            }
        };
        if let Some((to, of_parts)) = params.max_logits.zip(params.max_logits_partial) {
            let (largest, from) = (b.var("largest", f32::NEG_INFINITY), of_parts - params.lse_partial);
            b.for_each((0, parts), 32, |first| {
                // Lanes without a part of their own read the last one.
                let number = (first + b.lane_id()).min(parts - 1);
                largest.update(|x| x.max(b.load(part(number).lse + from)));
            });
            let of_row = over_warp(largest.get(), |x, y| x.max(y));
            let is_first = (b.tid() & (32 * self.team.warps - 1)).eq(0);
            b.guarded(is_there & is_first, || b.store(to + (number << 2), of_row));
        }
        combine.row(parts, part, sink, to);
    }

    /// The addresses of LSE and O of a row of a fixed-size split; `row` counts the rows of all splits.
    #[track_caller]
    fn piece<'k>(&self, params: &Params<InKernel<'k>>, row: U64<'k>) -> Part<'k> {
        let bytes = u64::from(4 * self.head_dim_v);
        Part { lse: params.lse_partial + (row << 2), o: params.o_partial + row * bytes }
    }

    /// The addresses of LSE and O of a row of split `number` of the unit that begins in this CTA.
    #[track_caller]
    fn part<'k>(
        &self,
        params: &Params<InKernel<'k>>,
        row: U32<'k>,
        cta: U32<'k>,
        number: U32<'k>,
    ) -> Part<'k> {
        let split = (cta + number) << 1;
        let split = number.eq(0).select(split + 1, split);
        let at = split.mad(self.tile_m, row);
        Part {
            lse: at.mad_wide(4, params.lse_partial),
            o: at.mad_wide(4 * self.head_dim_v, params.o_partial),
        }
    }
}
