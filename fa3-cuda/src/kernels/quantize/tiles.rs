//! The tiles of a CTA, in runs of neighbouring tiles, and their loads, all of which one thread issues.

use fa3_ir::lang::*;

use super::Quantize;
use super::spans::{Span, Spans};
use crate::kernels::parts::tma_pipeline::{Sequence, TmaProducer};

/// A block of rows of a head.
pub(super) struct HeadBlock<'k> {
    pub(super) batch: U32<'k>,
    pub(super) head: U32<'k>,
    pub(super) block: U32<'k>,
    /// The rows of the block's sequence, if sequences are packed.
    pub(super) span: Option<Span<'k>>,
}

impl<'k> Quantize<'k> {
    /// The index of the CTA's cluster, or of the CTA itself without clusters.
    #[track_caller]
    pub(super) fn cluster(&self) -> U32<'k> {
        self.in_clusters(self.builder.cta_x())
    }

    /// Number of clusters that `ctas` CTAs form.
    #[track_caller]
    fn in_clusters(&self, ctas: U32<'k>) -> U32<'k> {
        if self.rank.is_some() { ctas >> self.spec.tile.cluster.ilog2() } else { ctas }
    }

    /// The index of the CTA's part of a head, in units of a tile's rows.
    #[track_caller]
    pub(super) fn part(&self, place: &HeadBlock<'k>) -> U32<'k> {
        let block = place.span.map_or(place.block, |span| span.block);
        self.rank.map_or(block, |rank| block.mad(self.spec.tile.cluster, rank))
    }

    /// The tile that the CTA computes after this one.
    #[track_caller]
    pub(super) fn after(&self, tile: U32<'k>) -> U32<'k> {
        let run = self.params.run;
        // At the end of a run, skips the runs of the other CTAs.
        let skipped = (self.in_clusters(self.builder.grid_x()) - 1) * run;
        let after = tile + 1;
        after + (after & (run - 1)).eq(0).select::<B32>(skipped, 0)
    }

    /// The search for the sequences of tiles, if sequences are packed.
    #[track_caller]
    pub(super) fn spans(&self) -> Option<Spans<'k>> {
        let packed = self.params.packed.as_ref()?;
        Some(Spans::new(self.builder, packed, self.params.seqlen))
    }

    /// The tile with index `index`. If sequences are packed, `spans` finds the tile's sequence.
    #[track_caller]
    pub(super) fn place(&self, index: U32<'k>, spans: Option<&Spans<'k>>) -> HeadBlock<'k> {
        let fa3_sched::TileCoord { m_block, head, batch } = self.params.decoder.decode(index);
        let [batch, head, block] = [batch, head, m_block].map(V::in_register);
        HeadBlock { batch, head, block, span: spans.map(|spans| spans.at(block)) }
    }
}

/// The tiles that are still to be loaded.
pub(super) struct Loads<'k> {
    loader: TmaProducer<'k>,
    /// The tile that is loaded next.
    tile: Var<'k, B32>,
    spans: Option<Spans<'k>>,
}

impl<'k> Loads<'k> {
    /// The loads of all tiles of the CTA.
    #[track_caller]
    pub(super) fn new(kernel: &Quantize<'k>) -> Loads<'k> {
        let b = kernel.builder;
        let (loader, first) = (kernel.x.producer(), kernel.cluster() * kernel.params.run);
        Loads { loader, tile: b.var("loaded", first), spans: kernel.spans() }
    }

    /// Begins to load the next tile as soon as a stage is free, unless all tiles are loaded.
    #[track_caller]
    pub(super) fn next(&mut self, kernel: &Quantize<'k>) {
        let b = kernel.builder;
        b.once_per_role(|| {
            let tile = self.tile.get();
            b.if_uniform(tile.lt(kernel.params.tiles), || {
                let place = kernel.place(tile, self.spans.as_ref());
                let row = kernel.part(&place) * kernel.spec.tile.rows;
                let of = place.span.map_or(place.batch.into(), |span| Sequence::Rows(span.in_memory()));
                self.loader.load(place.head, row, of);
                self.tile.set(kernel.after(tile));
            });
        });
        b.warp_sync();
    }
}
