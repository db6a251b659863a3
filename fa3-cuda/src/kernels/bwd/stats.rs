//! Computes row statistics: for every row -D = dLSE - rowsum(dO ∘ O), which is added to dP, and -LSE in base 2, which
//! is added in the exponent of P. If tiles add to dQ, the kernel also clears the memory that they add to.
//!
//! Statistics are stored by pairs of rows, so that a thread with two neighbouring columns of Sᵀ loads 8 bytes of each
//! statistic. A row that sees no key, and a row that pads the last pair, have -inf for -LSE and 0 for -D. So their P is
//! 0 whatever their scores are, and their dS is 0 whatever their O and dLSE are, even NaN.

use fa3_ir::lang::*;
use fa3_sched::backward::{ADDED_ROWS, STATS_ROWS};
use fa3_sched::{Bounds, SeqLens};

use super::params::{DqAccumParams, StatsParams, SummaryParams};
use super::spec::{Cleared, StatsSpec};
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::intervals::over_warp;
use crate::kernels::parts::row_blocks::{RowBlock, RowsForm, VarlenBlock};
use crate::kernels::parts::unpack::unpacked;

const THREADS: u32 = 128;
const _: () = assert!(STATS_ROWS == ADDED_ROWS, "a CTA clears the accumulators of its rows");
/// Number of neighbouring threads that share a row.
const LANES: u32 = 8;
/// Number of elements that a thread loads at once: 16 bytes.
const CHUNK: u32 = 8;
/// Number of rows that a CTA's threads process at once.
const ROWS: u32 = THREADS / LANES;

pub(super) fn kernel(spec: &StatsSpec) -> Kernel {
    Kernel::build("bwd_stats", Launch::threads(THREADS), |b| {
        let params = StatsParams::<Form>::form(spec).pass(&mut Declare(b));
        b.launch_dependents();
        b.grid_dependency_wait();

        params.blocks.run(b, STATS_ROWS, |block| Stats { builder: b, spec, params: &params, block }.write());
    })
}

/// The statistics of a CTA's rows.
struct Stats<'a, 'k> {
    builder: &'k Builder,
    spec: &'a StatsSpec,
    params: &'a StatsParams<InKernel<'k>>,
    block: RowBlock<'k>,
}

impl<'k> Stats<'_, 'k> {
    /// Computes the statistics, and clears the memory that tiles add dQ to.
    #[track_caller]
    fn write(&self) {
        let Stats { builder: b, spec, params, block } = self;
        let (batch, head) = (block.batch, block.head);
        let lane = b.tid() & (LANES - 1);
        let first = block.row + (b.tid() >> LANES.ilog2());
        let rows: Vec<U32<'_>> = (0..STATS_ROWS / ROWS).map(|turn| first + turn * ROWS).collect();
        if let Some(dq_accum) = &params.dq_accum {
            self.clear(dq_accum, &rows, lane);
        }
        // All loads are issued before the first sum.
        let last = block.rows - 1;
        let loaded: Vec<Chunks<'_>> = rows
            .iter()
            .map(|&row| {
                let inside = block.in_memory(row.min(last));
                let [o, dout] = [&params.o, &params.dout].map(|x| x.global().at([batch, head, inside]));
                Chunks::load(b, spec, [o, dout], lane)
            })
            .collect();
        for (&row, chunks) in rows.iter().zip(&loaded) {
            let mut sum = chunks.dot(b, spec.elem); // A3:1
            for mask in [1, 2, 4] {
                sum = sum + sum.shfl_bfly(mask);
            }
            // The last pair may have one row more than the sequence. With a table, the arrays of statistics are padded,
            // so that every row of a block has a place.
            let is_first = lane.eq(0);
            let writes = match block.varlen {
                None => is_first & row.lt(params.pairs << 1),
                Some(_) => is_first,
            };
            b.if_lanes(writes, || self.store(row, sum));
        }
        if let Some(summary) = &params.summary {
            self.summarize(summary);
        }
    }

    /// Summarizes the intervals of the block's rows, in one warp.
    #[track_caller]
    fn summarize(&self, SummaryParams { rows, to, keys }: &SummaryParams<InKernel<'k>>) {
        let Stats { builder: b, block, .. } = self;
        let RowBlock { batch, head, row, used, varlen, .. } = block;
        b.if_uniform((b.tid() >> 5).shfl_idx(0).eq(0), || {
            let of_head = rows.of_sequence([*batch, *head], varlen.map(|varlen| varlen.first));
            let lens = match (varlen, keys) {
                // A sequence with rows in memory may have none in use.
                (Some(varlen), _) => SeqLens { q: used.max(1), k: varlen.keys },
                (None, keys) => SeqLens { q: *used, k: keys.expect("sequences have one length") },
            };
            let of_row = |row: U32<'k>| -> Vec<Bounds<_>> {
                rows.keys(b, of_head, row, lens, None)
                    .into_iter()
                    .map(|row| Bounds::of(row, lens.k))
                    .collect()
            };
            let first = *row + b.lane_id();
            let [one, other] = [first, first + 32].map(of_row);
            let both = one.into_iter().zip(other).map(|(one, other)| over_warp(one.and(other)));
            let [entry, head, row] = block.padded_row(*row);
            to.store(b, [entry, head, row >> STATS_ROWS.ilog2()], &both.collect::<Vec<_>>());
        });
    }

    /// Stores the statistics of a row; `sum` is its rowsum(dO ∘ O).
    #[track_caller]
    fn store(&self, row: U32<'k>, sum: V<'k, F32>) {
        let Stats { builder: b, params, block, .. } = self;
        let at = self.lse_at(row.min(block.rows - 1)) << 2;
        let there = row.lt(block.used);
        let lse = b.load::<F32>(params.lse + at);
        let has_dlse = params.dlse.ne(0_u64);
        let from = has_dlse.select(params.dlse, params.lse);
        let dlse = has_dlse.select(b.load::<F32>(from + at), 0.0);
        // A NaN is not equal to -inf, so it reaches the gradients.
        let sees_none = lse.eq(f32::NEG_INFINITY);
        let shift = sees_none.select(f32::NEG_INFINITY, lse * -std::f32::consts::LOG2_E);
        let shift = there.select(shift, f32::NEG_INFINITY);
        let minus_delta = sees_none.select(0.0, dlse - sum);
        let minus_delta = there.select(minus_delta, 0.0);
        let [batch, head, padded_row] = block.padded_row(row);
        let pair = batch.mad(params.heads, head).mul_wide(params.pairs) + (padded_row >> 1).to_u64();
        let to = params.stats + (pair << 4) + ((padded_row & 1) << 2).to_u64();
        b.store(to, shift);
        b.store(to.at(8), minus_delta);
    }

    /// The index of a row in LSE.
    #[track_caller]
    fn lse_at(&self, row: U32<'k>) -> U64<'k> {
        let Stats { params, block, .. } = self;
        match &params.lse_strides {
            None => block.batch.mad(params.heads, block.head).mul_wide(block.rows) + row.to_u64(),
            Some(strides) => {
                let before = block.batch.to_u64() * strides.batch + block.head.to_u64() * strides.head;
                before + block.in_memory(row).to_u64()
            }
        }
    }

    /// Clears the memory to which tiles add dQ of these rows. A block of rows is also a block of the accumulators.
    #[track_caller]
    fn clear(&self, dq_accum: &DqAccumParams<InKernel<'k>>, rows: &[U32<'k>], lane: U32<'k>) {
        let Stats { builder: b, spec, block, .. } = self;
        let number = dq_accum.number(block.padded_row(block.row));
        if let Cleared::Sums(cols) = spec.cleared {
            dq_accum.block(b, number, cols).clear(b);
        }
        let Some(order) = &dq_accum.in_order else { return };
        order.last(number).clear(b);
        let dq = order.dq.global();
        let (unvisited, used) = (self.unvisited_rows(), block.used);
        let is_cleared = |row: U32<'k>| match block.varlen {
            None => row.lt(unvisited),
            Some(_) => (row.lt(unvisited) | row.ge(used)) & row.lt(block.rows),
        };
        let some = match block.varlen {
            None => block.row.lt(unvisited),
            Some(_) => block.row.lt(unvisited) | (block.row + STATS_ROWS).gt(used),
        };
        b.if_uniform(some, || {
            for &row in rows {
                let to = dq.at([block.batch, block.head, block.in_memory(row)]);
                clear_row(b, spec, is_cleared(row), to, lane);
            }
        });
    }

    /// Number of rows of the sequence that no tile of keys visits. They are the sequence's first rows.
    #[track_caller]
    fn unvisited_rows(&self) -> U32<'k> {
        let Stats { builder: b, spec, params, block } = self;
        match (block.varlen, spec.rows) {
            (Some(VarlenBlock { without_keys, .. }), RowsForm::Varlen { parts, .. }) => {
                let blocks = without_keys & !(parts * STATS_ROWS - 1);
                without_keys.lt(block.used).select(blocks, block.used)
            }
            _ => params.unvisited.unwrap_or_else(|| b.copy(0)),
        }
    }
}

/// Clears a row of dQ if it is `unvisited`; lane l clears chunks l, l + 8, …
#[track_caller]
fn clear_row<'k>(b: &'k Builder, spec: &StatsSpec, unvisited: V<'k, Pred>, row: U64<'k>, lane: U32<'k>) {
    let Cleared::InOrder(cols) = spec.cleared else { return };
    let chunks = cols / CHUNK;
    let at = lane.mad_wide(16, row);
    for turn in 0..chunks.div_ceil(LANES) {
        let writes = unvisited & (lane + turn * LANES).lt(chunks);
        b.guarded(writes, || b.store_vector(at.at((16 * LANES * turn) as i32), [0_u32; 4]));
    }
}

/// A thread's part of a row of O and of dO, as packed pairs of elements: lane l has the chunks l, l + 8, …
struct Chunks<'k>(Vec<[[Var<'k, B32>; 4]; 2]>);

impl<'k> Chunks<'k> {
    /// Begins to load the chunks of rows of O and dO at the addresses `rows`. Chunks beyond the end of a row are zeros.
    #[track_caller]
    fn load(b: &'k Builder, spec: &StatsSpec, rows: [U64<'k>; 2], lane: U32<'k>) -> Chunks<'k> {
        let chunks = spec.head_dim_v / CHUNK;
        let load = |turn: u32| {
            let chunk = lane + turn * LANES;
            rows.map(|row| {
                let words = [(); 4].map(|()| b.var("chunk", 0));
                let at = chunk.mad_wide(16, row);
                let load = || {
                    let loaded = b.load_vector::<B32, 4>(at);
                    words.iter().zip(loaded).for_each(|(word, loaded)| word.set(loaded));
                };
                if (turn + 1) * LANES <= chunks {
                    load()
                } else {
                    b.if_lanes(chunk.lt(chunks), load)
                }
                words
            })
        };
        Chunks((0..chunks.div_ceil(LANES)).map(load).collect())
    }

    /// The sum of the products of O and dO.
    #[track_caller]
    fn dot(&self, b: &'k Builder, elem: Elem) -> V<'k, F32> {
        let Chunks(chunks) = self;
        let words = chunks.iter().flat_map(|[o, dout]| o.iter().zip(dout));
        words.fold(b.copy(0.0), |sum, (o, dout)| {
            let [o, dout] = [o, dout].map(|word| unpacked(elem, word.now()));
            o[1].fma(dout[1], o[0].fma(dout[0], sum))
        })
    }
}
