//! Where each load of a work tile reads: a sequence, pages, or rows.

use fa3_ir::lang::*;
use fa3_sched::SeqLens;

use super::state::Fwd;
use crate::kernels::parts::gather::{Gather, Rows};
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::pages::PageSpan;
use crate::kernels::parts::ragged::RowSpan;
use crate::kernels::parts::tma_pipeline::Sequence;

impl<'k> Fwd<'k> {
    /// The sequence of a work tile, as loads of Q, K and V address it.
    #[track_caller]
    pub(super) fn sequences(&self, work: &WorkTile<'k>) -> [Sequence<'k>; 3] {
        let (Some(varlen), Some(strides)) = (work.varlen, &self.params.strides) else {
            return [work.batch.into(); 3];
        };
        let rows = |strides: U32<'k>, row: U32<'k>, count: U32<'k>| {
            RowSpan::new(work.batch.mad(strides, row), count)
        };
        let SeqLens { q, k } = work.lens;
        let of_q = self.of_queries(rows(strides.q, varlen.q_row, q));
        let keys = |strides| Sequence::Rows(rows(strides, varlen.k_row, k));
        [of_q, keys(strides.k), keys(strides.v)]
    }

    /// The sequence that consists of these rows of Q or of `qv`.
    pub(super) fn of_queries(&self, rows: RowSpan<'k>) -> Sequence<'k> {
        match self.pack {
            None => Sequence::Rows(rows),
            Some(_) => Sequence::RowsOfHeads(rows, self.spec.pack),
        }
    }

    /// The sequence of a work tile, as loads of `qv` address it.
    #[track_caller]
    pub(super) fn latent_sequence(&self, work: &WorkTile<'k>) -> Sequence<'k> {
        let strides = self.params.strides.as_ref().and_then(|strides| strides.qv);
        let Some((varlen, strides)) = work.varlen.zip(strides) else { return work.batch.into() };
        self.of_queries(RowSpan::new(work.batch.mad(strides, varlen.q_row), work.lens.q))
    }

    /// The pages of K (1) or V (2) of a work tile, if the cache is paged.
    #[track_caller]
    pub(super) fn pages(&self, work: &WorkTile<'k>, of: usize) -> Option<PageSpan<'k>> {
        let (pages, varlen, strides) = (self.params.pages?, work.varlen?, self.params.strides.as_ref()?);
        let strides = if of == 1 { strides.k } else { strides.v };
        Some(PageSpan::new(self.builder, pages, work.batch, strides, [varlen.k_row, work.lens.k]))
    }

    /// The row-wise copies of K and V of a work tile that visits some block, if rows are copied one by one, in copying
    /// warp number `warp`. The last block is copied first. A whole warp must call it, and copy.
    #[track_caller]
    pub(super) fn gather(&self, work: &WorkTile<'k>, warp: U32<'k>) -> Option<Gather<'k>> {
        let (rows, strides) = (self.params.gathered.as_ref()?, self.params.strides.as_ref()?);
        let (of_k, tile) = (self.pages(work, 1)?, &self.spec.tile);
        let k = (&rows.k, of_k, tile.head_dim, self.spec.gathered_cols?);
        let v = (&rows.v, of_k.of_tensor(strides.v), tile.head_dim_v, self.spec.head_dim_v);
        let tensors = [k, v].map(|(rows, span, cols, used)| {
            let shape = TileShape::new(self.spec.key_elem(), tile.tile_n, cols);
            Rows::of((shape, used), rows, span, work.kv_head)
        });
        let last = work.kv.end * tile.tile_n - tile.tile_n;
        Some(Gather::begin(tensors, tile.tile_n, [warp, last]))
    }
}
