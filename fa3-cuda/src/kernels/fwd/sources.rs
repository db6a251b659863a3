//! Where each load of a work tile reads: a sequence, pages, or rows.

use fa3_ir::lang::*;
use fa3_sched::Lens;

use super::state::Fwd;
use crate::kernels::parts::gather::Gather;
use crate::kernels::parts::geometry::Work;
use crate::kernels::parts::loader::Sequence;
use crate::kernels::parts::pages::PageSpan;
use crate::kernels::parts::rows_view::RowSpan;

impl<'k> Fwd<'k> {
    /// The sequence of a work tile, as loads of Q, K and V address it.
    #[track_caller]
    pub(super) fn sequences(&self, work: &Work<V<'k, B32>>) -> [Sequence<'k>; 3] {
        let (Some(listed), Some(apart)) = (work.listed, &self.params.apart) else {
            return [work.batch.into(); 3];
        };
        let rows = |apart: V<'k, B32>, row: V<'k, B32>, count: V<'k, B32>| {
            RowSpan::new(work.batch.mad(apart, row), count)
        };
        let Lens { q, k } = work.lens;
        let of_q = self.of_queries(rows(apart.q, listed.q_row, q));
        let keys = |apart| Sequence::Rows(rows(apart, listed.k_row, k));
        [of_q, keys(apart.k), keys(apart.v)]
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
    pub(super) fn latent_sequence(&self, work: &Work<V<'k, B32>>) -> Sequence<'k> {
        let apart = self.params.apart.as_ref().and_then(|apart| apart.qv);
        let Some((listed, apart)) = work.listed.zip(apart) else { return work.batch.into() };
        self.of_queries(RowSpan::new(work.batch.mad(apart, listed.q_row), work.lens.q))
    }

    /// The pages of K (1) or V (2) of a work tile, if the cache is paged.
    #[track_caller]
    pub(super) fn pages(&self, work: &Work<V<'k, B32>>, of: usize) -> Option<PageSpan<'k>> {
        let (pages, listed, apart) = (self.params.pages?, work.listed?, self.params.apart.as_ref()?);
        let apart = if of == 1 { apart.k } else { apart.v };
        Some(PageSpan::new(self.builder, pages, work.batch, apart, [listed.k_row, work.lens.k]))
    }

    /// The row-wise copies of K (1) or V (2) of a work tile that visits some block, if rows are copied one by one. The
    /// last block is copied first. A whole warp must call it, and copy.
    #[track_caller]
    pub(super) fn gather(&self, work: &Work<V<'k, B32>>, of: usize) -> Option<Gather<'k>> {
        let (rows, span, tile) = (self.params.gathered.as_ref()?, self.pages(work, of)?, &self.spec.tile);
        let (rows, cols, used) = match of {
            1 => (&rows.k, tile.head_dim, self.spec.gathered_cols?),
            _ => (&rows.v, tile.head_dim_v, self.spec.head_dim_v),
        };
        let shape = TileShape::new(self.spec.key_elem(), tile.tile_n, cols);
        let last = work.kv.end * tile.tile_n - tile.tile_n;
        Some(Gather::begin(self.builder, (shape, used), rows, span, [work.kv_head, last]))
    }
}
