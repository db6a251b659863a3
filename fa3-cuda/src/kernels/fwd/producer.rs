//! The producer: loads Q, K and V of every tile, as early as their slots are free, and transposes V of e4m3.

use super::Fwd;
use crate::kernels::parts::geometry::Work;

/// Runs the producer's warps. The first one loads. Of V of e4m3 that is to be transposed, the others do that; of keys
/// in pages, which take many copies, the second one loads V.
pub(super) fn run(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let warp = || (b.tid() >> 5).shfl_idx(0);
    match &fwd.transposed {
        Some(transposed) => {
            let loads = warp().eq(0);
            b.if_else_uniform(loads, || load(fwd), || transposed.run(fwd));
        }
        None if fwd.spec.page_block.is_some() => {
            let loads_keys = warp().eq(0);
            b.if_uniform(loads_keys, || load_keys(fwd));
            let loads_values = warp().eq(1);
            b.if_uniform(loads_values, || load_values(fwd));
        }
        None => load(fwd),
    }
}

/// Loads, in one thread. Blocks go from the last to the first, K a block ahead of V, which is how
/// consumers want them; the next tile's follow at once, while consumers still work on this one.
fn load(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let works = fwd.works.begin();
    b.once_per_role(|| {
        let (mut q, mut k, mut v) = (fwd.q.loader(), fwd.k.loader(), fwd.v.loader());
        let keys = fwd.spec.tile.tile_n;
        works.produce(|work, _, fetch_next| {
            let Work { head, kv_head, row, kv, .. } = work;
            let [of_q, of_k, of_v] = fwd.sequences(&work);
            let visits = kv.first.lt(kv.end);
            let first = kv.first * keys;
            b.if_uniform(visits, || {
                let last = kv.end * keys - keys;
                k.load(kv_head, last, of_k);
                q.load(head, row, of_q); // A1:4-5
                b.for_each((0, last - first), keys, |loaded| {
                    // A1:6
                    let key = last - loaded;
                    k.load(kv_head, key - keys, of_k);
                    v.load(kv_head, key, of_v);
                });
            });
            // While the last load waits for its slot, the number of the next tile arrives.
            fetch_next();
            b.if_uniform(visits, || v.load(kv_head, first, of_v));
        });
    });
}

/// Loads Q and K, in one thread, in the same order, and sends the works to the warp that loads V.
fn load_keys(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let works = fwd.works.begin();
    b.once_per_role(|| {
        let (mut q, mut k) = (fwd.q.loader(), fwd.k.loader());
        let keys = fwd.spec.tile.tile_n;
        works.produce(|work, _, fetch_next| {
            let Work { head, kv_head, row, kv, .. } = work;
            let [of_q, of_k, _] = fwd.sequences(&work);
            let visits = kv.first.lt(kv.end);
            b.if_uniform(visits, || {
                let last = kv.end * keys - keys;
                q.load(head, row, of_q); // A1:4-5
                b.for_each((0, (kv.end - kv.first) * keys), keys, |loaded| {
                    k.load(kv_head, last - loaded, of_k); // A1:6
                });
            });
            fetch_next();
        });
    });
}

/// Loads V, in one thread of a warp, from the last block to the first.
fn load_values(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    let mut v = fwd.v.loader();
    let keys = fwd.spec.tile.tile_n;
    fwd.works.consume(|work, _| {
        let Work { kv_head, kv, .. } = work;
        let [_, _, of_v] = fwd.sequences(&work);
        b.once_per_warp(|| {
            let last = kv.end * keys - keys;
            b.for_each((0, (kv.end - kv.first) * keys), keys, |loaded| {
                v.load(kv_head, last - loaded, of_v);
            });
        });
    });
}
