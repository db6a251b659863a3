//! The places from which the loads of a work tile read: a sequence, pages, or rows.

use fa3_ir::lang::*;
use fa3_sched::SeqLens;

use super::state::Fwd;
use crate::kernels::parts::gather::{Columns, Found, Gather};
use crate::kernels::parts::geometry::WorkTile;
use crate::kernels::parts::key_rows::{KeyRows, SequenceRows};
use crate::kernels::parts::lists::{ListSpan, UNIT};
use crate::kernels::parts::pages::PageSpan;
use crate::kernels::parts::ragged::RowSpan;
use crate::kernels::parts::tma_pipeline::Sequence;
use crate::kernels::parts::walk::Walk;

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

    /// The sequence that consists of the rows `rows` of Q or of `qv`.
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

    /// The rows of K (1) or V (2) of a work tile that visits some block, if warps convert them.
    #[track_caller]
    pub(super) fn key_rows(&self, work: &WorkTile<'k>, of: usize) -> Option<KeyRows<'k>> {
        let (spec, tile) = (&self.spec, &self.spec.tile);
        let cols = if of == 1 { spec.gathered_cols? } else { spec.head_dim_v };
        if let Some(span) = self.listed(work) {
            let (from, scales) = (span.addresses(work.kv.first)[of - 1], span.scales().filter(|_| of == 2));
            let bytes = if of == 1 { spec.key_elem().bytes() } else { Elem::E4m3.bytes() };
            let place = (from, self.builder.value(UNIT));
            let rows = SequenceRows::Listed(Box::new(span), of - 1);
            return Some(
                KeyRows::new(rows, [cols, bytes], place, work.kv.first * tile.tile_n).scaled_by(scales),
            );
        }
        let (strides, varlen) = (self.params.strides.as_ref()?, work.varlen?);
        let gathered = self.params.gathered.as_ref()?;
        let (tensor, apart) = if of == 1 { (&gathered.k, strides.k) } else { (&gathered.v, strides.v) };
        let rows = match self.pages(work, of) {
            Some(span) => SequenceRows::OfPages(span),
            None => SequenceRows::Of { first: work.batch.mad(apart, varlen.k_row), count: work.lens.k },
        };
        let last = work.kv.end * tile.tile_n - tile.tile_n;
        Some(KeyRows::new(rows, [cols, spec.key_elem().bytes()], tensor.of_head(work.kv_head), last))
    }

    /// The lists of a work tile, if keys are listed.
    #[track_caller]
    fn listed(&self, work: &WorkTile<'k>) -> Option<ListSpan<'k>> {
        let (Some(lists), Walk::Shares(shares)) = (&self.params.lists, &self.params.walk) else {
            return None;
        };
        let lens = shares.list_lens(self.builder, work.batch)?;
        Some(ListSpan::new(self.builder, *lists, lens, [work.batch, work.kv_head]))
    }

    /// The row-wise copies of K and V of a work tile that visits some block, if rows are copied one by one, in copying
    /// warp number `warp`. A whole warp must call it, and copy.
    #[track_caller]
    pub(super) fn gather(&self, work: &WorkTile<'k>, warp: U32<'k>) -> Option<Gather<'k>> {
        let (b, tile) = (self.builder, &self.spec.tile);
        let k = (tile.head_dim, self.spec.gathered_cols?);
        let columns = [k, (tile.head_dim_v, self.spec.head_dim_v)].map(|(cols, used)| {
            Columns::new(b, TileShape::new(self.spec.key_elem(), tile.tile_n, cols), used)
        });
        let found = match self.listed(work) {
            Some(span) => Found::InLists(span),
            None => {
                let (rows, strides) = (self.params.gathered.as_ref()?, self.params.strides.as_ref()?);
                let span = self.pages(work, 1)?;
                let spans = [span, span.of_tensor(strides.v)];
                Found::InPages(spans, [rows.k, rows.v].map(|rows| rows.of_head(work.kv_head)))
            }
        };
        Some(Gather::begin(found, columns, (tile.tile_n, work.kv), warp))
    }
}
