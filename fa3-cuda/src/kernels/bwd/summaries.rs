//! Summaries of blocks of rows under a mask of intervals: the union and the intersection of their rows' intervals.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::backward::STATS_ROWS;
use fa3_sched::{Bounds, VisibleKeys};
use fa3_types::{Intervals, IntervalsOfRow, Shape};

use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};
use crate::kernels::parts::intervals::{at_head, strides};

params! {
    /// The array of summaries, each with the [`Bounds`] (union and intersection) of each interval of [`STATS_ROWS`]
    /// rows.
    struct Summaries {
        of_row: fixed IntervalsOfRow,
        address: pointer = "summaries",
        /// Number of blocks of a head.
        blocks: u32 = "summary_blocks",
        /// Strides in blocks, from a sequence to the next and from a head to the next; 0 where sequences or heads share
        /// their intervals.
        batch: u64 = "summaries_batch",
        head: u64 = "summaries_head",
    }
}

copies!(Summaries);

/// Bytes of the summary of one interval of a row.
const SUMMARY: u32 = 16;

impl Summaries<Form> {
    /// The parameters of summaries of rows with `of_row` intervals.
    pub(super) fn form(of_row: IntervalsOfRow) -> Summaries<Form> {
        Summaries { of_row, address: Elem::U32, blocks: (), batch: (), head: () }
    }
}

impl Summaries<Host> {
    /// The shape of the buffer: (batch or 1, heads or 1, blocks, words). Shared intervals make it 1.
    pub(super) fn dims(form: Intervals, q: Shape) -> [u32; 4] {
        let [batch, heads, rows, _] = form.shape(q).map(|extent| extent as u32);
        [batch, heads, rows.div_ceil(STATS_ROWS), SUMMARY / 4 * form.of_row.count() as u32]
    }

    /// The arguments of a launch whose Q has shape `q`.
    pub(super) fn of(form: Intervals, q: Shape, buffer: BufferId) -> Summaries<Host> {
        let [_, heads, blocks, _] = Summaries::dims(form, q).map(u64::from);
        let [batch, head] = strides(form, heads, blocks);
        Summaries { of_row: form.of_row, address: buffer, blocks: blocks as u32, batch, head }
    }
}

impl<'k> Summaries<InKernel<'k>> {
    /// Whether heads have intervals of their own.
    #[track_caller]
    pub(super) fn has_own_heads(&self) -> V<'k, Pred> {
        self.head.ne(0_u64)
    }

    /// The address of the summary of a head's first block.
    #[track_caller]
    pub(super) fn of_head(&self, batch: U32<'k>, head: U32<'k>) -> U64<'k> {
        at_head(self.address, [self.batch, self.head], [batch, head], self.bytes())
    }

    /// Number of bytes of a block's summary.
    fn bytes(&self) -> u32 {
        SUMMARY * self.of_row.count() as u32
    }

    /// Stores the summary of a block of rows, in one thread. If heads or sequences share their intervals, only the
    /// first of them stores.
    #[track_caller]
    pub(super) fn store(
        &self,
        b: &'k Builder,
        [batch, head, block]: [U32<'k>; 3],
        bounds: &[Bounds<U32<'k>>],
    ) {
        let at = block.mad_wide(self.bytes(), self.of_head(batch, head));
        let is_first = |strides: U64<'k>, number: U32<'k>| strides.ne(0_u64) | number.eq(0);
        let stores = is_first(self.batch, batch) & is_first(self.head, head);
        b.guarded(b.elect() & stores & block.lt(self.blocks), || {
            for (number, Bounds { some, every }) in bounds.iter().enumerate() {
                let words = [some.start, some.end, every.start, every.end];
                b.store_vector(at.at((SUMMARY * number as u32) as i32), words);
            }
        });
    }

    /// Loads the summary of block `block`: the bounds of each interval. The head's summaries begin at `of_head`.
    #[track_caller]
    pub(super) fn load(&self, b: &'k Builder, of_head: U64<'k>, block: U32<'k>) -> Vec<Bounds<U32<'k>>> {
        let at = block.mad_wide(self.bytes(), of_head);
        let bounds = (0..self.of_row.count() as u32).map(|of| {
            let [some, some_end, every, every_end] = b.load_vector::<B32, 4>(at.at((SUMMARY * of) as i32));
            Bounds {
                some: VisibleKeys { start: some, end: some_end },
                every: VisibleKeys { start: every, end: every_end },
            }
        });
        bounds.collect()
    }
}
