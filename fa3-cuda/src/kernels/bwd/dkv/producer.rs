//! The producer of the dK/dV kernel. It loads K and V of a tile of keys, then blocks of Q, of row statistics and of dO.

use super::state::Dkv;
use crate::kernels::packed::TilesOf;
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::tma_pipeline::Keys;

impl<'k> Dkv<'k> {
    /// Runs the producer, in one thread.
    pub(super) fn load(&self) {
        let b = self.builder;
        let params = &self.params;
        b.once_per_role(|| {
            let (mut k, mut v) = (self.k.producer(), self.v.producer());
            let mut stages = self.rows.producer();
            self.scheduler.begin().produce(|work, again, fetch_next| {
                let WorkTile { head: kv_head, row: key, .. } = work;
                b.if_uniform(self.visits(&work), || {
                    let [of_k, of_v] = params.inputs.keys(&work, TilesOf::Keys);
                    k.load(kv_head, key, of_k); // A3:7-8
                    v.load(kv_head, key, of_v); // A3:7-8
                    self.for_each_row(&work, |head, row| {
                        // A3:9, for each block of rows
                        let mut stage = stages.acquire(); // A3:10
                        let work = again();
                        let [of_q, of_dout] = params.inputs.rows(&work, TilesOf::Keys);
                        of_q.load(&mut stage, 0, &params.inputs.q, [head, row]); // A3:11
                        let [batch, head, padded_row] = self.padded_row(&work, head, row);
                        stage.load(1, &params.stats, (0, padded_row >> 1, head, batch)); // A3:20
                        of_dout.load(&mut stage, 2, &params.inputs.dout, [head, row]); // A3:11
                        stage.commit(); // A3:12
                    });
                });
                fetch_next();
            });
        });
    }

    /// Runs the producer under a mask of intervals, in a warp. Another warp finds the blocks that see a tile's keys.
    pub(super) fn load_in_warp(&self) {
        let (b, params) = (self.builder, &self.params);
        let (mut k, mut v) = (self.k.producer(), self.v.producer());
        let mut stages = self.rows.producer();
        self.scheduler.begin().produce(|work, _, fetch_next| {
            let WorkTile { head: kv_head, row: key, .. } = work;
            b.if_uniform(self.visits(&work), || {
                let [of_k, of_v] = params.inputs.keys(&work, TilesOf::Keys).map(Keys::Of);
                k.load_in_warp(kv_head, key, &of_k); // A3:7-8
                v.load_in_warp(kv_head, key, &of_v); // A3:7-8
                let [of_q, of_dout] = params.inputs.rows(&work, TilesOf::Keys);
                self.for_each_row(&work, |head, row| {
                    // A3:9, for each block of rows
                    let [batch, of_stats, padded_row] = self.padded_row(&work, head, row);
                    stages.fill_by_warp(|mut stage| {
                        of_q.load(&mut stage, 0, &params.inputs.q, [head, row]); // A3:11
                        stage.load(1, &params.stats, (0, padded_row >> 1, of_stats, batch)); // A3:20
                        of_dout.load(&mut stage, 2, &params.inputs.dout, [head, row]); // A3:11
                        stage.commit(); // A3:12
                    });
                });
            });
            fetch_next();
        });
    }
}
