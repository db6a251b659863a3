//! Rings that a warp fills by cp.async: copies of 16 bytes a thread, each thread from its own addresses.
//!
//! These copies write through the generic proxy, and products read through the async proxy, so that a fence must lie
//! between the two. The copying warp should not execute it, since it would have to wait until its copies are complete,
//! nor should a computing warp. Another warp does, the ring's [`Fencer`]: it waits until the copies of a stage have
//! landed, executes the fence, and passes the stage on.

use super::{Cursor, Ring};
use crate::lang::{Builder, Tile, TileShape};
use crate::{FenceInst, Region};

/// Threads of a warp, each of which arrives when its copies are complete.
const LANES: u32 = 32;

/// A ring whose stages one warp fills by [`Builder::copy_async`] and another warp passes on.
#[derive(Clone, Debug)]
pub struct CopiedRing<'k, const N: usize> {
    ring: Ring<'k, N>,
    /// The mbarriers of stages whose copies are complete.
    landed: Region,
}

impl Builder {
    /// Declares a ring of `stages` stages with these tiles. One warp fills them by copies of 16 bytes a thread, another
    /// warp fences, and `consumers` warps empty them.
    #[track_caller]
    pub fn copied_ring<const N: usize>(
        &self,
        name: &str,
        stages: u32,
        consumers: u32,
        tiles: [(&str, TileShape); N],
    ) -> CopiedRing<'_, N> {
        let ring = self.ring(name, stages, consumers, tiles);
        CopiedRing { ring, landed: self.mbarriers(&format!("{name} landed"), stages, LANES) }
    }
}

impl<'k, const N: usize> CopiedRing<'k, N> {
    /// The ring that the consumers see.
    pub fn ring(&self) -> &Ring<'k, N> {
        &self.ring
    }

    /// The position of the copying warp: all stages are empty.
    #[track_caller]
    pub fn copier(&self) -> Copier<'k, N> {
        Copier { cursor: Cursor::new(&self.ring, 1), landed: self.landed }
    }

    /// The position of the fencing warp.
    #[track_caller]
    pub fn fencer(&self) -> Fencer<'k, N> {
        Fencer { cursor: Cursor::new(&self.ring, 0), landed: self.landed }
    }
}

/// Fills a ring by copies. One warp has it.
#[derive(Debug)]
pub struct Copier<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<'k, const N: usize> Copier<'k, N> {
    /// Waits until the next stage is empty, and runs `copy` in all lanes, which begins to copy to the stage's tiles.
    #[track_caller]
    pub fn fill(&mut self, copy: impl FnOnce([Tile<'_, 'k>; N])) {
        let ring = &self.cursor.ring;
        let stage = {
            let _one = ring.builder.as_one();
            self.cursor.next(ring.empty)
        };
        copy(ring.tiles(stage));
        let _one = ring.builder.as_one();
        ring.builder.mbarrier_arrive_copied(ring.barrier(self.landed, stage));
    }
}

/// Passes on the stages of a ring. One warp has it.
#[derive(Debug)]
pub struct Fencer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<const N: usize> Fencer<'_, N> {
    /// Waits until the copies to the next stage are complete, and passes it to the consumers: products may read it.
    #[track_caller]
    pub fn pass(&mut self) {
        let ring = &self.cursor.ring;
        let b = ring.builder;
        let _one = b.as_one();
        let stage = self.cursor.next(self.landed);
        b.once_per_warp(|| {
            b.fence(FenceInst::ProxyAsyncShared);
            b.mbarrier_arrive(ring.barrier(ring.full, stage));
        });
    }
}
