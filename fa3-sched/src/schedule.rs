//! The tiles of a launch, their order, and their CTAs.

use std::num::NonZeroU32;

use crate::{Decoder, Makespan, Order, Scheduler, TileCoord, TileCounts, TooManyTiles};

/// The part that the plans of all operations share: the tiles, their order, and the tile scheduler. Each operation
/// decides what a tile computes, and the cost of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    order: Order,
    scheduler: Scheduler,
    sms: NonZeroU32,
    tiles: u32,
    parts: u32,
    decoder: Option<Decoder<u32>>,
}

impl Schedule {
    /// Numbers the tiles `counts` in `order`, for a device with `sms` streaming multiprocessors.
    ///
    /// # Errors
    /// [`TooManyTiles`].
    pub fn new(
        counts: TileCounts,
        order: Order,
        scheduler: Scheduler,
        sms: NonZeroU32,
    ) -> Result<Schedule, TooManyTiles> {
        let tiles = counts.num_tiles()?;
        let decoder = (tiles > 0).then(|| Decoder::new(counts, order));
        Ok(Schedule { order, scheduler, sms, tiles, parts: 0, decoder })
    }

    /// Adds up to `parts` parts of tiles to the count. The device splits some of the tiles into these parts.
    #[must_use]
    pub fn split(self, parts: u32) -> Schedule {
        Schedule { parts, ..self }
    }

    /// The order of tiles.
    pub fn order(&self) -> Order {
        self.order
    }

    /// The tile scheduler.
    pub fn scheduler(&self) -> Scheduler {
        self.scheduler
    }

    /// The streaming multiprocessors that the CTAs may occupy.
    pub fn sms(&self) -> NonZeroU32 {
        self.sms
    }

    /// Number of tiles.
    pub fn num_tiles(&self) -> u32 {
        self.tiles
    }

    /// Number of CTAs; 0 if there is nothing to launch.
    pub fn grid(&self) -> u32 {
        if self.tiles == 0 {
            return 0;
        }
        self.scheduler.grid(self.tiles.saturating_add(self.parts), self.sms)
    }

    /// The numbering of tiles; `None` if there are no tiles.
    pub fn decoder(&self) -> Option<Decoder<u32>> {
        self.decoder
    }

    /// Tile number `index`, if it exists.
    pub fn tile(&self, index: u32) -> Option<TileCoord<u32>> {
        self.decoder.filter(|_| index < self.tiles).map(|decoder| decoder.decode(index))
    }

    /// All tiles in their order.
    pub fn tiles(&self) -> impl Iterator<Item = TileCoord<u32>> + use<> {
        let tiles = self.tiles;
        self.decoder.into_iter().flat_map(move |decoder| (0..tiles).map(move |index| decoder.decode(index)))
    }

    /// Simulates when and where tiles run. `costs` are in the order of tiles.
    pub fn simulate(&self, costs: &[u64]) -> Makespan {
        match self.scheduler {
            Scheduler::StaticPersistent => Makespan::round_robin(costs, self.sms),
            // The hardware gives the next CTA to a free SM, as a counter gives it the next tile.
            Scheduler::OneTile | Scheduler::DynamicPersistent => Makespan::greedy(costs, self.sms),
        }
    }

    /// Bytes of the tile counter of [`Scheduler::DynamicPersistent`], which must be 0 at every launch; 0 for other
    /// schedulers. The counter is part of a launch's workspace, in which every counter has 256 bytes.
    pub fn counter_bytes(&self) -> u64 {
        if self.scheduler == Scheduler::DynamicPersistent { 4 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Longest;

    const SMS: NonZeroU32 = NonZeroU32::new(132).unwrap();

    fn schedule(counts: TileCounts, scheduler: Scheduler) -> Schedule {
        let order = Order::LongestFirst { section: 2, longest: Longest::Last };
        Schedule::new(counts, order, scheduler, SMS).unwrap()
    }

    #[test]
    fn tiles_by_number_and_in_order() {
        let counts = TileCounts { m_blocks: 5, heads: 7, batch: 11 };
        let schedule = schedule(counts, Scheduler::DynamicPersistent);
        assert_eq!((schedule.num_tiles(), schedule.grid(), schedule.counter_bytes()), (385, 132, 4));
        let by_number: Vec<_> = (0..385).map(|index| schedule.tile(index).unwrap()).collect();
        assert!(schedule.tiles().eq(by_number));
        assert_eq!(schedule.tile(385), None);
        assert_eq!(schedule.simulate(&[1; 385]).length(), 3);
    }

    #[test]
    fn no_tiles() {
        let nothing = TileCounts { m_blocks: 0, heads: 7, batch: 11 };
        let schedule = schedule(nothing, Scheduler::OneTile);
        assert_eq!((schedule.num_tiles(), schedule.grid(), schedule.counter_bytes()), (0, 0, 0));
        assert_eq!((schedule.tile(0), schedule.decoder(), schedule.tiles().count()), (None, None, 0));
    }

    #[test]
    fn tiles_that_cannot_be_numbered() {
        let counts = TileCounts { m_blocks: 1 << 16, heads: 1 << 8, batch: 1 << 7 };
        let error = Schedule::new(counts, Order::Linear, Scheduler::OneTile, SMS).unwrap_err();
        assert_eq!(error, TooManyTiles { tiles: 1 << 31, limit: (1 << 31) - 1 });
        assert_eq!(error.to_string(), "2147483648 tiles are too many to number, the limit is 2147483647");
    }
}
