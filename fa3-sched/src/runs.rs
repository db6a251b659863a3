//! Numbering the tiles of a batch whose sequences differ in length.

use std::cmp::Reverse;

use fa3_types::Problem;

use crate::{CtaTile, Decoder, Int, Lens, Order, PlanError, Tile, TileCounts, TileGroup, Tiling};

/// Tiles are numbered with 31 bits.
pub(crate) const TILE_LIMIT: u32 = i32::MAX as u32;

/// Consecutive sequences of equal lengths, whose tiles are numbered consecutively. A dense batch is one run; a
/// batch of unequal sequences is a table of runs, and a tile belongs to the last run that starts at or before
/// it. That search is the host's for now (a kernel would do it in a table in memory); all that follows is
/// generic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run<T> {
    /// The number of its first tile.
    pub first_tile: T,
    /// Its first sequence.
    pub first_batch: T,
    /// The lengths of each of its sequences.
    pub lens: Lens<T>,
    /// Its tiles, numbered from 0.
    pub decoder: Decoder<T>,
}

impl<T> Run<T> {
    /// The same run with `f` applied to each of its numbers in a fixed order: see [`crate::FastDiv::map`].
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> Run<U> {
        Run {
            first_tile: f(self.first_tile),
            first_batch: f(self.first_batch),
            lens: Lens { q: f(self.lens.q), k: f(self.lens.k) },
            decoder: self.decoder.map(f),
        }
    }
}

impl<T: Int> Run<T> {
    /// What tile number `index`, one of this run's, computes.
    pub fn decode(&self, index: T) -> Tile<T> {
        let tile = self.decoder.decode(index.sub_sat(self.first_tile));
        Tile { batch: self.first_batch + tile.batch, ..tile }
    }
}

/// Consecutive sequences of equal lengths, not yet numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Equals {
    pub(crate) first_batch: u32,
    pub(crate) batch: u32,
    pub(crate) lens: Lens<u32>,
}

impl Equals {
    /// The sequences of `problem` that have queries. Lengths and the batch are below 2³¹ in every problem.
    pub(crate) fn of(problem: &Problem) -> Vec<Equals> {
        let mut equals: Vec<Equals> = Vec::new();
        for first_batch in 0..problem.batch() as u32 {
            let len = problem.lengths(first_batch as usize);
            let lens = Lens { q: len.q as u32, k: len.k as u32 };
            match equals.last_mut() {
                _ if lens.q == 0 => {}
                Some(last) if last.lens == lens && last.first_batch + last.batch == first_batch => {
                    last.batch += 1;
                }
                _ => equals.push(Equals { first_batch, batch: 1, lens }),
            }
        }
        equals
    }
}

/// How a problem is cut into tiles.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut {
    pub(crate) tiling: Tiling<u32>,
    /// Rows that a tile computes. Those beyond the tiling's own have nothing in them.
    tile_m: u32,
    /// Query heads packed into a tile's rows.
    pack: u32,
    /// Heads that have tiles of their own: Q's, or K's if packed.
    heads: u32,
}

impl Cut {
    /// Packed tiles hold whole groups, so that one box of (group, positions) loads a tile of Q.
    ///
    /// # Errors
    /// [`PlanError::Packing`] if a group does not fit a tile, or if row numbers, rounded up to whole tiles, do not
    /// stay below 2³¹.
    pub(crate) fn new(
        problem: &Problem,
        shape: &CtaTile,
        packed: bool,
        equals: &[Equals],
    ) -> Result<Cut, PlanError> {
        let tile_m = shape.tile_m;
        let group = problem.heads().group_size() as u32;
        let pack = if packed { group } else { 1 };
        let refused = PlanError::Packing { group, tile_m };
        if pack > tile_m {
            return Err(refused);
        }
        let tiling = Tiling::new(tile_m / pack * pack, shape.tile_n, group, packed, problem.mask());
        let cut = Cut { tiling, tile_m, pack, heads: problem.heads().q() as u32 / pack };
        let rows = |equal: &Equals| u64::from(cut.m_blocks(equal)) * u64::from(tile_m);
        match packed && equals.iter().any(|equal| rows(equal) > TILE_LIMIT.into()) {
            true => Err(refused),
            false => Ok(cut),
        }
    }

    /// Tiles of one head of one sequence. Saturating: so many are refused anyway.
    pub(crate) fn m_blocks(&self, equal: &Equals) -> u32 {
        let rows = u64::from(equal.lens.q) * u64::from(self.pack);
        u32::try_from(rows.div_ceil(self.tiling.tile_m().into())).unwrap_or(u32::MAX)
    }

    fn counts(&self, equal: &Equals, splits: u32) -> TileCounts {
        TileCounts { m_blocks: self.m_blocks(equal), heads: self.heads, batch: equal.batch, splits }
    }

    /// All tiles.
    fn tiles(&self, equals: &[Equals], splits: u32) -> u128 {
        equals.iter().map(|equal| self.counts(equal, splits).tiles()).sum()
    }

    /// Rows of all tiles, padding included.
    pub(crate) fn padded_rows(&self, equals: &[Equals]) -> u128 {
        self.tiles(equals, 1) * u128::from(self.tile_m)
    }

    /// KV blocks of the longest tile.
    fn longest(&self, equal: &Equals) -> u32 {
        self.blocks(equal).max().unwrap_or(0)
    }

    /// KV blocks of each tile of one head of one sequence.
    fn blocks(&self, equal: &Equals) -> impl Iterator<Item = u32> + '_ {
        let lens = equal.lens;
        (0..self.m_blocks(equal)).map(move |m_block| self.tiling.kv_range(m_block, lens).blocks())
    }

    /// All tiles by their KV blocks, the most first. There must be fewer than 2³¹.
    pub(crate) fn groups(&self, equals: &[Equals]) -> Vec<TileGroup> {
        let mut groups: Vec<TileGroup> = Vec::new();
        for equal in equals {
            let tiles = u64::from(self.heads) * u64::from(equal.batch);
            for blocks in self.blocks(equal) {
                match groups.last_mut() {
                    Some(last) if last.blocks == blocks => last.tiles += tiles,
                    _ => groups.push(TileGroup { blocks, tiles }),
                }
            }
        }
        groups.sort_unstable_by_key(|group| Reverse(group.blocks));
        groups.dedup_by(|next, group| {
            let same = next.blocks == group.blocks;
            group.tiles += if same { next.tiles } else { 0 };
            same
        });
        groups
    }

    /// How many tiles there are, if they can be numbered.
    pub(crate) fn numbered_tiles(&self, equals: &[Equals], splits: u32) -> Result<u32, PlanError> {
        let tiles = self.tiles(equals, splits);
        u32::try_from(tiles)
            .ok()
            .filter(|&tiles| tiles <= TILE_LIMIT)
            .ok_or(PlanError::Tiles { tiles, limit: TILE_LIMIT })
    }

    /// Numbers all tiles: the runs, in the order of their tiles, and how many tiles there are.
    pub(crate) fn runs(
        &self,
        mut equals: Vec<Equals>,
        splits: u32,
        order: Order,
    ) -> Result<(Vec<Run<u32>>, u32), PlanError> {
        let tiles = self.numbered_tiles(&equals, splits)?;
        if let Order::LongestFirst { .. } = order {
            equals.sort_by_cached_key(|equal| Reverse(self.longest(equal)));
        }
        let mut first_tile = 0;
        let number = |equal: &Equals| {
            let counts = self.counts(equal, splits);
            let decoder = Decoder::new(counts, order);
            let run = Run { first_tile, first_batch: equal.first_batch, lens: equal.lens, decoder };
            first_tile += counts.tiles() as u32;
            run
        };
        Ok((equals.iter().map(number).collect(), tiles))
    }
}
