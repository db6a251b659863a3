//! The loads of a CTA's tiles, all begun by the same thread.

use fa3_ir::lang::*;

use super::{Place, Quantize};
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
        Loads { loader: kernel.x.loader(), tile: b.var("loaded", b.cta_x() * kernel.params.run) }
    }

    /// Begins to load the next tile, if there is one, as soon as its slot is free.
    #[track_caller]
    pub(super) fn next(&mut self, kernel: &Quantize<'k>) {
        let b = kernel.builder;
        b.once_per_role(|| {
            let tile = self.tile.get();
            b.if_uniform(tile.lt(kernel.params.tiles), || {
                let Place { batch, head, block } = kernel.place(tile);
                self.loader.load(head, block * kernel.spec.tile.rows, batch);
                self.tile.set(kernel.after(tile));
            });
        });
        b.warp_sync();
    }
}
