//! The state of a consumer warpgroup, and the steps that its main loops share.

use fa3_ir::lang::*;

use super::first::First;
use super::merged::Merged;
use super::p_type::PType;
use super::query::Query;
use super::row_softmax::RowSoftmax;
use super::scales::{BlockScales, VScale};
use super::self_loading::Kv;
use super::state::Fwd;
use crate::kernels::parts::kv_blocks::KvBlock;
use crate::kernels::parts::ping_pong::Turn;
use crate::kernels::parts::score::Exponents;

/// A consumer warpgroup's state from tile to tile.
pub(super) struct Attend<'f, 'k> {
    pub(super) fwd: &'f Fwd<'k>,
    pub(super) q: Consumer<'k, 1>,
    pub(super) qv: Option<Consumer<'k, 1>>,
    pub(super) k: Kv<'k>,
    pub(super) v: Kv<'k>,
    pub(super) p: PType,
    pub(super) turn: Turn<'k>,
    /// Handshakes with a second consumer that computes the same rows.
    pub(super) first: Option<First<'k>>,
}

/// The accumulators of a tile: O and the softmax state.
pub(super) struct Sum<'k> {
    pub(super) o: Frag<'k>,
    pub(super) softmax: RowSoftmax<'k>,
    /// The scale of V in units of which O is kept at present, if V has a scale per block.
    pub(super) v_scale: Option<VScale<'k>>,
    /// The pieces before, if the kernel merges pieces.
    pub(super) merged: Option<Merged<'k>>,
}

impl<'k> Sum<'k> {
    /// Makes the scales of `block` current. This must come before its V is added.
    #[track_caller]
    pub(super) fn enter(&self, block: &BlockScales<'k>) {
        if let Some(v_scale) = &self.v_scale {
            v_scale.enter(block);
        }
    }
}

impl<'k> Attend<'_, 'k> {
    /// Computes the scores of the next block, and waits for them.
    pub(super) fn block_scores<'q>(
        &mut self,
        q: &'q Query<'_, 'k>,
        block: &KvBlock<'k>,
    ) -> (Frag<'k>, Option<Exponents<'q, 'k>>) {
        let k = self.k.wait();
        let mut s = gemm(q.tile, k.tile().t(), Fresh).wait();
        self.k.release(k);
        q.stage.release_if(block.last);
        let exponents = q.apply(&mut s, block);
        (s, exponents)
    }

    /// Computes the products of Q and the next block of K, and waits for them. Issuing them ends the ping-pong turn.
    pub(super) fn products_ending_turn(&mut self, q: &Query<'_, 'k>, block: &KvBlock<'k>) -> Frag<'k> {
        let k = self.k.wait();
        let s = gemm(q.tile, k.tile().t(), Fresh);
        self.turn.pass();
        let s = s.wait();
        self.k.release(k);
        q.stage.release_if(block.last);
        s
    }

    /// Adds P V to O, with the next block of V.
    pub(super) fn add_product(&mut self, p: &AFrag<'k>, o: &mut Frag<'k>) {
        let v = self.v.wait();
        gemm(p, v.tile(), o).wait();
        self.v.release(v);
    }

    /// Adds P V to O, with the tile's last block of V. No other block of the tile is loaded into its stage.
    pub(super) fn add_last_product(&mut self, p: &AFrag<'k>, o: &mut Frag<'k>) {
        let v = self.v.wait();
        gemm(p, v.tile(), o).wait();
        v.release();
    }
}
