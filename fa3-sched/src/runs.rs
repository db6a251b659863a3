//! Numbering the tiles of a batch whose sequences differ in length.

use std::cmp::Reverse;

use fa3_types::Problem;

use crate::{Decoder, Int, Lens, Order, PlanError, Tile, TileCounts, TileRow, Tiling};

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

impl Run<u32> {
    /// The same run with `f` applied to each of its numbers in a fixed order: see [`crate::FastDiv::map`].
    pub fn map<U>(self, mut f: impl FnMut(u32) -> U) -> Run<U> {
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
    tile_m: u32,
    /// Query heads packed into a tile's rows.
    pack: u32,
    /// Heads that have tiles of their own: Q's, or K's if packed.
    heads: u32,
}

impl Cut {
    pub(crate) fn new(problem: &Problem, row: &TileRow, packed: bool) -> Cut {
        let group = problem.heads().group_size() as u32;
        let pack = if packed { group } else { 1 };
        Cut {
            tiling: Tiling::new(row.tile_m, row.tile_n, group, packed, problem.mask()),
            tile_m: row.tile_m,
            pack,
            heads: problem.heads().q() as u32 / pack,
        }
    }

    /// Tiles of one head of one sequence. Saturating: so many are refused anyway.
    pub(crate) fn m_blocks(&self, equal: &Equals) -> u32 {
        let rows = u64::from(equal.lens.q) * u64::from(self.pack);
        u32::try_from(rows.div_ceil(self.tile_m.into())).unwrap_or(u32::MAX)
    }

    fn counts(&self, equal: &Equals, splits: u32) -> TileCounts {
        TileCounts { m_blocks: self.m_blocks(equal), heads: self.heads, batch: equal.batch, splits }
    }

    /// All tiles.
    pub(crate) fn tiles(&self, equals: &[Equals], splits: u32) -> u128 {
        equals.iter().map(|equal| self.counts(equal, splits).tiles()).sum()
    }

    /// Rows of all tiles, padding included.
    pub(crate) fn padded_rows(&self, equals: &[Equals]) -> u128 {
        self.tiles(equals, 1) * u128::from(self.tile_m)
    }

    /// Whether every row number, rounded up to whole tiles, stays below 2³¹.
    pub(crate) fn numbers_rows(&self, equals: &[Equals]) -> bool {
        let padded = |equal: &Equals| u64::from(self.m_blocks(equal)) * u64::from(self.tile_m);
        equals.iter().all(|equal| padded(equal) <= TILE_LIMIT.into())
    }

    /// KV blocks of the longest tile.
    pub(crate) fn longest(&self, equal: &Equals) -> u32 {
        let blocks = |m_block| self.tiling.kv_range(m_block, equal.lens).blocks();
        (0..self.m_blocks(equal)).map(blocks).max().unwrap_or(0)
    }

    /// Numbers all tiles: the runs, in the order of their tiles, and how many tiles there are.
    pub(crate) fn runs(
        &self,
        mut equals: Vec<Equals>,
        splits: u32,
        order: Order,
    ) -> Result<(Vec<Run<u32>>, u32), PlanError> {
        let tiles = self.tiles(&equals, splits);
        if tiles > TILE_LIMIT.into() {
            return Err(PlanError::Tiles { tiles, limit: TILE_LIMIT });
        }
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
        Ok((equals.iter().map(number).collect(), tiles as u32))
    }
}
