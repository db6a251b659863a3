//! Pipeline handshakes of the first of two consumers that compute the same rows. It computes scores, and hands P over.

use fa3_ir::lang::*;

use super::hand_over::{HandOver, store_factors};
use super::query::Query;
use super::row_softmax::RowSoftmax;
use super::self_loading::Kv;
use super::state::Fwd;
use crate::kernels::parts::tma_pipeline::TmaPipeline;

/// Pipeline states that only the first of two consumers has.
pub(super) struct First<'k> {
    builder: &'k Builder,
    blocks: Producer<'k, 2>,
    ends: Producer<'k, 1>,
    /// The pipeline of the last columns of K, if K has two parts.
    k_second: Option<Consumer<'k, 1>>,
    /// The pipelines of the second half of V's columns, in one part or two, of columns or of rows. Scores read them
    /// with `qv`.
    v_second: Vec<Consumer<'k, 1>>,
}

/// Scores whose products have been issued, the stage that they read last, and whether that stage was already full.
pub(super) type IssuedScores<'k> = (Chain<'k>, FullStage<'k, 1>, Option<V<'k, Pred>>);

/// The stages that the scores of one block read: K's stages, and with `qv` also V's stages.
pub(super) struct KeyStages<'k> {
    k: FullStage<'k, 1>,
    /// The stages of both halves of V's columns, with `qv`.
    latent: Option<(FullStage<'k, 1>, Vec<FullStage<'k, 1>>)>,
}

impl<'k> First<'k> {
    #[track_caller]
    pub(super) fn new(fwd: &Fwd<'k>, hand_over: &HandOver<'k>) -> First<'k> {
        First {
            builder: fwd.builder,
            blocks: hand_over.blocks.producer(),
            ends: hand_over.ends.producer(),
            k_second: fwd.k_second.as_ref().map(TmaPipeline::consumer),
            v_second: fwd.v_second.iter().filter(|_| fwd.spec.tile.qv).map(TmaPipeline::consumer).collect(),
        }
    }

    /// Stores P of a block and its rescale factors. The second consumer sees them once the stage is committed.
    #[track_caller]
    pub(super) fn store(&mut self, p: &AFrag<'k>, softmax: &RowSoftmax<'k>) -> EmptyStage<'k, 2> {
        let b = self.builder;
        let stage = self.blocks.acquire();
        let [of_p, factors] = stage.tiles();
        p.store(of_p);
        if let Some(scores_scale) = softmax.scores_scale() {
            store_factors(b, scores_scale.get(), factors);
        }
        stage
    }

    /// Hands over the final factor of O's rows, at the end of a tile.
    #[track_caller]
    pub(super) fn hand_over_end(&mut self, inverse: Rows<'k>) {
        let stage = self.ends.acquire();
        let [to] = stage.tiles();
        store_factors(self.builder, inverse, to);
        stage.commit_unfenced();
    }

    /// Issues the scores of the next block; `of_k` are its products with K, if these have been issued. If the stage
    /// that is read last is not full yet, the tensor cores would run dry, so P of the previous block is handed over
    /// first. The predicate says whether that stage was full.
    #[track_caller]
    pub(super) fn scores(
        &mut self,
        fwd: &Fwd<'k>,
        q: &Query<'_, 'k>,
        (k, v): (&mut Kv<'k>, &mut Kv<'k>),
        of_k: Option<IssuedScores<'k>>,
        before: Option<&EmptyStage<'k, 2>>,
    ) -> (Chain<'k>, KeyStages<'k>, Option<V<'k, Pred>>) {
        let (mut scores, k, is_there) = of_k.unwrap_or_else(|| self.products_of_k(fwd, q, k, before));
        let Some((_, qv)) = q.latent else { return (scores, KeyStages { k, latent: None }, is_there) };
        let cols = fwd.spec.tile.columns();
        let v = v.wait();
        scores.gemm(qv.col_block(0, cols), v.tile().t());
        let all_there = self.v_second.iter().map(|part| part.is_full()).reduce(|all, part| all & part);
        let is_there = before.zip(all_there).map(|(stage, all_there)| hand_over_unless(stage, all_there));
        let (mut parts, mut first) = (Vec::new(), cols);
        for part in &mut self.v_second {
            let part = part.wait();
            let (tile, of_part) = (part.tile(), part.tile().shape().cols);
            if fwd.spec.first_rows_of_second_half().is_some() && parts.is_empty() {
                parts.push(part);
                continue;
            }
            let qv = qv.col_block(first, of_part);
            first += of_part;
            if first < 2 * cols {
                scores.gemm(qv, tile.t());
            } else {
                add_last(&mut scores, qv, tile, None);
            }
            parts.push(part);
        }
        (scores, KeyStages { k, latent: Some((v, parts)) }, is_there)
    }

    /// Issues the products of Q and the next block of K. If K has two parts, the stage of the first part is released as
    /// soon as its products are complete, while the products of the second part run. Hands P over as `scores` does, but
    /// with `qv` leaves that to `scores`.
    #[track_caller]
    pub(super) fn products_of_k(
        &mut self,
        fwd: &Fwd<'k>,
        q: &Query<'_, 'k>,
        k: &mut Kv<'k>,
        before: Option<&EmptyStage<'k, 2>>,
    ) -> IssuedScores<'k> {
        let mut scores = Chain::new(fwd.builder, fwd.spec.tile.tile_n);
        if q.latent.is_some() {
            let k = k.wait();
            scores.gemm(q.tile, k.tile().t());
            return (scores, k, None);
        }
        let Some(k_second) = &mut self.k_second else {
            let is_there = before.map(|stage| hand_over_unless(stage, k.is_there()));
            let k = k.wait();
            add_last(&mut scores, q.tile, k.tile(), None);
            return (scores, k, is_there);
        };
        let k = k.wait();
        let [cols, of_second] = [fwd.k.cols(), fwd.spec.tile.head_dim - fwd.k.cols()];
        scores.gemm(q.tile.col_block(0, cols), k.tile().t());
        let is_there = before.map(|stage| hand_over_unless(stage, k_second.is_full()));
        let k_second = k_second.wait();
        add_last(&mut scores, q.tile.col_block(cols, of_second), k_second.tile(), Some(k));
        (scores, k_second, is_there)
    }
}

/// Hands P over unless `is_there`, which says that the stage of the next products is full. Gives `is_there`. The fence
/// takes long while products run, but no longer than the products in flight.
#[track_caller]
fn hand_over_unless<'k>(stage: &EmptyStage<'k, 2>, is_there: V<'k, Pred>) -> V<'k, Pred> {
    stage.fence();
    stage.commit_if(is_there.negated());
    is_there
}

/// Issues the last products of scores. The last panel of columns is a group of its own, so that the products before it
/// can be waited for separately. Releases the stage `before`, which earlier products have read.
#[track_caller]
fn add_last<'k>(
    scores: &mut Chain<'k>,
    q: Tile<'_, 'k>,
    k: Tile<'_, 'k>,
    mut before: Option<FullStage<'k, 1>>,
) {
    let (cols, panel) = (q.shape().cols, q.shape().panel_cols());
    for (first, count) in [(0, cols - panel), (cols - panel, panel)] {
        if count == 0 {
            continue;
        }
        scores.gemm(q.col_block(first, count), k.col_block(first, count).t());
        if let Some(stage) = before.take() {
            scores.wait_older();
            stage.release();
        }
    }
}

impl<'k> KeyStages<'k> {
    /// Releases the stages that only scores read. With `qv`, gives the stage of the first half of V's columns.
    #[track_caller]
    pub(super) fn release(self) -> Option<FullStage<'k, 1>> {
        self.k.release();
        self.latent.map(|(v, v_second)| {
            v_second.into_iter().for_each(|part| part.release());
            v
        })
    }
}
