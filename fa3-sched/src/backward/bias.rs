//! The tile of the kernel that computes the gradient of a table that is read by query and key, and the tables for which
//! there is such a kernel.

use std::fmt;

use fa3_types::{Intervals, Lengths, LineAxis, Problem, ReadBy, TableRead};

use super::tile::{
    CONSUMER_REGISTERS, HEAD_DIM_STEP, PRODUCER_REGISTERS, SMEM_RESERVE, check_budget, check_head_dims,
    check_stages, is_block,
};
use super::{BiasError, PlanError, TileError};
use crate::DeviceLimits;
use crate::dense::dense_lens;

/// The tile of a kernel that computes the gradient of a table that is read by query and key: elements of
/// [`BiasTile::ROWS`] queries and some keys that stay, and a loop over the sequences and heads that read them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BiasTile {
    /// The largest head dimension of Q and K. Smaller ones are padded with zeros.
    pub head_dim: u32,
    /// The largest head dimension of V and O.
    pub head_dim_v: u32,
    /// Keys per tile.
    pub tile_n: u32,
    /// Pipeline stages of Q and K.
    pub qk_stages: u32,
    /// Pipeline stages of dO and V.
    pub dov_stages: u32,
}

impl BiasTile {
    /// Queries of a tile: 64 for each of two consumer warpgroups.
    pub const ROWS: u32 = 128;

    /// Chooses the tile for these head dimensions on this device: the most keys that fit, with as many stages as fit.
    /// `None` if nothing fits.
    pub fn choose(head_dim: u32, head_dim_v: u32, limits: &DeviceLimits) -> Option<BiasTile> {
        let [head_dim, head_dim_v] = [head_dim, head_dim_v].map(|dim| dim.next_multiple_of(HEAD_DIM_STEP));
        let mut tiles = [128, 112, 96, 80, 64].into_iter().flat_map(|tile_n| {
            let stages = [[2, 2], [2, 1], [1, 1]];
            stages.map(|[qk_stages, dov_stages]| BiasTile {
                head_dim,
                head_dim_v,
                tile_n,
                qk_stages,
                dov_stages,
            })
        });
        tiles.find(|tile| tile.check(limits).is_ok())
    }

    /// Number of consumer warpgroups.
    pub fn consumers(&self) -> u32 {
        BiasTile::ROWS / 64
    }

    /// Threads of a CTA: consumers, and a producer warpgroup.
    pub fn threads(&self) -> u32 {
        128 * (self.consumers() + 1)
    }

    /// Registers of a producer thread and of a consumer thread.
    pub fn registers(&self) -> [u32; 2] {
        [PRODUCER_REGISTERS, CONSUMER_REGISTERS]
    }

    /// Bytes of shared memory: stages of Q with K, and of dO with V.
    pub fn smem_bytes(&self) -> u32 {
        let columns = self.qk_stages * self.head_dim + self.dov_stages * self.head_dim_v;
        2 * (BiasTile::ROWS + self.tile_n) * columns + SMEM_RESERVE
    }

    /// Whether the tensor cores can compute the tile and an SM of the device can hold it.
    ///
    /// # Errors
    /// [`TileError`].
    pub fn check(&self, limits: &DeviceLimits) -> Result<(), TileError> {
        if !is_block(self.tile_n) {
            return Err(TileError::Shape { tile_m: BiasTile::ROWS, tile_n: self.tile_n });
        }
        check_head_dims(self.head_dim, self.head_dim_v)?;
        check_stages(self.qk_stages, 1)?;
        check_stages(self.dov_stages, 1)?;
        // Sums, S and dP.
        check_budget(3 * self.tile_n / 2, self.smem_bytes(), limits)
    }
}

impl fmt::Display for BiasTile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BiasTile { tile_n, qk_stages, dov_stages, .. } = self;
        write!(f, "{} rows, {tile_n} keys, ", BiasTile::ROWS)?;
        write!(f, "{qk_stages} stages of Q and K and {dov_stages} of dO and V")
    }
}

/// Checks that kernels compute the gradients of all tables that are read by query and key, or by the score.
pub(super) fn check_tables(forward: &Problem) -> Result<(), PlanError> {
    let Some(form) = forward.score() else { return Ok(()) };
    let reads = form.expr().table_reads(form.gradients());
    for TableRead { table, by, .. } in &reads {
        let refused = |why| PlanError::TableGradient { table: *table, why };
        let axes = match by {
            ReadBy::Head | ReadBy::Row | ReadBy::Key | ReadBy::Distance => continue,
            ReadBy::Score => return Err(refused(BiasError::Indices)),
            ReadBy::QueryAndKey { query, key } => [query, key],
        };
        if reads.iter().filter(|read| read.table == *table).count() > 1 {
            return Err(refused(BiasError::ReadTwice));
        }
        let Some(lens) = dense_lens(forward) else { return Err(refused(BiasError::Packed)) };
        if forward.mask().intervals().and_then(Intervals::block_side).is_some() {
            return Err(refused(BiasError::Blocks));
        }
        let lens = Lengths { q: lens.q as usize, k: lens.k as usize };
        for (LineAxis { axis, .. }, (first, count)) in
            axes.into_iter().zip(axes.map(|axis| axis.first(lens)).into_iter().zip([lens.q, lens.k]))
        {
            let (extent, end) = (form.extents()[*table][*axis], first + count as i64);
            if count > 0 && (first < 0 || end > extent as i64) {
                return Err(refused(BiasError::Beyond { axis: *axis, first, last: end - 1, extent }));
            }
        }
    }
    Ok(())
}
