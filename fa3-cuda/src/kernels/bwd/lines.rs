//! Sums of keys and of diagonals over all rows of a head, from the sums of groups of rows that the dQ kernel has
//! written. A thread has a line.
//!
//! Diagonals are counted from below the last key of the first row: row i and key j are on diagonal i - j + seqlen_k.

use fa3_ir::Program;
use fa3_ir::lang::*;
use fa3_sched::FastDiv;
use fa3_sched::backward::Plan;
use fa3_types::{ReadBy, ScoreForm, TableRead};

use super::line_sums::{BlockSums, block_of};
use super::pairs::{Pair, Pairs};
use super::params::LineSumsParams;
use super::read_sums::GROUP;
use super::scratch::{Scratch, dq_keys, most_lines};
use super::spec::{BwdSpec, sequences};
use crate::kernels::Spec;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, copies, param, params};
use crate::kernels::parts::lookup::SequenceForm;

/// Number of threads, and of lines of a CTA.
const THREADS: u32 = 256;

/// The spec of the kernel that adds up the sums of lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinesSpec {
    /// Whether lines are diagonals. Otherwise they are keys.
    pub are_diagonals: bool,
    /// Keys of a block of the dQ kernel.
    pub keys: u32,
    /// Number of sums of a group of rows and a block of keys, and the place of the first of this read.
    pub count: u32,
    /// The place of this read's first sum among them.
    pub first: u32,
    /// The number of the read's array of lines.
    pub array: u32,
    /// Where lengths of sequences are known.
    pub sequences: SequenceForm,
}

params! {
    /// The sums of lines.
    struct LinesParams {
        address: pointer = "lines",
        /// Number of pairs of a sequence and a head.
        pairs: u32 = "lines_pairs",
        /// Largest number of lines of a pair.
        most: u32 = "lines_most",
    }

    struct AllLinesParams {
        sums: all LineSumsParams,
        lines: all LinesParams,
        /// Number of CTAs of a pair.
        ctas: div,
        pairs: all Pairs,
    }
}

copies!(LinesParams);

impl LinesParams<Form> {
    pub(super) const FORM: LinesParams<Form> = LinesParams { address: Elem::F32, pairs: (), most: () };
}

impl LinesParams<Host> {
    /// The arguments, if there are reads by key or by distance.
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> Option<LinesParams<Host>> {
        let forward = plan.problem().forward();
        let pairs = (forward.batch() * forward.heads().q()) as u32;
        scratch.lines.map(|lines| LinesParams { address: lines.of_heads, pairs, most: most_lines(plan) })
    }
}

impl<'k> LinesParams<InKernel<'k>> {
    /// The address of the sum of a line of a pair.
    #[track_caller]
    pub(super) fn address(&self, array: u32, pair: U32<'k>, line: U32<'k>) -> U64<'k> {
        (self.pairs * array + pair).mad(self.most, line).mad_wide(4, self.address)
    }
}

pub(super) fn kernel(spec: &LinesSpec) -> Kernel {
    let &LinesSpec { are_diagonals, keys, count, first, array, sequences } = spec;
    Kernel::build("bwd_lines", Launch::threads(THREADS), |b| {
        let form = AllLinesParams::<Form> {
            sums: LineSumsParams::FORM,
            lines: LinesParams::FORM,
            ctas: Form::div(),
            pairs: Pairs::form(sequences),
        };
        let params = form.pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();

        let (number, part) = params.ctas.div_rem(b.cta_x());
        let line = part.mad(THREADS, b.tid());
        let Pair { lens, rows, of_head, first_group, .. } = params.pairs.pair(b, number);
        let (blocks, sum) = (block_of(lens.k + (keys - 1), keys), b.var("sum", 0.0));
        let add = |group: U32<'_>, block: U32<'_>, place: U32<'_>, is_there: V<'_, Pred>| {
            let of_group = of_head.mad(params.sums.groups, first_group + group) * params.sums.blocks;
            let at = (of_group + block).mad_wide(4 * count, params.sums.address);
            let at = place.mad_wide(4, at).at(4 * first as i32);
            b.if_lanes(is_there, || sum.update(|sum| sum + b.load::<F32>(at)));
        };
        b.for_each((0, (rows + (GROUP - 1)) >> GROUP.ilog2()), 1, |group| {
            if !are_diagonals {
                let block = block_of(line, keys);
                return add(group, block, line - block * keys, line.lt(lens.k));
            }
            // The distance from the line to the last row of the group at the first key: at most 15 in its last block.
            let distance = group * GROUP + (GROUP - 1) + lens.k - line;
            let block = block_of(distance, keys);
            let rest = distance - block * keys;
            let is_there = distance.ge_s32(0) & line.lt(lens.q + lens.k);
            add(group, block, line.constant(GROUP + keys - 1) - rest, is_there & block.lt(blocks));
            let before = block - 1;
            add(
                group,
                before,
                line.constant(GROUP - 1) - rest,
                is_there & rest.lt(GROUP) & before.lt(blocks),
            );
        });
        b.if_lanes(line.lt(params.lines.most), || {
            b.store(params.lines.address(array, number, line), sum.get())
        });
    })
}

/// Adds the steps that add up the sums of lines, if there are reads by key or by distance.
pub(super) fn steps(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch) {
    let forward = plan.problem().forward();
    let (Some(form), Some(buffers)) = (forward.score(), scratch.lines) else { return };
    let Some(lines) = LinesParams::of(plan, scratch) else { return };
    let ctas = lines.most.div_ceil(THREADS);
    if ctas * lines.pairs == 0 {
        return;
    }
    for spec in specs(plan, form) {
        let params = AllLinesParams::<Host> {
            sums: buffers.params(plan),
            lines,
            ctas: FastDiv::new(ctas),
            pairs: Pairs::of(plan, scratch),
        };
        let args = Fill::args(|by| _ = params.pass(by));
        program.step(BwdSpec::Lines(spec).into(), [ctas * lines.pairs, 1, 1], args);
    }
}

/// The specs of the kernels that add up the sums of lines.
pub(super) fn specs(plan: &Plan, form: &ScoreForm) -> Vec<LinesSpec> {
    let sums = BlockSums::of(form.expr(), form.summed_gradients(), dq_keys(plan));
    let of_read = |(array, (read, first)): (u32, &(TableRead, u32))| LinesSpec {
        are_diagonals: read.by == ReadBy::Distance,
        keys: sums.keys,
        count: sums.count,
        first: *first,
        array,
        sequences: sequences(plan),
    };
    (0..).zip(&sums.reads).map(of_read).collect()
}
