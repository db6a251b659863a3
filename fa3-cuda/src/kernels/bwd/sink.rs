//! The gradient of sinks: dsink = Σ exp(sink - LSE) · (dLSE - D) over the rows of a query head, of all sequences.
//!
//! Both are in the row statistics, -LSE in base 2 and -D, which has dLSE in it. A row that is not there, or that sees
//! no key beside a sink of -inf, has -inf and 0: it gives 0.
//!
//! A CTA has a head. Its warps take blocks of rows in turn, and the order of additions is always the same.

use fa3_ir::lang::*;
use fa3_ir::{BufferRole, Program};
use fa3_sched::backward::{Plan, STATS_ROWS};
use fa3_sched::{Decoder, Order, Tile, TileCounts};

use super::BwdSpec;
use super::program::pairs;
use crate::kernels::params::{Declare, Fill, Form, Host, Pass, Side, param, params};
use crate::kernels::{Spec, tensors};

const WARPS: u32 = 32;
const _: () = assert!(STATS_ROWS == 2 * 32, "a lane has a pair of rows");

params! {
    /// The parameters of the kernel.
    struct SinkParams {
        sink: pointer,
        stats: pointer,
        dsink: pointer,
        /// Query heads.
        heads: u32,
        /// Pairs of rows of a head.
        pairs: u32,
        /// Blocks of rows of a head, of all sequences.
        blocks: u32,
        /// Which they are.
        decoder: decoder,
    }
}

impl SinkParams<Form> {
    fn form() -> SinkParams<Form> {
        let [sink, stats, dsink] = [Elem::F32; 3];
        let decoder = Form::decoder(Order::Linear);
        SinkParams { sink, stats, dsink, heads: (), pairs: (), blocks: (), decoder }
    }
}

/// The kernel.
pub(super) fn kernel() -> Kernel {
    Kernel::build("bwd_sink", Launch::threads(32 * WARPS), |b| {
        let params = SinkParams::<Form>::form().pass(&mut Declare(b));
        let (parts, stored) = (b.region("parts", 4 * WARPS, 16), b.barrier("parts", 32 * WARPS));
        b.launch_dependents();
        b.grid_dependency_wait();

        let (head, warp, lane) = (b.cta_x(), (b.tid() >> 5).shfl_idx(0), b.lane_id());
        let sink = b.load::<F32>(head.mad_wide(4, params.sink)) * std::f32::consts::LOG2_E;
        let sum = b.var("sum", 0.0);
        b.for_each((warp, params.blocks), WARPS, |block| {
            let Tile { m_block, batch, .. } = params.decoder.decode(block);
            let pair = m_block.mad(32, lane);
            b.if_lanes(pair.lt(params.pairs), || {
                let at = batch.mad(params.heads, head).mul_wide(params.pairs) + pair.to_u64();
                let [upper, lower, minus_d_upper, minus_d_lower] =
                    b.load_vector::<F32, 4>(params.stats + (at << 4));
                for (shift, minus_d) in [(upper, minus_d_upper), (lower, minus_d_lower)] {
                    sum.update(|sum| (sink + shift).ex2().fma(minus_d, sum));
                }
            });
        });

        let parts = b.address(parts);
        let part = over_warp(sum.get());
        b.once_per_warp(|| b.store(warp.mad(4, parts), part));
        b.sync(stored);
        b.if_uniform(warp.eq(0), || {
            let sum = over_warp(b.load::<F32>(lane.mad(4, parts)));
            b.once_per_warp(|| b.store(head.mad_wide(4, params.dsink), sum));
        });
    })
}

/// The sum of a number over the lanes of a warp, in all of them.
#[track_caller]
fn over_warp(x: V<'_, F32>) -> V<'_, F32> {
    [16, 8, 4, 2, 1].into_iter().fold(x, |x, lanes| x + x.shfl_bfly(lanes))
}

/// Adds the sinks, their gradient, and the step that computes it.
pub(super) fn step(program: &mut Program<Spec>, plan: &Plan) {
    let (problem, forward) = (plan.problem(), plan.problem().forward());
    let (Some(sink), Some(stats)) = (tensors::sink(program, forward), program.find("stats")) else { return };
    let heads = forward.heads().q() as u32;
    let dsink = program.buffer("dsink", Elem::F32, &[heads], BufferRole::Output);
    program.align(dsink, 4);
    let rows = forward.q().shape;
    let m_blocks = (rows.seqlen as u32).div_ceil(STATS_ROWS);
    // There are as many row statistics of each head, which the plan has numbered.
    let counts = TileCounts { m_blocks, heads: 1, batch: rows.batch as u32 };
    let blocks = counts.tiles() as u32;
    let decoder = Decoder::new(if blocks > 0 { counts } else { TileCounts::ONE }, Order::Linear);
    let params = SinkParams::<Host> { sink, stats, dsink, heads, pairs: pairs(problem), blocks, decoder };
    program.step(BwdSpec::Sink.into(), [heads, 1, 1], Fill::args(|by| _ = params.pass(by)));
}
