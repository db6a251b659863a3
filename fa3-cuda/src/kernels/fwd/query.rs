//! Q of a work tile, as a consumer warpgroup multiplies it.

use fa3_ir::lang::*;

use super::scales::TileScales;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::scores::Scores;

/// Q of a tile.
pub(super) struct Query<'s, 'k> {
    /// Its slot, which goes back when the last block has been multiplied: the next tile's Q can then be loaded.
    pub(super) slot: &'s FullSlot<'k, 1>,
    /// This warpgroup's rows.
    pub(super) tile: Tile<'s, 'k>,
    /// The slot and the rows of `qv`, in latent attention.
    pub(super) latent: Option<(&'s FullSlot<'k, 1>, Tile<'s, 'k>)>,
    /// The scales of its products with K.
    pub(super) scales: &'s TileScales<'s, 'k>,
    /// The soft cap and the mask.
    pub(super) scores: Scores<'k>,
}

impl<'k> Query<'_, 'k> {
    /// Products of a block into scores.
    #[track_caller]
    pub(super) fn apply(&self, s: &mut Frag<'k>, block: &KvBlock<'k>) {
        self.scores.apply(s, block, &self.scales.of(block).unit);
    }

    /// Gives Q and `qv` back, if no other block is visited after this one.
    #[track_caller]
    pub(super) fn release_if_last(&self, block: &KvBlock<'k>) {
        self.slot.release_if(block.last);
        if let Some((slot, _)) = self.latent {
            slot.release_if(block.last);
        }
    }
}
