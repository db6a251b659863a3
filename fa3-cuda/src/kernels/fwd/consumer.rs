//! The consumer: a warpgroup that computes 64 rows of O, or half of their columns, with one block of keys at a time.

use fa3_ir::lang::*;
use fa3_sched::forward::{Pipeline, Precision};

use super::attend::{Attend, Sum};
use super::epilogue;
use super::first::First;
use super::merged::Merged;
use super::query::Query;
use super::row_softmax::{Finished, RowSoftmax};
use super::scales::{TileScales, VScale};
use super::self_loading::SelfLoading;
use super::state::Fwd;
use crate::kernels::parts::kv_blocks::KvBlocks;
use crate::kernels::parts::ping_pong::Turn;
use crate::kernels::parts::seen::Seen;

/// Runs a consumer warpgroup.
pub(super) fn run<'k>(fwd: &Fwd<'k>) {
    let b = fwd.builder;
    let me = b.warpgroup();
    let q =
        fwd.dequantized.as_ref().and_then(|dequantized| dequantized.q()).unwrap_or_else(|| fwd.q.stages());
    let (q, qv) = (q.consumer(), fwd.qv.as_ref().map(|qv| qv.consumer()));
    let [k, v] = match (&fwd.dequantized, &fwd.transposed) {
        (Some(dequantized), _) => dequantized.pipelines(),
        (None, Some(transposed)) => [fwd.k.stages(), transposed.stages()],
        (None, None) => [fwd.k.stages(), fwd.v.stages()],
    };
    let (k, v) = (k.consumer(), v.consumer());
    let turn = fwd.ping_pong.as_ref().map_or_else(Turn::none, |ping_pong| ping_pong.of(b, me));
    let (mut loads, k, v) = SelfLoading::of(fwd, k, v);
    let seen = fwd.seen.as_ref().map(Seen::consumer);
    let first = fwd.hand_over.as_ref().map(|hand_over| First::new(fwd, hand_over));
    let mut attend = Attend { fwd, q, qv, k, v, p: fwd.p, turn, first };
    let headroom = if fwd.spec.tile.rescales_lazily() { attend.p.headroom() } else { -attend.p.offset() };
    fwd.scheduler.consume(|work, again| {
        let work = fwd.cut(work, true);
        // The row is computed again for each tile, because keeping it would occupy a register all along.
        let row = fwd.first_row(&work, me);
        let scales = TileScales::new(fwd, &work, || work.row + fwd.row_block(me) * 64);
        let o = Frag::zeros(b, fwd.spec.tile.columns()); // A1:13
        let softmax = RowSoftmax::new(b, fwd.scale_log2(&scales), headroom);
        let softmax = if fwd.spec.max_logits { softmax.with_max_logits() } else { softmax };
        let softmax = if fwd.f16_queries.is_some() { softmax.with_scales_of_rows() } else { softmax };
        let softmax = if attend.first.is_some() { softmax.with_scores_scale() } else { softmax };
        let mut sum = Sum { o, softmax, v_scale: VScale::new(fwd), merged: Merged::new(fwd, &work) };
        let visits = work.kv.first.lt(work.kv.end);
        let blocks = fwd.blocks_by(&work, true, Some(me)).in_pieces(fwd.params.piece);
        b.if_uniform(visits, || {
            if let Some(loads) = &mut loads {
                loads.begin(&work, &mut attend.k, &mut attend.v);
            }
            let stage = attend.q.wait(); // A1:14
            let latent = attend.qv.as_mut().map(|qv| qv.wait());
            let units = fwd.f16_queries.as_ref().map(|queries| {
                let tiles: Vec<_> = std::iter::once(&stage).chain(&latent).map(FullStage::tile).collect();
                let factors = queries.rewrite(b, &tiles, fwd.rows_of(&work));
                let units = factors.0.map(|factor| scales.of_rows_times(factor));
                sum.softmax.set_scales_of_rows(Rows(units.map(|unit| unit.scale_log2)));
                units
            });
            let (tile, scores) = (rows_of(fwd, &stage, me), fwd.scores(&work, row));
            let of_latent = latent.as_ref().map(|stage| (stage, rows_of(fwd, stage, me)));
            let seen = seen.as_ref();
            let q = Query { stage: &stage, tile, latent: of_latent, scales: &scales, units, scores, seen };
            attend.tile(&q, &blocks, &mut sum);
            stage.released();
            if let Some(stage) = latent {
                stage.released();
            }
        });
        let (work, Sum { o, softmax, v_scale, merged }) = (again(), sum);
        let (o, finished) = match merged {
            None => (o, epilogue::finish(fwd, softmax, &work, row)), // A1:24
            Some(merged) => epilogue::finish_merged(fwd, merged, (o, &softmax), (&work, row)),
        };
        let Finished { inverse, lse, of_keys, max_logits } = finished;
        if let Some(first) = &mut attend.first {
            first.hand_over_end(inverse);
        }
        let columns = fwd.columns(0);
        let lse = Some(lse);
        let results = epilogue::Results { o, v_scale, inverse, lse, max_logits, of_keys, columns };
        epilogue::write(fwd, results, &work, row); // A1:24-25
    });
    attend.turn.end(b);
}

/// The rows of Q or `qv` of warpgroup `me`, as products read them.
fn rows_of<'s, 'k>(fwd: &Fwd<'k>, stage: &'s FullStage<'k, 1>, me: U32<'k>) -> Tile<'s, 'k> {
    stage.tile().with_elem(fwd.spec.elem).row_block(fwd.row_block(me), 64)
}

impl<'k> Attend<'_, 'k> {
    /// Computes all blocks of a tile.
    fn tile(&mut self, q: &Query<'_, 'k>, blocks: &KvBlocks<'k>, sum: &mut Sum<'k>) {
        let tile = &self.fwd.spec.tile;
        if let Some(mut first) = self.first.take() {
            self.algorithm2_of_first(&mut first, q, blocks, sum);
            self.first = Some(first);
            return;
        }
        if let Some(latent) = q.latent {
            return self.algorithm2_of_latents((q, latent), blocks, sum);
        }
        match (tile.precision, tile.pipeline) {
            (Precision::Half | Precision::Converted { .. }, Pipeline::Serial) => {
                self.algorithm1(q, blocks, sum)
            }
            (Precision::Half | Precision::Converted { .. }, Pipeline::Paired | Pipeline::TwoStage) => {
                self.algorithm2(q, blocks, sum)
            }
            (Precision::Half | Precision::Converted { .. }, Pipeline::ThreeStage) => {
                self.algorithm4(q, blocks, sum)
            }
            (Precision::Fp8(_), Pipeline::Serial) if tile.ping_pong => {
                self.algorithm1_in_turns(q, blocks, sum)
            }
            (Precision::Fp8(_), Pipeline::Serial) => self.algorithm1_in_two_levels(q, blocks, sum),
            (Precision::Fp8(_), _) => self.algorithm2_in_two_levels(q, blocks, sum),
        }
    }
}
