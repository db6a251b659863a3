//! Outboxes: a tile of shared memory for each warpgroup, through which its results leave by tensor copies.
//!
//! [`Outbox::acquire`] waits until the copy before has read the tile; the [`Draft`] it gives is written and sent. What
//! must lie between the writes and the copy, a fence of every writing thread and a barrier, is in `send`.

use std::panic::Location;

use crate::watch::DutyId;
use crate::{Arg, B32, Builder, Coords, Fault, FenceInst, Region, Tile, TileMap, TileShape, V};

/// The tiles and barriers of some warpgroups.
#[derive(Clone, Debug)]
pub struct Outboxes {
    name: String,
    region: Region,
    shape: TileShape,
    warpgroups: u32,
    first: u32,
}

/// One warpgroup's outbox.
#[derive(Debug)]
pub struct Outbox {
    name: String,
    tile: Tile<'static>,
    /// The number of its barrier.
    barrier: V<B32>,
}

/// A tile that may be written.
#[must_use = "a draft must be sent"]
#[derive(Debug)]
pub struct Draft {
    tile: Tile<'static>,
    barrier: V<B32>,
    due: DutyId,
}

impl Builder {
    /// Declares outboxes of this shape for `warpgroups` warpgroups.
    #[track_caller]
    pub fn outboxes(&mut self, name: &str, shape: TileShape, warpgroups: u32) -> Outboxes {
        let region = self.tiles(name, warpgroups, shape);
        let first = self.barriers(name, warpgroups, 128);
        Outboxes { name: name.to_owned(), region, shape, warpgroups, first }
    }
}

impl Outboxes {
    /// That of warpgroup `index`; an index that is computed is not checked.
    #[track_caller]
    pub fn of(&self, b: &mut Builder, index: impl Arg<Ty = B32>) -> Outbox {
        let last = index.operand().constant().unwrap_or(0);
        if last >= self.warpgroups {
            b.fault(Fault::Unknown { what: "outbox", index: last, count: self.warpgroups as usize });
        }
        b.as_one(|b| {
            let start = b.address(self.region);
            let place = b.mad_u32(index, self.shape.bytes(), start).at(0);
            let barrier = b.add(index, self.first);
            Outbox { name: self.name.clone(), tile: Tile::new(self.shape, place), barrier }
        })
    }
}

impl Outbox {
    /// Waits until the copy before has read the tile.
    #[track_caller]
    pub fn acquire(&self, b: &mut Builder) -> Draft {
        let source = Location::caller();
        b.as_one(|b| {
            b.once_per_warpgroup(|b| b.bulk_wait_read(0));
            b.sync_computed(self.barrier, 128);
        });
        let due = b.watch.due(format!("a draft of outbox {} is sent", self.name), source);
        Draft { tile: self.tile, barrier: self.barrier, due }
    }

    /// Waits until every copy has read its tile: shared memory must outlive them.
    #[track_caller]
    pub fn drain(self, b: &mut Builder) {
        b.as_one(|b| b.once_per_warpgroup(|b| b.bulk_wait_read(0)));
    }
}

impl Draft {
    /// Where to write.
    pub fn tile(&self) -> Tile<'_> {
        self.tile
    }

    /// Begins to store what was written.
    #[track_caller]
    pub fn send(self, b: &mut Builder, map: &TileMap, coords: impl Coords) {
        self.copy(b, |b, tile| b.store_tile(tile, map, coords));
    }

    /// Begins to add what was written to what is there.
    #[track_caller]
    pub fn send_add(self, b: &mut Builder, map: &TileMap, coords: impl Coords) {
        self.copy(b, |b, tile| b.add_tile(tile, map, coords));
    }

    #[track_caller]
    fn copy(self, b: &mut Builder, copy: impl FnOnce(&mut Builder, Tile<'static>)) {
        b.watch.done(self.due, Location::caller());
        b.as_one(|b| {
            b.fence(FenceInst::ProxyAsyncShared);
            b.sync_computed(self.barrier, 128);
            b.once_per_warpgroup(|b| {
                copy(b, self.tile);
                b.bulk_commit();
            });
        });
    }
}
