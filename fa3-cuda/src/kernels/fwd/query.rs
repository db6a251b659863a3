//! Q of a work tile, as a consumer warpgroup multiplies it.

use fa3_ir::lang::*;

use super::scales::TileScales;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::score::Exponents;
use crate::kernels::parts::scores::{Scores, Unit};
use crate::kernels::parts::seen::SeenConsumer;

/// Q of a tile, as one consumer warpgroup reads it.
pub(super) struct Query<'s, 'k> {
    /// The stage of Q, which is released after the tile's last QKᵀ, so that the next tile's Q can be loaded.
    pub(super) stage: &'s FullStage<'k, 1>,
    /// This warpgroup's rows of Q.
    pub(super) tile: Tile<'s, 'k>,
    /// The stage of `qv` and this warpgroup's rows of it, in latent attention.
    pub(super) latent: Option<(&'s FullStage<'k, 1>, Tile<'s, 'k>)>,
    /// The scales of products of Q and K.
    pub(super) scales: &'s TileScales<'s, 'k>,
    /// The units of products of the thread's rows, if rows of Q have factors of their own.
    pub(super) units: Option<[Unit<'k>; 2]>,
    /// The soft cap and the mask.
    pub(super) scores: Scores<'k>,
    /// Which keys of blocks exist, if keys are listed.
    pub(super) seen: Option<&'s SeenConsumer<'k>>,
}

impl<'k> Query<'_, 'k> {
    /// Turns the products `s` of a block into scores, or into what the softmax takes exponents of.
    #[track_caller]
    pub(super) fn apply(&self, s: &mut Frag<'k>, block: &KvBlock<'k>) -> Option<Exponents<'_, 'k>> {
        let units = self.units.unwrap_or_else(|| [self.scales.of(block).unit; 2]);
        let exponents = self.scores.apply(s, block, units);
        if let Some(seen) = self.seen {
            match &block.seen {
                Some(keys) => keys.hide(s),
                None => seen.wait().hide(s),
            }
        }
        exponents.map(|exponents| exponents.hidden_if(self.seen.is_some()))
    }

    /// The block, with which of its keys exist if keys are listed: to be called while products run.
    #[track_caller]
    pub(super) fn look(&self, block: KvBlock<'k>) -> KvBlock<'k> {
        KvBlock { seen: self.seen.map(SeenConsumer::wait), ..block }
    }

    /// Releases Q and `qv` if `block` is the last one that the tile visits.
    #[track_caller]
    pub(super) fn release_if_last(&self, block: &KvBlock<'k>) {
        self.stage.release_if(block.last);
        if let Some((stage, _)) = self.latent {
            stage.release_if(block.last);
        }
    }
}
