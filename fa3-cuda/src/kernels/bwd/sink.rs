//! The gradient of sinks: dsink = Σ exp(sink - LSE) · (dLSE - D) over the rows of a query head, in all sequences.
//!
//! Both factors come from the row statistics: -LSE in base 2, and -D, which includes dLSE. A missing row, a padding
//! row, and a row that sees no key and has a sink of -inf have statistics of -inf and 0, and contribute 0.
//!
//! Each query head has a CTA. The CTA's warps take blocks of rows in turn, and the order of additions is fixed.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};
use fa3_sched::backward::{Plan, PlanKind, STATS_ROWS};
use fa3_sched::{Decoder, Order, TileCoord, TileCounts};

use super::scratch::{Scratch, pairs};
use super::spec::BwdSpec;
use crate::kernels::params::{Declare, Fill, Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::over_warp::over_warp;
use crate::kernels::{Spec, tensors};

const WARPS: u32 = 32;
const _: () = assert!(STATS_ROWS == 2 * 32, "a lane has a pair of rows");

params! {
    struct SinkParams {
        sink: pointer,
        stats: pointer,
        dsink: pointer,
        /// Number of query heads.
        heads: u32,
        /// Number of pairs of rows of a head.
        pairs: u32,
        equal: maybe all DenseBlocks,
        listed: maybe all VarlenBlocks,
    }

    /// The blocks of rows of a head, in sequences of one length.
    struct DenseBlocks {
        /// Number of a head's blocks, in all sequences.
        blocks: u32,
        decoder: numbers Decoder,
    }

    /// The blocks of rows of a head, in padded arrays. The table of sequences has the number of blocks.
    struct VarlenBlocks {
        table: pointer,
        /// Number of statistics blocks in a block of the table.
        parts: u32,
    }
}

impl SinkParams<Form> {
    fn form(sequences: SequenceForm) -> SinkParams<Form> {
        let [sink, stats, dsink] = [Elem::F32; 3];
        let (equal, listed) = match sequences {
            SequenceForm::Dense => {
                (Some(DenseBlocks { blocks: (), decoder: Form::decoder(Order::Linear) }), None)
            }
            SequenceForm::Varlen => (None, Some(VarlenBlocks { table: Elem::U32, parts: () })),
        };
        SinkParams { sink, stats, dsink, heads: (), pairs: (), equal, listed }
    }
}

impl<'k> SinkParams<InKernel<'k>> {
    /// Number of blocks of rows of a head.
    #[track_caller]
    fn blocks(&self, b: &'k Builder) -> U32<'k> {
        match (&self.equal, &self.listed) {
            (Some(equal), _) => equal.blocks,
            (None, Some(listed)) => b.load::<B32>(listed.table) * listed.parts,
            (None, None) => b.copy(0),
        }
    }

    /// The index of a block's sequence in the array of statistics, and the block's index in that sequence.
    #[track_caller]
    fn place(&self, block: U32<'k>) -> [U32<'k>; 2] {
        match &self.equal {
            None => [block.constant(0), block],
            Some(equal) => {
                let TileCoord { m_block, batch, .. } = equal.decoder.decode(block);
                [batch, m_block]
            }
        }
    }
}

pub(super) fn kernel(sequences: SequenceForm) -> Kernel {
    Kernel::build("bwd_sink", Launch::threads(32 * WARPS), |b| {
        let params = SinkParams::<Form>::form(sequences).pass(&mut Declare(b));
        let (parts, stored) = (b.region("parts", 4 * WARPS, 16), b.barrier("parts", 32 * WARPS));
        b.launch_dependents();
        b.grid_dependency_wait();

        let (head, warp, lane) = (b.cta_x(), (b.tid() >> 5).shfl_idx(0), b.lane_id());
        let sink = b.load::<F32>(head.mad_wide(4, params.sink)) * std::f32::consts::LOG2_E;
        let sum = b.var("sum", 0.0);
        b.for_each((warp, params.blocks(b)), WARPS, |block| {
            let [batch, m_block] = params.place(block);
            let pair = m_block.mad(32, lane);
            let add = || {
                let at = batch.mad(params.heads, head).mul_wide(params.pairs) + pair.to_u64();
                let [upper, lower, minus_d_upper, minus_d_lower] =
                    b.load_vector::<F32, 4>(params.stats + (at << 4));
                for (shift, minus_d) in [(upper, minus_d_upper), (lower, minus_d_lower)] {
                    // LSE is not below the sink, but for rounding. The difference of two infinities, a NaN, becomes 0.
                    sum.update(|sum| (sink + shift).min(0.0).ex2().fma(minus_d, sum));
                }
            };
            // With a table, the arrays of statistics are padded, so that every row of a block has statistics.
            match sequences {
                SequenceForm::Dense => b.if_lanes(pair.lt(params.pairs), add),
                SequenceForm::Varlen => add(),
            }
        });

        let parts = b.address(parts);
        let part = over_warp(sum.get(), |x, y| x + y);
        b.once_per_warp(|| b.store(warp.mad(4, parts), part));
        b.sync(stored);
        b.if_uniform(warp.eq(0), || {
            let sum = over_warp(b.load::<F32>(lane.mad(4, parts)), |x, y| x + y);
            b.once_per_warp(|| b.store(head.mad_wide(4, params.dsink), sum));
        });
    })
}

/// Adds the buffers of sinks and of their gradient, and the step that computes the gradient.
pub(super) fn step(program: &mut Program<Spec>, plan: &Plan, scratch: &Scratch) {
    let forward = plan.problem().forward();
    let Some(sink) = tensors::sink(program, forward) else { return };
    let heads = forward.heads().q() as u32;
    let dsink = program.buffer("dsink", Elem::F32, &[heads], BufferRole::Output);
    program.align(dsink, 4);
    let (equal, listed) = match plan.kind() {
        PlanKind::Dense(tiles) => {
            let m_blocks = tiles.lens().q.div_ceil(STATS_ROWS);
            // Every head has the same number of blocks, so the decoder counts the blocks of one head.
            let counts = TileCounts { m_blocks, heads: 1, batch: forward.batch() as u32 };
            let blocks = counts.tiles() as u32;
            let decoder = Decoder::new(if blocks > 0 { counts } else { TileCounts::ONE }, Order::Linear);
            (Some(DenseBlocks { blocks, decoder }), None)
        }
        PlanKind::Varlen(tiles) => {
            let parts = tiles.block_rows() / STATS_ROWS;
            (None, scratch.tables.map(|tables| VarlenBlocks { table: tables.rows, parts }))
        }
    };
    let params =
        SinkParams::<Host> { sink, stats: scratch.stats, dsink, heads, pairs: pairs(plan), equal, listed };
    program.step(BwdSpec::sink(plan).into(), [heads, 1, 1], Fill::args(|by| _ = params.pass(by)));
}
