//! Tiles that are found through a table in the device's memory: sequences whose lengths are data.

use std::fmt;

use fa3_types::{Granularity, Problem, TensorDesc, TensorName};

use super::Asked;
use crate::forward::{Loads, PlanError};
use crate::packed::{self, MemoryRows, Sections, Side};
use crate::{Longest, Order, Scheduler, TooManyTiles};

/// Tiles are found by a division that is exact for numbers below this.
const TILE_LIMIT: u32 = 1 << 24;

/// The tiles of sequences that a table lists.
#[derive(Clone, Debug)]
pub struct Listed {
    table: packed::Plan,
    order: Order,
    heads: u32,
    section: u32,
    grid: u32,
    rows: [MemoryRows; 3],
}

impl Listed {
    /// Whether lengths of the problem are data.
    pub(super) fn serves(problem: &Problem) -> bool {
        [problem.seqs_q(), problem.seqs_k()].into_iter().any(|x| x.is_packed() || x.has_used())
    }

    /// Decides everything about them.
    pub(super) fn new(asked: &Asked<'_>) -> Result<Listed, PlanError> {
        let &Asked { problem, tile, sms, options, .. } = asked;
        match options.scheduler {
            None | Some(Scheduler::DynamicPersistent) => {}
            Some(scheduler) => return Err(PlanError::ListedScheduler { scheduler }),
        }
        if tile.loads != Loads::Producer {
            return Err(PlanError::NoProducer { scheduler: Scheduler::DynamicPersistent });
        }
        if options.clusters == Some(true) {
            return Err(PlanError::ListedClusters);
        }
        if let Some(scales) = problem.scales().into_iter().find(|&scales| scales != Granularity::Head) {
            return Err(PlanError::ListedScales { scales });
        }
        if tile.precision.is_fp8() && !tile.precision.transposes_v() {
            return Err(PlanError::ListedTransposedV);
        }
        let sides = [(problem.seqs_q(), problem.q()), (problem.seqs_k(), problem.k())];
        let sides = sides.map(|(sequences, tensor)| Side::of(sequences, tensor.shape.seqlen));
        let table = packed::Plan::new(problem.batch(), sides, [tile.tile_m, tile.tile_n], problem.mask())?;
        let heads = problem.heads().q() as u32;
        let tiles = u128::from(table.capacity()) * u128::from(heads);
        if tiles > u128::from(TILE_LIMIT) {
            return Err(TooManyTiles { tiles, limit: TILE_LIMIT }.into());
        }
        let longest = Longest::from(problem.mask());
        let section = match options.order {
            None => section(problem, tile.tile_m, sms.get()),
            // Within a sequence, tiles of a group of heads come one after the other.
            Some(Order::Linear) => problem.heads().group_size() as u32,
            Some(Order::LongestFirst { section, longest: given })
                if given == longest && heads % section == 0 =>
            {
                section
            }
            Some(order) => return Err(PlanError::ListedOrder { order, heads }),
        };
        let rows = |name, tensor: &TensorDesc| {
            MemoryRows::of(tensor).map_err(|source| PlanError::ListedRows { tensor: name, source })
        };
        let rows = [
            rows(TensorName::Q, problem.q())?,
            rows(TensorName::K, problem.k())?,
            rows(TensorName::V, problem.v())?,
        ];
        let grid = if problem.q().extent().0 == 0 { 0 } else { sms.get().min(tiles as u32) };
        Ok(Listed { table, order: Order::LongestFirst { section, longest }, heads, section, grid, rows })
    }

    /// The table.
    pub fn table(&self) -> &packed::Plan {
        &self.table
    }

    /// How the heads of a sequence are numbered.
    pub fn sections(&self) -> Sections<u32> {
        Sections::new(self.heads, self.section)
    }

    /// The order of a sequence's tiles. Sequences come by the longest of their tiles.
    pub fn order(&self) -> Order {
        self.order
    }

    /// Number of CTAs; 0 if Q has no elements, and then nothing is to be launched.
    pub fn grid(&self) -> u32 {
        self.grid
    }

    /// The rows of Q, K and V in memory.
    pub fn rows(&self) -> [MemoryRows; 3] {
        self.rows
    }

    /// Writes how many tiles there are, and how they reach CTAs of so many threads.
    pub(super) fn write_tiles(&self, f: &mut fmt::Formatter<'_>, threads: u32) -> fmt::Result {
        let (scheduler, grid) = (Scheduler::DynamicPersistent, self.grid);
        writeln!(f, "scheduler  {scheduler}, {grid} CTAs of {threads} threads")?;
        let (count, most) = (self.table.count(), self.table.capacity() * self.heads);
        writeln!(f, "tiles      at most {most}, by a table of {count} sequences that a kernel writes before")
    }

    /// Writes what they take of the device's memory.
    pub(super) fn write_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "memory     4 bytes for the tile counter, and {} for the table", 4 * self.table.words())
    }
}

/// Heads a section: as for sequences of one length ([`Order`]) that are as long as the longest is said to be, but a
/// number that divides all heads.
fn section(problem: &Problem, tile_m: u32, sms: u32) -> u32 {
    let (heads, group) = (problem.heads().q() as u32, problem.heads().group_size() as u32);
    // Below 2³¹ in every problem.
    let head_tiles = (problem.longest().q as u32).div_ceil(tile_m).max(1);
    let wanted = sms.div_ceil(2).div_ceil(head_tiles);
    (1..=heads / group)
        .map(|kv| kv * group)
        .find(|&section| section >= wanted && heads % section == 0)
        .unwrap_or(heads)
}
