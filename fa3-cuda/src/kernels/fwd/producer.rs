//! The producer: loads Q, K and V of every tile, as early as their slots are free.

use fa3_ir::{B32, Builder, Producer, Ring, TileMap, V};

use super::Fwd;
use super::geometry::Work;

/// A ring that is filled from one tensor.
pub(super) struct Feed<'m> {
    map: &'m TileMap,
    ring: Producer<1>,
}

impl<'m> Feed<'m> {
    #[track_caller]
    pub(super) fn new(b: &mut Builder, (map, ring): &'m (TileMap, Ring<1>)) -> Feed<'m> {
        Feed { map, ring: ring.producer(b) }
    }

    /// Loads the tile of `head` that begins with `row`.
    #[track_caller]
    pub(super) fn load(&mut self, b: &mut Builder, head: V<B32>, row: V<B32>, batch: V<B32>) {
        let mut slot = self.ring.acquire(b); // A1:7
        slot.load(b, 0, self.map, (0, head, row, batch)); // A1:8
        slot.commit(b); // A1:9
    }
}

/// What one of the producer's threads runs. Blocks go from the last to the first, K a block ahead of V, which is how consumers
/// want them; the next tile's follow at once, while consumers still work on this one.
pub(super) fn producer(b: &mut Builder, fwd: &Fwd) {
    b.once_per_role(|b| {
        let (mut q, mut k, mut v) = (Feed::new(b, &fwd.q), Feed::new(b, &fwd.k), Feed::new(b, &fwd.v));
        let keys = fwd.spec.tile.tile_n;
        fwd.walk.produce(b, |b, Work { batch, head, kv_head, row, kv }, draw| {
            let visits = b.lt_u32(kv.first, kv.end);
            let first = b.mul(kv.first, keys);
            b.if_uniform(visits, |b| {
                let end = b.mul(kv.end, keys);
                let last = b.sub(end, keys);
                k.load(b, kv_head, last, batch);
                q.load(b, head, row, batch); // A1:4-5
                let before = b.sub(last, first);
                b.for_each((0, before), keys, |b, loaded| {
                    // A1:6
                    let of_v = b.sub(last, loaded);
                    let of_k = b.sub(of_v, keys);
                    k.load(b, kv_head, of_k, batch);
                    v.load(b, kv_head, of_v, batch);
                });
            });
            // While the last load waits for its slot, the number of the next tile arrives.
            draw.next(b);
            b.if_uniform(visits, |b| v.load(b, kv_head, first, batch));
        });
    });
}
