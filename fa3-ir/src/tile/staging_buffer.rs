//! Staging buffers for TMA stores, one tile of shared memory for each warpgroup.
//!
//! [`StagingBuffer::acquire`] waits until the previous copy has read the tile. It returns a [`StagedTile`], which is
//! written and stored. `store` does what must lie between the writes and the copy: a fence in every writing thread, and
//! a barrier.

use std::panic::Location;

use crate::lang::{Arg, B32, Builder, Coords, Tile, TileMap, TileShape, WarpgroupBarrier, WarpgroupBarriers};
use crate::watch::DutyId;
use crate::{Fault, FenceInst, Region};

/// The staging tiles and barriers of several warpgroups.
#[derive(Clone, Debug)]
pub struct StagingBuffers<'k> {
    builder: &'k Builder,
    name: String,
    region: Region,
    shape: TileShape,
    barriers: WarpgroupBarriers<'k>,
}

/// One warpgroup's staging tile.
#[derive(Debug)]
pub struct StagingBuffer<'k> {
    name: String,
    tile: Tile<'k, 'k>,
    barrier: WarpgroupBarrier<'k>,
}

/// A staging tile that may be written.
#[must_use = "a staged tile must be stored"]
#[derive(Debug)]
pub struct StagedTile<'k> {
    tile: Tile<'k, 'k>,
    barrier: WarpgroupBarrier<'k>,
    due: DutyId,
}

impl Builder {
    /// Declares staging tiles of this shape for `warpgroups` warpgroups.
    #[track_caller]
    pub fn staging_buffers(&self, name: &str, shape: TileShape, warpgroups: u32) -> StagingBuffers<'_> {
        let region = self.tiles(name, warpgroups, shape);
        let barriers = self.warpgroup_barriers(name, warpgroups, 1);
        StagingBuffers { builder: self, name: name.to_owned(), region, shape, barriers }
    }
}

impl<'k> StagingBuffers<'k> {
    /// The staging tile of warpgroup `index`. A computed index is not checked.
    #[track_caller]
    pub fn of(&self, index: impl Arg<Ty = B32>) -> StagingBuffer<'k> {
        let b = self.builder;
        let last = index.operand().constant().unwrap_or(0);
        if last >= self.barriers.len() {
            b.fault(Fault::Unknown {
                what: "staging buffer",
                index: last,
                count: self.barriers.len() as usize,
            });
        }
        let _one = b.as_one();
        let start = b.address(self.region);
        let address = b.mad(index, self.shape.bytes(), start).at(0);
        let barrier = self.barriers.number(index);
        StagingBuffer { name: self.name.clone(), tile: Tile::new(b, self.shape, address), barrier }
    }
}

impl<'k> StagingBuffer<'k> {
    /// Waits until the previous copy has read the tile.
    #[track_caller]
    pub fn acquire(&self) -> StagedTile<'k> {
        let b = self.tile.builder();
        let due = b
            .watch()
            .due(format!("a staged tile of staging buffer {} is stored", self.name), Location::caller());
        let _one = b.as_one();
        b.once_per_warpgroup(|| b.bulk_wait_read(0));
        self.barrier.sync();
        StagedTile { tile: self.tile, barrier: self.barrier, due }
    }

    /// Waits until every copy has read its tile, since shared memory must outlive the copies.
    #[track_caller]
    pub fn drain(self) {
        let b = self.tile.builder();
        let _one = b.as_one();
        b.once_per_warpgroup(|| b.bulk_wait_read(0));
    }
}

impl<'k> StagedTile<'k> {
    /// The tile to write.
    pub fn tile(&self) -> Tile<'_, 'k> {
        self.tile
    }

    /// Begins to store the tile.
    #[track_caller]
    pub fn store(self, map: &TileMap, coords: impl Coords) {
        let b = self.tile.builder();
        self.copy(|tile| b.store_tile(tile, map, coords));
    }

    /// Begins to add the tile to global memory.
    #[track_caller]
    pub fn store_add(self, map: &TileMap, coords: impl Coords) {
        let b = self.tile.builder();
        self.copy(|tile| b.add_tile(tile, map, coords));
    }

    #[track_caller]
    fn copy(&self, copy: impl FnOnce(Tile<'_, '_>)) {
        let b = self.tile.builder();
        b.watch().done(self.due, Location::caller());
        let _one = b.as_one();
        b.fence(FenceInst::ProxyAsyncShared);
        self.barrier.sync();
        b.once_per_warpgroup(|| {
            copy(self.tile);
            b.bulk_commit();
        });
    }
}
