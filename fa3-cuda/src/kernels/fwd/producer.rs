//! The producer: loads Q, K and V of every tile, as early as their slots are free, and transposes V of e4m3.

use super::Fwd;
use crate::kernels::parts::geometry::Work;

/// Runs the producer's warps: the first one loads, the others transpose V, if it is to be transposed.
pub(super) fn run(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    match &fwd.transposed {
        None => load(fwd),
        Some(transposed) => {
            let loads = (b.tid() >> 5).shfl_idx(0).eq(0);
            b.if_else_uniform(loads, || load(fwd), || transposed.run(fwd));
        }
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
