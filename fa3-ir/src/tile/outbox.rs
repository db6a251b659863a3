//! Outboxes: a tile of shared memory for each warpgroup or warp, through which its results leave by copies.
//!
//! [`Outbox::acquire`] waits until the previous copy has read the tile. It returns a [`Draft`], which is written and
//! sent. `send` has what must lie between the writes and the copy: a fence of every writing thread, and a barrier, of a
//! warp's the cheap one of the warp.

use std::panic::Location;

use crate::lang::{
    Arg, B32, B64, Builder, Coords, Pred, Tile, TileMap, TileShape, V, WarpgroupBarrier, WarpgroupBarriers,
};
use crate::watch::DutyId;
use crate::{Fault, FenceInst, Region};

/// The tiles of some warpgroups or warps.
#[derive(Clone, Debug)]
pub struct Outboxes<'k> {
    builder: &'k Builder,
    name: String,
    region: Region,
    shape: TileShape,
    count: u32,
    /// None of warps.
    barriers: Option<WarpgroupBarriers<'k>>,
}

/// One warpgroup's or warp's outbox.
#[derive(Debug)]
pub struct Outbox<'k> {
    name: String,
    tile: Tile<'k, 'k>,
    writers: Writers<'k>,
}

/// Who writes a tile.
#[derive(Clone, Copy, Debug)]
enum Writers<'k> {
    Warpgroup(WarpgroupBarrier<'k>),
    Warp,
}

/// A tile that may be written.
#[must_use = "a draft must be sent"]
#[derive(Debug)]
pub struct Draft<'k> {
    tile: Tile<'k, 'k>,
    writers: Writers<'k>,
    due: DutyId,
}

impl Builder {
    /// Declares outboxes of this shape for `warpgroups` warpgroups.
    #[track_caller]
    pub fn outboxes(&self, name: &str, shape: TileShape, warpgroups: u32) -> Outboxes<'_> {
        let region = self.tiles(name, warpgroups, shape);
        let barriers = Some(self.warpgroup_barriers(name, warpgroups, 1));
        Outboxes { builder: self, name: name.to_owned(), region, shape, count: warpgroups, barriers }
    }

    /// Declares outboxes of this shape for `warps` warps.
    #[track_caller]
    pub fn warp_outboxes(&self, name: &str, shape: TileShape, warps: u32) -> Outboxes<'_> {
        let region = self.tiles(name, warps, shape);
        Outboxes { builder: self, name: name.to_owned(), region, shape, count: warps, barriers: None }
    }
}

impl<'k> Outboxes<'k> {
    /// That of warpgroup or warp `index`; an index that is computed is not checked.
    #[track_caller]
    pub fn of(&self, index: impl Arg<Ty = B32>) -> Outbox<'k> {
        let b = self.builder;
        let last = index.operand().constant().unwrap_or(0);
        if last >= self.count {
            b.fault(Fault::Unknown { what: "outbox", index: last, count: self.count as usize });
        }
        let _one = b.as_one();
        let start = b.address(self.region);
        let address = b.mad(index, self.shape.bytes(), start).at(0);
        let writers = match &self.barriers {
            Some(barriers) => Writers::Warpgroup(barriers.number(index)),
            None => Writers::Warp,
        };
        Outbox { name: self.name.clone(), tile: Tile::new(b, self.shape, address), writers }
    }
}

impl Writers<'_> {
    /// Waits until all are here.
    #[track_caller]
    fn meet(&self, b: &Builder) {
        match self {
            Writers::Warpgroup(barrier) => barrier.sync(),
            Writers::Warp => b.warp_sync(),
        }
    }

    /// Runs `body` in one of their threads, always the same.
    #[track_caller]
    fn once(&self, b: &Builder, body: impl FnOnce()) {
        match self {
            Writers::Warpgroup(_) => b.once_per_warpgroup(body),
            Writers::Warp => b.once_per_warp(body),
        }
    }
}

impl<'k> Outbox<'k> {
    /// Waits until the copy before has read the tile.
    #[track_caller]
    pub fn acquire(&self) -> Draft<'k> {
        let b = self.tile.builder();
        let due = b.watch().due(format!("a draft of outbox {} is sent", self.name), Location::caller());
        let _one = b.as_one();
        self.writers.once(b, || b.bulk_wait_read(0));
        self.writers.meet(b);
        Draft { tile: self.tile, writers: self.writers, due }
    }

    /// Waits until every copy has read its tile: shared memory must outlive them.
    #[track_caller]
    pub fn drain(self) {
        let b = self.tile.builder();
        let _one = b.as_one();
        self.writers.once(b, || b.bulk_wait_read(0));
    }
}

impl<'k> Draft<'k> {
    /// Where to write.
    pub fn tile(&self) -> Tile<'_, 'k> {
        self.tile
    }

    /// Begins to store what was written.
    #[track_caller]
    pub fn send(self, map: &TileMap, coords: impl Coords) {
        let b = self.tile.builder();
        self.copy(|tile| b.store_tile(tile, map, coords));
    }

    /// Begins to add what was written to what is there.
    #[track_caller]
    pub fn send_add(self, map: &TileMap, coords: impl Coords) {
        let b = self.tile.builder();
        self.copy(|tile| b.add_tile(tile, map, coords));
    }

    /// Begins to add what was written, binary32 numbers, to as many in global memory, in the order in which they lie,
    /// where `condition`, on which all who write agree, holds.
    #[track_caller]
    pub fn send_add_flat_if(self, condition: V<'k, Pred>, to: V<'k, B64>) {
        let (b, bytes) = (self.tile.builder(), self.tile.shape().bytes());
        self.copy(|tile| b.if_lanes(condition, || b.bulk_reduce_add_f32(to, tile.address, bytes)));
    }

    #[track_caller]
    fn copy(&self, copy: impl FnOnce(Tile<'_, '_>)) {
        let b = self.tile.builder();
        b.watch().done(self.due, Location::caller());
        let _one = b.as_one();
        b.fence(FenceInst::ProxyAsyncShared);
        self.writers.meet(b);
        self.writers.once(b, || {
            copy(self.tile);
            b.bulk_commit();
        });
    }
}
