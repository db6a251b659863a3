//! Stages that their producer fills.

use std::panic::Location;

use super::{Pipeline, StageIndex};
use crate::lang::{Arg, B16, B32, B64, Builder, Coords, Pred, Tile, TileMap, V};
use crate::watch::DutyId;
use crate::{Fault, FenceInst, LoadOptions, SharedAddr};

/// A stage that its producer fills.
#[must_use = "a stage must be committed"]
#[derive(Debug)]
pub struct EmptyStage<'k, const N: usize> {
    builder: &'k Builder,
    pipeline: String,
    tiles: [Tile<'k, 'k>; N],
    full: SharedAddr,
    bytes: u32,
    due: DutyId,
}

impl<'k, const N: usize> EmptyStage<'k, N> {
    #[track_caller]
    pub(super) fn new(pipeline: Pipeline<'k, N>, index: StageIndex<'k>, due: DutyId) -> EmptyStage<'k, N> {
        let full = pipeline.barrier(pipeline.full, index);
        let (builder, tiles) = (pipeline.builder, pipeline.tiles(index));
        EmptyStage { builder, tiles, pipeline: pipeline.name, full, bytes: 0, due }
    }

    /// Begins to load tile `index`, and counts its bytes once: the call belongs in the block that acquired the stage
    /// (V-25).
    #[track_caller]
    pub fn load(&mut self, index: usize, map: &TileMap, coords: impl Coords) {
        self.load_with(index, map, coords, LoadOptions::default());
    }

    /// Loads a tile like [`EmptyStage::load`], with options.
    #[track_caller]
    pub fn load_with(&mut self, index: usize, map: &TileMap, coords: impl Coords, options: LoadOptions) {
        let Some(tile) = self.counted(index, None) else { return };
        let _one = self.builder.as_one();
        self.builder.load_tile(tile, map, coords, self.full, options);
    }

    /// Begins to load the first rows of tile `index`, as many as `map` copies. The other rows stay unchanged.
    #[track_caller]
    pub fn load_first_rows(&mut self, index: usize, map: &TileMap, coords: impl Coords) {
        let _one = self.builder.as_one();
        let Some(tile) = self.counted(index, Some(map.shape().rows)) else { return };
        self.builder.load_tile(tile, map, coords, self.full, LoadOptions::default());
    }

    /// Begins to load tile `index` in blocks of as many rows as `map` copies. `coords` has the coordinates of each
    /// block, from the first rows on.
    #[track_caller]
    pub fn load_blocks<C: Coords>(
        &mut self,
        index: usize,
        map: &TileMap,
        coords: impl IntoIterator<Item = C>,
    ) {
        let _one = self.builder.as_one();
        let Some(tile) = self.counted(index, None) else { return };
        let rows = map.shape().rows;
        let mut count = 0;
        for coords in coords {
            let block = tile.rows(count * rows, rows);
            self.builder.load_tile(block, map, coords, self.full, LoadOptions::default());
            count += 1;
        }
        if count * rows != tile.shape().rows {
            self.builder.misfit("blocks of a tile", format!("{count} of {rows} rows"), tile.shape());
        }
    }

    /// Begins to load all bytes of tile `index` from global memory, in the order in which they lie.
    #[track_caller]
    pub fn load_flat(&mut self, index: usize, from: V<'k, B64>) {
        let Some(tile) = self.counted(index, None) else { return };
        let _one = self.builder.as_one();
        self.builder.bulk_load(tile.address, from, tile.shape().bytes(), self.full, LoadOptions::default());
    }

    /// Returns tile `index`, or its first `rows` rows, and adds its bytes to the bytes that the stage expects.
    #[track_caller]
    fn counted(&mut self, index: usize, rows: Option<u32>) -> Option<Tile<'k, 'k>> {
        let source = self.builder.source();
        let what = format!("a tile of pipeline {} is loaded", self.pipeline);
        self.builder.watch().part(self.due, what, source);
        let Some(&tile) = self.tiles.get(index) else {
            let what = "tile of a stage";
            self.builder.fault(Fault::Unknown { what, index: index as u32, count: N });
            return None;
        };
        let tile = rows.map_or(tile, |rows| tile.rows(0, rows));
        self.bytes = self.bytes.saturating_add(tile.shape().bytes());
        Some(tile)
    }

    /// Begins to load block `part` of tile `index` into this stage of every CTA in `mask`. A block has as many rows as
    /// `map` copies. The other CTAs load the tile's other blocks.
    #[track_caller]
    pub fn load_part(
        &mut self,
        index: usize,
        map: &TileMap,
        coords: impl Coords,
        part: impl Arg<Ty = B32>,
        mask: impl Arg<Ty = B16>,
    ) {
        let Some(tile) = self.counted(index, None) else { return };
        let _one = self.builder.as_one();
        let block = tile.row_block(part, map.shape().rows);
        self.builder.load_tile(block, map, coords, self.full, LoadOptions::multicast(mask));
    }

    /// The stage's tiles, to store to.
    pub fn tiles(&self) -> [Tile<'_, 'k>; N] {
        self.tiles
    }

    /// Commits what this warp has stored: products may read the stage when all storing warps have committed.
    #[track_caller]
    pub fn commit_stored(self) {
        let _one = self.builder.as_one();
        self.fence();
        self.commit_unfenced();
    }

    /// Orders this thread's stores before products that read the stage after its commit.
    #[track_caller]
    pub fn fence(&self) {
        self.builder.fence(FenceInst::ProxyAsyncShared);
    }

    /// Commits the stage without a fence: consumers read it by ordinary loads, or this warp has executed a fence.
    #[track_caller]
    pub fn commit_unfenced(self) {
        let b = self.builder;
        b.watch().done(self.due, Location::caller());
        let _one = b.as_one();
        b.warp_sync();
        b.once_per_warp(|| b.mbarrier_arrive(self.full));
    }

    /// Commits like [`EmptyStage::commit_unfenced`] where `condition` holds. On every path through the kernel the
    /// condition must hold exactly once before [`EmptyStage::committed`]; the simulator checks that.
    #[track_caller]
    pub fn commit_if(&self, condition: impl Arg<Ty = Pred>) {
        let b = self.builder;
        let _one = b.as_one();
        b.warp_sync();
        b.guarded(b.elect() & condition, || b.mbarrier_arrive(self.full));
    }

    /// Says that [`EmptyStage::commit_if`] has committed the stage.
    #[track_caller]
    pub fn committed(self) {
        self.builder.watch().done(self.due, Location::caller());
    }

    /// Commits the stage: consumers may read it when all loads have arrived.
    #[track_caller]
    pub fn commit(self) {
        self.builder.watch().done(self.due, Location::caller());
        self.builder.mbarrier_arrive_expect(self.full, self.bytes);
    }
}
