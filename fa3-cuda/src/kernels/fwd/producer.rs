//! The producer: loads Q, K and V of every tile, as early as their slots are free.

use super::Fwd;
use super::geometry::Work;

/// What one of the producer's threads runs. Blocks go from the last to the first, K a block ahead of V, which is how
/// consumers want them; the next tile's follow at once, while consumers still work on this one.
pub(super) fn run(fwd: &Fwd<'_>) {
    let b = fwd.builder;
    b.once_per_role(|| {
        let (mut q, mut k, mut v) = (fwd.q.loader(), fwd.k.loader(), fwd.v.loader());
        let keys = fwd.spec.tile.tile_n;
        fwd.tiles.produce(|tile, fetch_next| {
            let Work { batch, head, kv_head, row, kv } = fwd.params.geometry.work(tile);
            let visits = kv.first.lt(kv.end);
            let first = kv.first * keys;
            b.if_uniform(visits, || {
                let last = kv.end * keys - keys;
                k.load(kv_head, last, batch);
                q.load(head, row, batch); // A1:4-5
                b.for_each((0, last - first), keys, |loaded| {
                    // A1:6
                    let of_v = last - loaded;
                    k.load(kv_head, of_v - keys, batch);
                    v.load(kv_head, of_v, batch);
                });
            });
            // While the last load waits for its slot, the number of the next tile arrives.
            fetch_next();
            b.if_uniform(visits, || v.load(kv_head, first, batch));
        });
    });
}
