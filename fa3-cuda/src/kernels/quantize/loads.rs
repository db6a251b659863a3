//! The loads of a CTA's tiles, all begun by the same thread.

use fa3_ir::lang::*;

use super::Quantize;
use crate::kernels::parts::loader::TmaLoader;

/// The tiles that are still to be loaded.
pub(super) struct Loads<'k> {
    loader: TmaLoader<'k>,
    /// The next one.
    tile: Var<'k, B32>,
}

impl<'k> Loads<'k> {
    /// All tiles of the CTA.
    #[track_caller]
    pub(super) fn new(kernel: &Quantize<'k>) -> Loads<'k> {
        let b = kernel.builder;
        Loads { loader: kernel.x.loader(), tile: b.var("loaded", kernel.cluster() * kernel.params.run) }
    }

    /// Begins to load the next tile, if there is one, as soon as its slot is free.
    #[track_caller]
    pub(super) fn next(&mut self, kernel: &Quantize<'k>) {
        let b = kernel.builder;
        b.once_per_role(|| {
            let tile = self.tile.get();
            b.if_uniform(tile.lt(kernel.params.tiles), || {
                let place = kernel.place(tile);
                let row = kernel.part(&place) * kernel.spec.tile.rows;
                self.loader.load(place.head, row, place.batch);
                self.tile.set(kernel.after(tile));
            });
        });
        b.warp_sync();
    }
}
