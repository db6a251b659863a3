//! Computes dQ. A CTA has a tile of rows and walks over the KV blocks that these rows see, as the forward pass does.

use fa3_ir::lang::*;
use fa3_sched::backward::DqTile;
use fa3_types::ScoreRows;

use super::elements::{Elements, ds};
use super::gradients::{registers, write_tile};
use super::hidden::{Hidden, visible};
use super::params::{DqParams, Inputs};
use super::spec::PartSpec;
use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::{FINDER, TilesUnderIntervals};
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::score::{ThreadRows, TileFunction};
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::{Keys, TmaPipeline};
use crate::kernels::parts::visible::Position;

/// State that the roles share.
struct Dq<'k> {
    builder: &'k Builder,
    spec: PartSpec<DqTile>,
    params: DqParams<InKernel<'k>>,
    q: TmaPipeline<'k>,
    dout: TmaPipeline<'k>,
    k: TmaPipeline<'k>,
    v: TmaPipeline<'k>,
    scheduler: TileScheduler<'k>,
}

pub(super) fn kernel(spec: &PartSpec<DqTile>) -> Kernel {
    let tile = &spec.tile;
    Kernel::build("bwd_dq", Launch::threads(tile.threads()), |b| {
        let params = DqParams::<Form>::form(spec).pass(&mut Declare(b));
        let (warps, inputs) = (4 * tile.consumers(), &params.inputs);
        let dq = Dq {
            builder: b,
            spec: spec.clone(),
            q: TmaPipeline::declare(b, "q", inputs.q, [1, warps]),
            dout: TmaPipeline::declare(b, "dout", inputs.dout, [1, warps]),
            k: TmaPipeline::declare(b, "k", inputs.k, [tile.k_stages, warps]),
            v: TmaPipeline::declare(b, "v", inputs.v, [tile.v_stages, warps]),
            scheduler: {
                let Inputs { lookup, tile_counter, intervals, .. } = inputs;
                let of = intervals.map(|rows| (TilesUnderIntervals::Rows(rows), [tile.tile_m, tile.tile_n]));
                TileScheduler::declare(b, spec.scheduler, lookup, *tile_counter, of, warps)
            },
            params,
        };
        b.init_mbarriers();
        b.launch_dependents();
        b.grid_dependency_wait();
        let [producer, consumer] = tile.registers();
        b.role(Role::new("producer", 0..4).registers(producer), || match spec.mask.intervals() {
            None => dq.load(),
            Some(_) => {
                let warp = (b.tid() >> 5).shfl_idx(0);
                b.if_uniform(warp.eq(0), || dq.load_in_warp());
                b.if_uniform(warp.eq(FINDER), || dq.scheduler.find());
            }
        });
        b.role(Role::new("consumer", 4..4 + warps).registers(consumer), || dq.consume());
    })
}

impl<'k> Dq<'k> {
    /// Runs the producer, in one thread.
    fn load(&self) {
        let b = self.builder;
        b.once_per_role(|| {
            let (mut q, mut dout) = (self.q.producer(), self.dout.producer());
            let (mut k, mut v) = (self.k.producer(), self.v.producer());
            let keys = self.spec.tile.tile_n;
            self.scheduler.begin().produce(|work, again, fetch_next| {
                let WorkTile { head, kv_head, row, kv, .. } = work;
                let [of_q, of_dout] = self.params.inputs.rows(&work, TilesOf::Rows);
                b.if_uniform(kv.first.lt(kv.end), || {
                    q.load(head, row, of_q);
                    dout.load(head, row, of_dout);
                    let (first, last) = (kv.first * keys, kv.end * keys - keys);
                    b.for_each((0, last - first + 1), keys, |loaded| {
                        let work = again();
                        let [of_k, of_v] = self.params.inputs.keys(&work, TilesOf::Rows);
                        k.load(kv_head, last - loaded, of_k);
                        v.load(kv_head, last - loaded, of_v);
                    });
                });
                fetch_next();
            });
        });
    }

    /// Runs the producer under a mask of intervals, in a warp. Another warp finds the KV blocks that a tile's rows see.
    fn load_in_warp(&self) {
        let (b, spec) = (self.builder, &self.spec);
        let (mut q, mut dout) = (self.q.producer(), self.dout.producer());
        let (mut k, mut v) = (self.k.producer(), self.v.producer());
        self.scheduler.begin().produce(|work, _, fetch_next| {
            let WorkTile { head, kv_head, row, kv, .. } = work;
            let [of_q, of_dout] = self.params.inputs.rows(&work, TilesOf::Rows).map(Keys::Of);
            let [of_k, of_v] = self.params.inputs.keys(&work, TilesOf::Rows).map(Keys::Of);
            let blocks = KvBlocks::of(b, kv, spec.tile.tile_n, spec.mask).in_ranges(work.ranges, spec.mask);
            b.if_uniform(kv.first.lt(kv.end), || {
                q.load_in_warp(head, row, &of_q);
                dout.load_in_warp(head, row, &of_dout);
                blocks.for_each_unmasked(0, |block| {
                    k.load_in_warp(kv_head, block.key, &of_k);
                    v.load_in_warp(kv_head, block.key, &of_v);
                });
            });
            fetch_next();
        });
    }

    /// Runs a consumer: 64 rows of dQ, one KV block after another.
    fn consume(&self) {
        let (b, spec, params) = (self.builder, &self.spec, &self.params);
        let (inputs, me) = (&params.inputs, b.warpgroup());
        let (mut q, mut dout) = (self.q.consumer(), self.dout.consumer());
        let (mut k, mut v) = (self.k.consumer(), self.v.consumer());
        self.scheduler.consume(|work, again| {
            let row = work.row + me.mad(64, b.frag_row());
            let (shift, minus_delta) = self.stats(&work, row);
            let mut dq = Chain::onto(Frag::zeros(b, spec.tile.head_dim));
            let visits = work.kv.first.lt(work.kv.end);
            let blocks = KvBlocks::of(b, work.kv, spec.tile.tile_n, spec.mask);
            let blocks = blocks.in_ranges(work.ranges, spec.mask);
            b.if_uniform(visits, || {
                let (q_stage, dout_stage) = (q.wait(), dout.wait());
                let [q, dout] = [&q_stage, &dout_stage].map(|stage| stage.tile().row_block(me, 64));
                let mut read = k.held();
                let function = self.function(&work, row);
                blocks.for_each(0, |block| {
                    // The scores are issued while dQ of the previous block is in flight.
                    let k = k.wait();
                    let s = gemm(q, k.tile().t(), Fresh);
                    let v = v.wait();
                    let dp = gemm(dout, v.tile().t(), Fresh);
                    let mut s = s.wait();
                    read.release();
                    let visible = || visible(b, inputs, &work, spec.mask, [row, block.key]);
                    let function = function.as_ref().map(|function| function.block(block.key));
                    let hidden = block.masked.then(|| Hidden::Rows(visible()));
                    let elements = Elements::new(inputs, function, hidden);
                    s.map_in_place(|product, at| elements.of(product, shift[at], at).weight());
                    let dp = dp.wait();
                    v.release();
                    let weights = registers(&s);
                    let ty = spec.product_type();
                    let ds = dp.map_to_a(ty, |dp, at| ds(dp + minus_delta[at], weights[at.index()]));
                    dq.gemm(&ds, k.tile());
                    read.hold(k);
                });
                dq.wait_all();
                read.release();
                q_stage.release();
                dout_stage.release();
            });
            let (work, scale) = (again(), Some(inputs.softmax_scale));
            let format = (spec.elem, spec.head_dim);
            write_tile(dq.wait(), scale, &params.dq, &work, (row, spec.tile.tile_m), format);
        });
    }

    /// The function of the scores of a work tile, if there is one, for a thread whose rows are `row` and `row` + 8.
    #[track_caller]
    fn function(&self, work: &WorkTile<'k>, row: U32<'k>) -> Option<TileFunction<'k>> {
        let of = self.spec.score.as_ref().zip(self.params.inputs.score.as_ref())?;
        let (sequence, lens, of_tile) = (work.batch, work.lens, work.head);
        let (head, position) = (move |_| of_tile, move |half: Half| Position(row + half.rows()));
        let rows = ThreadRows { sequence, lens, head: Box::new(head), position: Box::new(position) };
        Some(TileFunction::with_slope(self.builder, of, rows, ScoreRows::OfHead))
    }

    /// Loads -LSE (base 2) and -D of the thread's rows. Row indices are clamped to the last valid row.
    #[track_caller]
    fn stats(&self, work: &WorkTile<'k>, row: U32<'k>) -> (Rows<'k>, Rows<'k>) {
        let (b, params) = (self.builder, &self.params);
        let last = work.lens.q - 1;
        // With a table, the arrays of statistics are padded, so that every row of a tile has statistics.
        let padded_row = work.varlen.and_then(|varlen| varlen.padded_row);
        let of_head = match padded_row {
            None => work.batch.mad(params.heads, work.head),
            Some(_) => work.head,
        };
        let of_head = of_head.mul_wide(params.pairs);
        let [upper, lower] = Half::BOTH.map(|half| {
            let row = match padded_row {
                None => (row + half.rows()).min(last),
                Some(padded_row) => padded_row + row + half.rows(),
            };
            let at = params.stats + ((of_head + (row >> 1).to_u64()) << 4) + ((row & 1) << 2).to_u64();
            [b.load::<F32>(at), b.load::<F32>(at.at(8))]
        });
        (Rows([upper[0], lower[0]]), Rows([upper[1], lower[1]]))
    }
}
