//! Two consumers that share the gradients of the same 64 keys, where one warpgroup cannot hold both dK and dV. The
//! first computes Pᵀ and dV, and the second computes dSᵀ and dK. The weights by which dPᵀ - D is multiplied pass from
//! the first to the second through shared memory, from each thread to the thread of equal index.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use super::columns::{Stat, StatColumns};
use super::state::Dkv;
use crate::kernels::bwd::gradients::{places_of_registers, registers_tile, store_registers};

/// The pipeline of weights from the first consumer to the second.
pub(super) struct WeightsPipeline<'k>(Pipeline<'k, 1>);

impl<'k> WeightsPipeline<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, tile: &DkvTile) -> WeightsPipeline<'k> {
        let shape = registers_tile(tile.tile_m);
        WeightsPipeline(b.stored_pipeline("weights", 1, [4, 4], [("weights", shape)]))
    }
}

/// Runs the first consumer, which computes dV.
pub(super) fn run_dv<'k>(dkv: &Dkv<'k>, weights: &WeightsPipeline<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let (mut k, mut weights) = (dkv.k.consumer(), weights.0.producer());
    let mut rows = dkv.rows.consumer();
    dkv.scheduler.consume(|work, again| {
        let key = work.row + b.frag_row();
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v);
        b.if_uniform(dkv.visits(&work), || {
            let k = k.wait();
            let of_head = |head| dkv.tile_head(&work, key, head);
            dkv.for_each_block(&work, of_head, |of, block| {
                let rows = rows.wait();
                let [q, stats, dout] = rows.tiles();
                let s = gemm(k.tile(), q.t(), Fresh);
                let shifts = StatColumns::load(b, stats, Stat::Shift);
                let mut s = s.wait();
                let p = dkv.p(&mut s, &shifts, &dkv.elements(&work, of, &block));
                let more = gemm(&p, dout, &mut dv);
                let stage = weights.acquire();
                let [to] = stage.tiles();
                store_registers(&s, to);
                stage.commit_unfenced();
                more.wait();
                // The second consumer fences once it has the weights. That fence covers these loads of statistics, too.
                rows.release_unfenced();
            });
            k.release();
        });
        dkv.write_dv(dv, &again(), key);
    });
}

/// Runs the second consumer, which computes dK.
pub(super) fn run_dk<'k>(dkv: &Dkv<'k>, weights: &WeightsPipeline<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let (mut v, mut weights) = (dkv.v.consumer(), weights.0.consumer());
    let mut rows = dkv.rows.consumer();
    dkv.scheduler.consume(|work, again| {
        let key = work.row + b.frag_row();
        let mut dk = Frag::zeros(b, spec.tile.head_dim);
        b.if_uniform(dkv.visits(&work), || {
            let v = v.wait();
            dkv.for_each_block(
                &work,
                |_| (),
                |(), _| {
                    let rows = rows.wait();
                    let [q, stats, dout] = rows.tiles();
                    let minus_delta = StatColumns::load(b, stats, Stat::MinusDelta).frag(b);
                    let dp = gemm(v.tile(), dout.t(), minus_delta).wait();
                    let stage = weights.wait();
                    let groups = places_of_registers(b, stage.tile());
                    let given: Vec<V<'_, F32>> = groups.flat_map(|at| b.load_vector::<F32, 4>(at)).collect();
                    stage.release_unfenced();
                    let ds = dkv.ds(&dp, &given);
                    gemm(&ds, q, &mut dk).wait();
                    rows.release_loaded();
                },
            );
            v.release();
        });
        dkv.write_dk(dk, &again(), key);
    });
}
