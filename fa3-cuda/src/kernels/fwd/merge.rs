//! The merge of the parts of units whose keys CTAs have shared: a step behind the attention kernel.
//!
//! Which units those are, the attention kernel's CTAs say: each of the one that begins in it and goes on. All of their
//! rows have numbers, and a CTA of this kernel merges number c, then c + the number of its CTAs, ... The parts of the
//! unit that begins in CTA c are in slot 2c + 1, then in slots 2 (c + 1), 2 (c + 2), ... ([`fa3_sched::Shares`]).

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::combine::Team;
use fa3_sched::forward::{MOST_CTAS, Plan, Shared};
use fa3_types::Dtype;

use super::params::out_strides;
use super::program::buffers;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::merge::{Merge, Merged, Part};
use crate::kernels::parts::shares::BEGUN_WORDS;
use crate::kernels::parts::strided::Strided;
use crate::kernels::tensors::elem;
use crate::kernels::{self, KernelSpec};

/// A team for so many parts at least: units of a few parts wait little longer for it, and a long one beside them needs
/// it.
const LEAST_PARTS: u32 = 32;

/// CTAs that an SM has at a time.
const PER_SM: u32 = 4;

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
        /// CTAs of the attention kernel.
        ctas: u32,
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
    pub fn of(plan: &Plan, shared: &Shared) -> MergeSpec {
        let parts = shared.parts(plan.problem());
        let head_dim_v = plan.problem().head_dim_v() as u32;
        MergeSpec {
            output: elem(plan.problem().o().dtype),
            head_dim_v,
            tile_m: plan.tile().tile_m,
            sink: plan.problem().has_sink(),
            team: Team::new(parts.max(LEAST_PARTS), head_dim_v, Dtype::F32),
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
            ctas: (),
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
        ctas: shared.ctas(),
        pack: Pack(FastDiv::new(shared.pack())),
    };
    // As many CTAs as the attention kernel's SMs have at a time, or fewer.
    let at_once = PER_SM * shared.ctas().div_ceil(shared.per_sm());
    let grid = [shared.merged_rows(plan.problem()).clamp(1, at_once.max(1)), 1, 1];
    program.step(MergeSpec::of(plan, shared).into(), grid, Fill::args(|by| _ = params.pass(by)));
}

impl KernelSpec for MergeSpec {
    fn kernel(&self) -> Kernel {
        let threads = 32 * self.team.cta_warps();
        Kernel::build("merge", Launch::threads(threads), |b| {
            let params = self.form().pass(&mut Declare(b));
            let merge = Merge::declare(b, Elem::F32, self.head_dim_v, self.team);
            let units = Units::declare(b, threads);
            b.launch_dependents();
            b.grid_dependency_wait();
            let rows = units.number(params.begun, params.ctas);
            b.for_each((b.cta_x(), rows), b.grid_x(), |number| {
                let (cta, row) = units.row(number, params.ctas);
                self.merge(&params, &merge, cta, row);
                b.sync_cta();
            });
        })
    }
}

impl MergeSpec {
    /// Merges a row of the unit that begins in this CTA.
    #[track_caller]
    fn merge<'k>(&self, params: &Params<InKernel<'k>>, merge: &Merge<'k>, cta: V<'k, B32>, row: V<'k, B32>) {
        let b = merge.builder();
        let begun = cta.mad_wide(4 * BEGUN_WORDS, params.begun);
        let [_, parts, batch, heads] = b.load_vector::<B32, 4>(begun.at(0));
        let [q_row, first, used, _] = b.load_vector::<B32, 4>(begun.at(16));
        let pack = params.pack.0;
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
            is_there: parts.gt(0),
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

/// The rows of all units that are to be merged, numbered one unit after the other. Shared memory has the number of rows
/// up to each CTA's unit, itself included.
struct Units<'k> {
    builder: &'k Builder,
    threads: u32,
    upto: Region,
    of_warps: Region,
}

impl<'k> Units<'k> {
    #[track_caller]
    fn declare(b: &'k Builder, threads: u32) -> Units<'k> {
        let upto = b.region("rows", 4 * MOST_CTAS, 16);
        Units { builder: b, threads, upto, of_warps: b.region("rows of warps", threads / 8, 16) }
    }

    /// Counts the rows of the units of so many CTAs. Gives the number of all.
    #[track_caller]
    fn number(&self, begun: V<'k, B64>, ctas: V<'k, B32>) -> V<'k, B32> {
        let b = self.builder;
        let (lane, warp) = (b.lane_id(), b.tid() >> 5);
        let all = b.var("rows", 0);
        b.for_each((0, ctas), self.threads, |from| {
            let cta = from + b.tid();
            let there = cta.min(ctas - 1).mad_wide(4 * BEGUN_WORDS, begun);
            let rows = cta.lt(ctas).select::<B32>(b.load(there), 0);
            let upto = [1, 2, 4, 8, 16].into_iter().fold(rows, |sum, distance: u32| {
                let with = sum + sum.shfl_up(distance);
                lane.ge(distance).select(with, sum)
            });
            let at = warp.mad(4, b.address(self.of_warps));
            b.guarded(lane.eq(31), || b.store(at, upto));
            b.sync_cta();
            let before = all.get();
            let warps: Vec<V<'k, B32>> =
                (0..self.threads / 32).map(|warp| b.load(self.of_warps.at(4 * warp as i32))).collect();
            let of_others = warps
                .iter()
                .zip(0..)
                .fold(before, |sum, (&rows, other)| sum + warp.gt(other).select::<B32>(rows, 0));
            b.guarded(cta.lt(ctas), || b.store(cta.mad(4, b.address(self.upto)), of_others + upto));
            all.set(warps.into_iter().fold(before, |sum, rows| sum + rows));
            b.sync_cta();
        });
        all.get().shfl_idx(0)
    }

    /// The CTA in which the unit of row `number` begins, and the number of the row in its tile.
    #[track_caller]
    fn row(&self, number: V<'k, B32>, ctas: V<'k, B32>) -> (V<'k, B32>, V<'k, B32>) {
        let b = self.builder;
        let at = |cta: V<'k, B32>| b.load::<B32>(cta.mad(4, b.address(self.upto)));
        // CTAs before `first` have no such row; those from `end` on have one that is behind.
        let (first, end) = (b.var("first", 0), b.var("end", ctas));
        b.repeat(|| {
            let (low, high) = (first.get(), end.get());
            b.break_if(high.le(low));
            let middle = (low + high) >> 1;
            let is_before = at(middle).le(number);
            first.set(is_before.select(middle + 1, low));
            end.set(is_before.select(high, middle));
        });
        let cta = first.get().shfl_idx(0);
        let before = cta.gt(0).select::<B32>(at(cta.max(1) - 1), 0);
        (cta, (number - before).shfl_idx(0))
    }
}
