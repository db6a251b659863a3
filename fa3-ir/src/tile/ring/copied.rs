//! Rings that a warp fills by copies of 16 bytes a thread (cp.async), from addresses of which each thread has its own.
//!
//! These copies write through the generic proxy, and products read through the asynchronous one. Between the two lies a
//! fence, which nobody who is in a hurry executes: neither who copies, and would have to wait until its copies are
//! complete, nor who computes. Another warp does, the ring's [`Fencer`]: it waits until the copies of a slot have
//! landed, executes the fence, and passes the slot on.

use super::{Cursor, Ring};
use crate::lang::{Builder, Tile, TileShape};
use crate::{FenceInst, Region};

/// Threads of a warp, each of which arrives when its copies are complete.
const LANES: u32 = 32;

/// A ring whose slots a warp fills by [`Builder::copy_async`], and another warp passes on.
#[derive(Clone, Debug)]
pub struct CopiedRing<'k, const N: usize> {
    ring: Ring<'k, N>,
    /// The mbarriers of slots whose copies are complete.
    landed: Region,
}

impl Builder {
    /// Declares a ring of `stages` slots with these tiles, which one warp fills by copies of 16 bytes a thread, another
    /// one fences, and `consumers` warps empty.
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
    /// The ring as its consumers have it.
    pub fn ring(&self) -> &Ring<'k, N> {
        &self.ring
    }

    /// The place of the warp that copies: all slots are empty.
    #[track_caller]
    pub fn copier(&self) -> Copier<'k, N> {
        Copier { cursor: Cursor::new(&self.ring, 1), landed: self.landed }
    }

    /// The place of the warp that passes slots on.
    #[track_caller]
    pub fn fencer(&self) -> Fencer<'k, N> {
        Fencer { cursor: Cursor::new(&self.ring, 0), landed: self.landed }
    }
}

/// Fills a ring by copies; a warp has it.
#[derive(Debug)]
pub struct Copier<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<'k, const N: usize> Copier<'k, N> {
    /// Waits until the next slot is empty, and runs `copy`, which begins to copy to its tiles, in all lanes.
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

/// Passes on the slots of a ring; a warp has it.
#[derive(Debug)]
pub struct Fencer<'k, const N: usize> {
    cursor: Cursor<'k, N>,
    landed: Region,
}

impl<const N: usize> Fencer<'_, N> {
    /// Waits until the copies to the next slot are complete, and passes it to the consumers: products may read it.
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
