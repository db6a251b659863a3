//! Two consumers that share out the gradients of the same 64 keys, where one cannot hold both: the first computes Pᵀ and
//! dV, the second dSᵀ and dK. What dPᵀ - D is multiplied by passes from the first to the second in shared memory, each
//! register from a thread to the one of the same number.

use fa3_ir::lang::*;
use fa3_sched::backward::DkvTile;

use super::{Columns, Dkv, Stat};
use crate::kernels::bwd::gradients::registers;

/// Threads of a consumer.
const THREADS: u32 = 128;

/// Where numbers pass from one consumer to the other.
pub(super) struct HandOver<'k>(Ring<'k, 1>);

impl<'k> HandOver<'k> {
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, tile: &DkvTile) -> HandOver<'k> {
        // Four registers of a thread are a row.
        let shape = TileShape::new(Elem::F32, tile.tile_n * tile.tile_m / 4, 4);
        HandOver(b.stored_ring("weights", 1, [4, 4], [("weights", shape)]))
    }
}

/// The address of the thread's registers 4 · `group` and on.
#[track_caller]
fn place<'k>(b: &'k Builder, tile: Tile<'_, 'k>) -> impl Fn(usize) -> SharedAddr + use<'k> {
    let first = tile.element(b.tid() & (THREADS - 1), 0);
    move |group| first.at((16 * THREADS * group as u32) as i32)
}

/// The first consumer.
pub(super) fn run_dv<'k>(dkv: &Dkv<'k>, hand_over: &HandOver<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let (mut k, mut weights) = (dkv.k.consumer(), hand_over.0.producer());
    let (mut q, mut dout) = (dkv.q.consumer(), dkv.dout.consumer());
    dkv.tiles.consume(|tile| {
        let work = dkv.params.inputs.geometry.work(tile);
        let key = work.row + b.frag_row();
        let mut dv = Frag::zeros(b, spec.tile.head_dim_v);
        b.if_uniform(dkv.visits(&work), || {
            let k = k.wait();
            dkv.for_each_block(&work, |_, block| {
                let q = q.wait();
                let [q_tile, stats] = q.tiles();
                let s = gemm(k.tile(), q_tile.t(), Fresh);
                let shifts = Columns::load(b, stats, Stat::Shift);
                let mut s = s.wait();
                q.release_loaded();
                let p = dkv.p(&mut s, &shifts, key, &block);
                let dout = dout.wait();
                let more = gemm(&p, dout.tile(), &mut dv);
                let slot = weights.acquire();
                let [to] = slot.tiles();
                let at = place(b, to);
                for (group, four) in registers(&s).chunks_exact(4).enumerate() {
                    b.store_vector(at(group), [four[0], four[1], four[2], four[3]]);
                }
                slot.commit_stored();
                more.wait();
                dout.release();
            });
            k.release();
        });
        dkv.write_dv(dv, &work, key);
    });
}

/// The second consumer.
pub(super) fn run_dk<'k>(dkv: &Dkv<'k>, hand_over: &HandOver<'k>) {
    let (b, spec) = (dkv.builder, &dkv.spec);
    let (mut v, mut weights) = (dkv.v.consumer(), hand_over.0.consumer());
    let (mut q, mut dout) = (dkv.q.consumer(), dkv.dout.consumer());
    dkv.tiles.consume(|tile| {
        let work = dkv.params.inputs.geometry.work(tile);
        let key = work.row + b.frag_row();
        let mut dk = Frag::zeros(b, spec.tile.head_dim);
        b.if_uniform(dkv.visits(&work), || {
            let v = v.wait();
            dkv.for_each_block(&work, |_, _| {
                let dout = dout.wait();
                let dp = gemm(v.tile(), dout.tile().t(), Fresh);
                let q = q.wait();
                let [q_tile, stats] = q.tiles();
                let deltas = Columns::load(b, stats, Stat::Delta);
                let dp = dp.wait();
                dout.release();
                let slot = weights.wait();
                let at = place(b, slot.tile());
                let groups = spec.tile.tile_m as usize / 8;
                let given: Vec<V<'_, F32>> =
                    (0..groups).flat_map(|group| b.load_vector::<F32, 4>(at(group))).collect();
                slot.release_loaded();
                let ds = dkv.ds(&dp, &deltas, &given);
                gemm(&ds, q_tile, &mut dk).wait();
                q.release_loaded();
            });
            v.release();
        });
        dkv.write_dk(dk, &work, key);
    });
}
