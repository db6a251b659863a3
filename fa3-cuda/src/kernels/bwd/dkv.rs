//! Computes dK and dV. A CTA has a tile of keys. For each query head that shares the tile's head of K and V, it walks
//! over the blocks of rows that see these keys. `A3:n` marks line n of the paper's Algorithm 3.

mod blocks;
mod columns;
mod dq;
mod elements;
mod epilogue;
mod in_order;
mod order;
mod producer;
mod split_gradients;
mod split_m;
mod split_n;
mod state;
mod writer;

use fa3_ir::lang::*;
use fa3_sched::backward::{Division, DkvTile};

use self::state::{Adding, Dkv};
use super::params::{DkvParams, Inputs, stats_tile};
use super::spec::PartSpec;
use crate::kernels::params::{Declare, Form};
use crate::kernels::parts::intervals::{FINDER, IntervalRows, TilesUnderIntervals};
use crate::kernels::parts::tile_scheduler::TileScheduler;
use crate::kernels::parts::tma_pipeline::TmaPipeline;

pub(super) fn kernel(spec: &PartSpec<DkvTile>) -> Kernel {
    let tile = &spec.tile;
    Kernel::build("bwd_dkv", Launch::threads(tile.threads()), |b| {
        let mut params = DkvParams::<Form>::form(spec).pass(&mut Declare(b));
        let lookup = params.inputs.lookup;
        let adding = params.dq_accum.take().map(|dq_accum| Adding::declare(b, spec, &lookup, dq_accum));
        let (warps, inputs) = (4 * tile.consumers(), &params.inputs);
        let of_one = match tile.division {
            Division::Keys => warps,
            Division::Gradients => 4,
        };
        let [q, dout] = [inputs.q.shape(), inputs.dout.shape()];
        let rows = [("q", q), ("stats", stats_tile(tile.tile_m)), ("dout", dout)];
        let walkers = warps + writer::warps(tile);
        let of_table = params.summaries.map(|of| TilesUnderIntervals::KeysOfTable(of, params.group));
        let of_blocks = inputs.intervals.and_then(IntervalRows::blocks);
        let of_blocks = of_blocks.map(|rows| TilesUnderIntervals::KeysOfBlocks(rows, params.group));
        let of = params.tiles.map(TilesUnderIntervals::Keys).or(of_table).or(of_blocks);
        let of = of.map(|of| (of, [tile.tile_n, tile.tile_m]));
        let Inputs { lookup, tile_counter, .. } = inputs;
        let scheduler = TileScheduler::declare(b, spec.scheduler, lookup, *tile_counter, of, walkers);
        let dkv = Dkv {
            builder: b,
            spec: spec.clone(),
            // A3:4, the pipelines
            k: TmaPipeline::declare(b, "k", inputs.k, [tile.kv_stages, of_one]),
            v: TmaPipeline::declare(b, "v", inputs.v, [tile.kv_stages, of_one]),
            rows: b.pipeline("rows", tile.stages, warps, rows),
            scheduler: if tile.adds_in_order() { scheduler.in_order() } else { scheduler },
            params,
        };
        let weights = match tile.division {
            Division::Keys => None,
            Division::Gradients => Some(split_gradients::WeightsPipeline::declare(b, tile)),
        };
        b.init_mbarriers();
        b.launch_dependents();
        b.grid_dependency_wait();
        let [producer, registers] = tile.registers();
        b.role(Role::new("producer", 0..4).registers(producer), || {
            match spec.mask.intervals() {
                None => dkv.load(), // A3:5-6
                Some(_) => {
                    let warp = (b.tid() >> 5).shfl_idx(0);
                    b.if_uniform(warp.eq(0), || dkv.load_in_warp());
                    b.if_uniform(warp.eq(FINDER), || dkv.scheduler.find());
                }
            }
            if let Some(adding) = &adding {
                writer::run(&dkv, adding);
            }
        });
        let consumer = || Role::new("consumer", 4..4 + warps).registers(registers);
        match (&weights, &adding) {
            (None, Some(adding)) if tile.adds_halves() => b.role(consumer(), || split_m::run(&dkv, adding)),
            (None, adding) => b.role(consumer(), || split_n::run(&dkv, adding.as_ref())),
            (Some(weights), _) => {
                b.role(Role::new("dv", 4..8).registers(registers), || split_gradients::run_dv(&dkv, weights));
                b.role(Role::new("dk", 8..12).registers(registers), || {
                    split_gradients::run_dk(&dkv, weights)
                });
            }
        }
    })
}
