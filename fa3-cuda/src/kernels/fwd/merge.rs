//! The merge of the parts of units whose keys CTAs have shared: a step behind the attention kernel.
//!
//! CTA (c, i) has the unit that begins in the attention kernel's CTA c and goes on, if there is one. Of its rows it
//! merges number i, and as many further on as CTAs have the unit. The parts are in slot 2c + 1, then in slots
//! 2 (c + 1), 2 (c + 2), ... ([`fa3_sched::Shares`]).

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

/// A team for so many parts: units of a few parts wait little longer for it, and one of very many needs it.
const PARTS: u32 = 32;

/// Rows of Q of a sequence that are merged at once by a CTA each; more take turns.
const MOST_ROWS: u32 = 64;

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
        /// Positions of a tile.
        positions: u32,
        pack: all Pack,
    }
}

/// The query heads of a tile.
pub(super) struct Pack<S: Side>(FastDiv<S::U32>);

impl<A: Side> Pack<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Pack<B> {
        Pack(self.0.map_named("pack", &mut |name: &str, number| by.u32(name, number)))
    }
}

impl MergeSpec {
    /// The spec of a plan whose CTAs share keys.
    pub fn of(plan: &Plan) -> MergeSpec {
        let head_dim_v = plan.problem().head_dim_v() as u32;
        MergeSpec {
            output: elem(plan.problem().o().dtype),
            head_dim_v,
            tile_m: plan.tile().tile_m,
            sink: plan.problem().has_sink(),
            team: Team::new(PARTS, head_dim_v, Dtype::F32),
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
            positions: (),
            pack: Pack(FastDiv::new(1).map(|_| ())),
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
        positions: shared.positions(),
        pack: Pack(FastDiv::new(shared.pack())),
    };
    let rows = shared.merged_rows(plan.problem()).min(MOST_ROWS);
    let grid = [shared.ctas(), rows, 1];
    program.step(MergeSpec::of(plan).into(), grid, Fill::args(|by| _ = params.pass(by)));
}

impl KernelSpec for MergeSpec {
    fn kernel(&self) -> Kernel {
        Kernel::build("merge", Launch::threads(32 * self.team.cta_warps()), |b| {
            let params = self.form().pass(&mut Declare(b));
            let merge = Merge::declare(b, Elem::F32, self.head_dim_v, self.team);
            b.launch_dependents();
            b.grid_dependency_wait();
            let cta = b.cta_x();
            let begun = cta.mad_wide(4 * BEGUN_WORDS, params.begun);
            let parts: V<'_, B32> = b.load(begun.at(0));
            b.if_uniform(parts.gt(0), || {
                let [_, batch, heads, q_row] = b.load_vector::<B32, 4>(begun.at(0));
                let [first, rows, used, _] = b.load_vector::<B32, 4>(begun.at(16));
                let pack = params.pack.0;
                let positions = fa3_sched::Int::sub_sat(rows, first).min(params.positions);
                b.for_each((b.cta_y(), positions * pack.divisor()), b.grid_y(), |row| {
                    let (position, head) = pack.div_rem(row);
                    let (position, head) = (first + position, heads * pack.divisor() + head);
                    let sink = params.sink.map(|sinks| {
                        let sink = b.load::<F32>(head.mad_wide(4, sinks));
                        position.lt(used).select(sink, f32::NEG_INFINITY)
                    });
                    let part = |number| self.part(&params, row, cta, number);
                    let in_memory = q_row + position;
                    let before = batch.to_u64() * params.lse_batch + head.to_u64() * params.lse_head;
                    let lse = params.lse + ((before + in_memory.to_u64()) << 2);
                    let to = Merged {
                        lse: params.lse.ne(0u64).select(lse, params.lse),
                        o: params.o.global().at([batch, head, in_memory]),
                        elem: self.output,
                        is_there: position.lt(rows),
                    };
                    merge.row(parts, part, sink, to);
                    b.sync_cta();
                });
            });
        })
    }
}

impl MergeSpec {
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
