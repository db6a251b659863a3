//! The merge of the parts of units whose keys CTAs have shared: a step behind the attention kernel.
//!
//! Which units those are, the attention kernel says: each unit of itself, or each CTA of the one that begins in it and
//! goes on. CTA (i, j) merges the rows of number i of these from its row j on. The parts of the unit that begins in CTA
//! c are in slot 2c + 1, then in slots 2 (c + 1), 2 (c + 2), ... ([`fa3_sched::Shares`]).

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::combine::Team;
use fa3_sched::forward::{Plan, Shared};
use fa3_types::Dtype;

use super::params::out_strides;
use super::program::buffers;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::merge::{Merge, Merged, Part};
use crate::kernels::parts::shares::BEGUN_WORDS;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::elem;
use crate::kernels::{self, KernelSpec};

/// A team for so many parts at least: lengths differ, and a long sequence has more.
const LEAST_PARTS: u32 = 4;

/// Everything that the kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MergeSpec {
    /// The elements of O.
    pub output: Elem,
    /// Columns of V and O.
    pub head_dim_v: u32,
    /// Rows of a tile, and of a slot.
    pub tile_m: u32,
    /// Whether query heads have sinks.
    pub sink: bool,
    /// The warps that merge a row.
    pub team: Team,
}

params! {
    /// The parameters.
    struct Params {
        o: all Strided,
        lse: pointer,
        sink: maybe pointer,
        lse_batch: u64,
        lse_head: u64,
        begun: pointer,
        o_slots: pointer,
        lse_slots: pointer,
        /// The query heads of a tile.
        pack: div,
    }
}

impl MergeSpec {
    /// The spec of a plan whose CTAs share keys.
    pub fn of(plan: &Plan, shared: &Shared) -> MergeSpec {
        let head_dim_v = plan.problem().head_dim_v() as u32;
        MergeSpec {
            output: elem(plan.problem().o().dtype),
            head_dim_v,
            tile_m: plan.tile().tile_m,
            sink: plan.problem().has_sink(),
            team: Team::new(shared.parts().max(LEAST_PARTS), head_dim_v, Dtype::F32),
        }
    }

    fn form(&self) -> Params<Form> {
        Params {
            o: Strided::form("o", self.output),
            lse: Elem::F32,
            sink: self.sink.then_some(Elem::F32),
            lse_batch: (),
            lse_head: (),
            begun: Elem::U32,
            o_slots: Elem::F32,
            lse_slots: Elem::F32,
            pack: FastDiv::new(1).map(|_| ()),
        }
    }
}

/// Adds the step that merges the parts of the attention step before.
pub(super) fn step(program: &mut Program<kernels::Spec>, plan: &Plan, shared: &Shared) {
    let find = |name| program.find(name).expect("a program of shares has their results");
    let (o, [lse_batch, lse_head]) = out_strides(plan.problem());
    let params: Params<Host> = Params {
        o,
        lse: buffers::LSE,
        sink: program.find(buffers::SINK),
        lse_batch,
        lse_head,
        begun: find(buffers::BEGUN),
        o_slots: find(buffers::O_SLOTS),
        lse_slots: find(buffers::LSE_SLOTS),
        pack: FastDiv::new(shared.pack()),
    };
    let spec = MergeSpec::of(plan, shared);
    let teams = shared.unit_rows(plan.problem()).div_ceil(spec.team.rows());
    let grid = [shared.units().unwrap_or(shared.ctas()), teams, 1];
    program.step(spec.into(), grid, Fill::args(|by| _ = params.pass(by)));
}

impl KernelSpec for MergeSpec {
    fn kernel(&self) -> Kernel {
        Kernel::build("merge", Launch::threads(32 * self.team.cta_warps()), |b| {
            let params = self.form().pass(&mut Declare(b));
            let merge = Merge::declare(b, Elem::F32, self.head_dim_v, self.team);
            b.launch_dependents();
            b.grid_dependency_wait();
            let begun = b.cta_x().mad_wide(4 * BEGUN_WORDS, params.begun);
            let [rows, parts, batch, heads] = b.load_vector::<B32, 4>(begun.at(0));
            let [q_row, first, used, cta] = b.load_vector::<B32, 4>(begun.at(16));
            let unit = Unit { rows, parts, batch, heads, q_row, first, used, cta };
            let teams = self.team.rows();
            b.for_each((b.cta_y() * teams, rows), b.grid_y() * teams, |from| {
                self.merge(&params, &merge, &unit, from + merge.row_of_cta());
                b.sync_cta();
            });
        })
    }
}

/// A unit with several parts, as [`BEGUN_WORDS`] says.
struct Unit<'k> {
    rows: V<'k, B32>,
    parts: V<'k, B32>,
    batch: V<'k, B32>,
    heads: V<'k, B32>,
    q_row: V<'k, B32>,
    first: V<'k, B32>,
    used: V<'k, B32>,
    cta: V<'k, B32>,
}

impl MergeSpec {
    /// Merges a row of a unit, if it has that one.
    #[track_caller]
    fn merge<'k>(&self, params: &Params<InKernel<'k>>, merge: &Merge<'k>, unit: &Unit<'k>, row: V<'k, B32>) {
        let b = merge.builder();
        let &Unit { rows, parts, batch, heads, q_row, first, used, cta } = unit;
        let is_there = row.lt(rows);
        let row = row.min(rows - 1);
        let pack = params.pack;
        let (position, head) = pack.div_rem(row);
        let (position, head) = (first + position, heads * pack.divisor() + head);
        // A row that takes no part has no sink.
        let sink = params.sink.map(|sinks| {
            let sink = b.load::<F32>(head.mad_wide(4, sinks));
            position.lt(used).select(sink, f32::NEG_INFINITY)
        });
        let in_memory = q_row + position;
        let before = batch.to_u64() * params.lse_batch + head.to_u64() * params.lse_head;
        let lse = params.lse + ((before + in_memory.to_u64()) << 2);
        let to = Merged {
            lse: params.lse.ne(0u64).select(lse, params.lse),
            o: params.o.global().at([batch, head, in_memory]),
            elem: self.output,
            is_there,
        };
        merge.row(parts, |number| self.part(params, row, cta, number), sink, to);
    }

    /// Where a part of a unit's row is, which begins in this CTA.
    #[track_caller]
    fn part<'k>(
        &self,
        params: &Params<InKernel<'k>>,
        row: V<'k, B32>,
        cta: V<'k, B32>,
        number: V<'k, B32>,
    ) -> Part<'k> {
        let slot = (cta + number) << 1;
        let slot = number.eq(0).select(slot + 1, slot);
        let at = slot.mad(self.tile_m, row);
        Part { lse: at.mad_wide(4, params.lse_slots), o: at.mad_wide(4 * self.head_dim_v, params.o_slots) }
    }
}
