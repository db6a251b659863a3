//! Computes dQ. A CTA has a tile of rows and walks over the KV blocks that these rows see, as the forward pass does.

use fa3_ir::lang::*;
use fa3_sched::KvRange;
use fa3_sched::backward::DqTile;
use fa3_types::ScoreRows;

use super::elements::{Elements, ds};
use super::gradients::{registers, write_tile};
use super::hidden::{Hidden, visible};
use super::params::{DqParams, Inputs};
use super::read_sums::RowSums;
use super::spec::PartSpec;
use crate::kernels::packed::TilesOf;
use crate::kernels::params::{Declare, Form, InKernel};
use crate::kernels::parts::block_words::BlockWords;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::intervals::{FINDER, IntervalRows, TilesUnderIntervals};
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::score::{ThreadRows, TileFunction};
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::{Keys, TmaPipeline, TmaProducer};
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
                let of = intervals.and_then(IntervalRows::bounds);
                let of = of.map(|rows| (TilesUnderIntervals::Rows(rows), [tile.tile_m, tile.tile_n]));
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
            Some(form) if form.are_blocks() => b.once_per_role(|| dq.load_ranges(false)),
            Some(_) => {
                let warp = (b.tid() >> 5).shfl_idx(0);
                b.if_uniform(warp.eq(0), || dq.load_ranges(true));
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

    /// Runs the producer under a mask of intervals: in a warp, if another warp finds the KV blocks that a tile's rows
    /// see, or in one thread, if bits show them.
    fn load_ranges(&self, in_warp: bool) {
        let load = |tensor: &mut TmaProducer<'k>, head, row, of| match in_warp {
            true => tensor.load_in_warp(head, row, &Keys::Of(of)),
            false => tensor.load(head, row, of),
        };
        let (mut q, mut dout) = (self.q.producer(), self.dout.producer());
        let (mut k, mut v) = (self.k.producer(), self.v.producer());
        self.scheduler.begin().produce(|work, _, fetch_next| {
            let WorkTile { head, kv_head, row, .. } = work;
            let [of_q, of_dout] = self.params.inputs.rows(&work, TilesOf::Rows);
            let [of_k, of_v] = self.params.inputs.keys(&work, TilesOf::Rows);
            let (kv, words) = self.listed(&work, in_warp, None);
            let blocks = self.blocks(&work, kv, words);
            self.builder.if_uniform(kv.first.lt(kv.end), || {
                load(&mut q, head, row, of_q);
                load(&mut dout, head, row, of_dout);
                blocks.for_each_unmasked(0, |block| {
                    load(&mut k, kv_head, block.key, of_k);
                    load(&mut v, kv_head, block.key, of_v);
                });
            });
            fetch_next();
        });
    }

    /// The range of KV blocks that a work tile visits, and the words that show which of them, if words do, and which of
    /// them consumer `me` sees. All lanes of a warp call this, or one thread.
    #[track_caller]
    fn listed(
        &self,
        work: &WorkTile<'k>,
        in_warp: bool,
        me: Option<U32<'k>>,
    ) -> (KvRange<U32<'k>>, Option<BlockWords<'k>>) {
        let (rows, tile) = (self.params.inputs.intervals.and_then(IntervalRows::blocks), &self.spec.tile);
        let words = rows
            .and_then(|rows| rows.block_words(self.builder, work, [tile.tile_m, tile.tile_n], in_warp, me));
        let KvRange { first, end, .. } = work.kv;
        let end = words.map_or(end, |words| words.last_end(end, first));
        (KvRange { end, ..work.kv }, words)
    }

    /// The KV blocks that a work tile visits, given the results of [`Dq::listed`].
    #[track_caller]
    fn blocks(
        &self,
        work: &WorkTile<'k>,
        kv: KvRange<U32<'k>>,
        words: Option<BlockWords<'k>>,
    ) -> KvBlocks<'k> {
        let (mask, keys) = (self.spec.mask, self.spec.tile.tile_n);
        KvBlocks::of(self.builder, kv, keys, mask).in_ranges(work.ranges, mask).with_words(words)
    }

    /// Runs a consumer: 64 rows of dQ, one KV block after another.
    fn consume(&self) {
        let (b, spec, params) = (self.builder, &self.spec, &self.params);
        let (inputs, me) = (&params.inputs, b.warpgroup());
        let (mut q, mut dout) = (self.q.consumer(), self.dout.consumer());
        let (mut k, mut v) = (self.k.consumer(), self.v.consumer());
        self.scheduler.consume(|work, again| {
            let row = work.row + me.mad(64, b.frag_row());
            let [shift, minus_delta] = params.stats.of_rows(b, &work, row);
            let mut dq = Chain::onto(Frag::zeros(b, spec.tile.head_dim));
            let (kv, words) = self.listed(&work, true, Some(me));
            let (visits, lists_are_own) = (kv.first.lt(kv.end), words.is_some_and(BlockWords::are_own));
            let blocks = self.blocks(&work, kv, words);
            let sums = RowSums::new(b, spec, params, &work, row);
            b.if_uniform(visits, || {
                let (q_stage, dout_stage) = (q.wait(), dout.wait());
                let [q, dout] = [&q_stage, &dout_stage].map(|stage| stage.tile().row_block(me, 64));
                let mut read = k.held();
                let function = self.function(&work, row);
                blocks.for_each(0, |block| {
                    // The scores are issued while dQ of the previous block is in flight.
                    let k = k.wait();
                    let mut multiply = || {
                        let s = gemm(q, k.tile().t(), Fresh);
                        let v = v.wait();
                        let dp = gemm(dout, v.tile().t(), Fresh);
                        let mut s = s.wait();
                        if !lists_are_own {
                            read.release();
                        }
                        let visible = || visible(b, inputs, &work, spec.mask, [row, block.key]);
                        let function = function.as_ref().map(|function| function.block(block.key));
                        let hidden = block.masked.then(|| Hidden::Rows(visible()));
                        let elements = Elements::new(inputs, function, hidden);
                        // Sums of reads need both P and the weight, which would take registers until dP comes.
                        if sums.is_none() {
                            s.map_in_place(|product, at| elements.of(product, shift[at], at).weight());
                        }
                        let dp = dp.wait();
                        v.release();
                        let kept = registers(&s);
                        let ty = spec.product_type();
                        let ds = dp.map_to_a(ty, |dp, at| {
                            let (kept, difference) = (kept[at.index()], dp + minus_delta[at]);
                            let Some(sums) = &sums else { return ds(difference, kept) };
                            let element = elements.of(kept, shift[at], at);
                            sums.add(ds(difference, element.p), elements.slopes_by_reads(element, at), at);
                            ds(difference, element.weight())
                        });
                        if let Some(sums) = &sums {
                            sums.end_block(block.key);
                        }
                        dq.gemm(&ds, k.tile());
                    };
                    let Some(own) = block.own else {
                        multiply();
                        return read.hold(k);
                    };
                    // A consumer holds no stage while it passes over blocks that another one sees.
                    b.if_uniform(own, multiply);
                    b.if_uniform(!own, || v.wait().release());
                    dq.wait_all();
                    k.release();
                });
                dq.wait_all();
                if !lists_are_own {
                    read.release();
                }
                q_stage.release();
                dout_stage.release();
            });
            let (work, scale) = (again(), Some(inputs.softmax_scale));
            if let Some((sums, to)) = sums.zip(params.sums) {
                sums.store(b, (&to, params.stats.heads), &work, row);
            }
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
        let gradients = self.spec.gradients;
        Some(TileFunction::with_slopes(self.builder, of, gradients, rows, ScoreRows::OfHead))
    }
}
