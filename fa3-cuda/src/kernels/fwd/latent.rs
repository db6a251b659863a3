//! Latent attention: S = Q Kᵀ + Qv Vᵀ. Each block of V is multiplied twice: by `qv` for the scores, and by P.

use fa3_ir::lang::*;

use super::attend::{Attend, Sum};
use super::merged;
use super::query::Query;
use crate::kernels::parts::kv_blocks::KvBlocks;

/// `qv` of a tile: its stage, which is released together with Q's stage, and a warpgroup's rows of it.
type Latent<'s, 'k> = (&'s FullStage<'k, 1>, Tile<'s, 'k>);

impl<'k> Attend<'_, 'k> {
    /// Algorithm 2 with lazy rescaling. Each iteration reads the current block of V for scores, and the previous block
    /// for P V. The stage of the previous block is held until P V is complete.
    pub(super) fn algorithm2_of_latents(
        &mut self,
        (q, latent): (&Query<'_, 'k>, Latent<'_, 'k>),
        blocks: &KvBlocks<'k>,
        sum: &mut Sum<'k>,
    ) {
        let first = blocks.at(0);
        let (k, v) = (self.k.wait(), self.v.wait()); // A2:3
        let mut s = self.scores((q, latent), (&k, &v)).wait(); // A2:4-5
        self.k.release(k);
        q.release_if_last(&first);
        q.apply(&mut s, &first);
        let mut p = sum.softmax.first(&mut s, None, self.p); // A2:6, O is still 0
        let mut held = v.hold();
        blocks.for_each(1, |block| {
            // A2:7, for each block up to T_c - 1
            let (k, v) = (self.k.wait(), self.v.wait()); // A2:8
            self.turn.take();
            let s = self.scores((q, latent), (&k, &v)); // A2:9, in flight
            let pv = gemm(&p, held.tile(), &mut sum.o); // A2:11, in flight
            self.turn.pass();
            let mut s = s.wait(); // A2:12
            self.k.release(k); // A2:15
            q.release_if_last(&block);
            q.apply(&mut s, &block);
            let o = pv.wait(); // A2:14
            held.replace(v); // A2:15
            let softmax = (&sum.softmax, sum.merged.as_ref());
            merged::step_lazily(softmax, &block, (&mut s, None, self.p), (&mut p, o)); // A2:13-14, A2:16
        });
        gemm(&p, held.tile(), &mut sum.o).wait(); // A2:18-19
        held.release();
    }

    /// Issues the scores of the block in these stages.
    #[track_caller]
    fn scores(
        &self,
        (q, (_, qv)): (&Query<'_, 'k>, Latent<'_, 'k>),
        (k, v): (&FullStage<'k, 1>, &FullStage<'k, 1>),
    ) -> Chain<'k> {
        let mut scores = Chain::new(self.fwd.builder, self.fwd.spec.tile.tile_n);
        scores.gemm(q.tile, k.tile().t());
        scores.gemm(qv, v.tile().t());
        scores
    }
}
