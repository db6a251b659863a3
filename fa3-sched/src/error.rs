//! Why a problem has no plan.

use fa3_types::Dtype;

use crate::{Inputs, PPlace};

/// What [`crate::Plan::new`] and [`crate::TileRow::find`] refuse. One sentence each, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlanError {
    #[error("no kernel takes {dtype}: Hopper's tensor cores multiply f16, bf16 and e4m3")]
    Dtype { dtype: Dtype },
    #[error("{consumers} warpgroups cannot compute tiles of {tile_m} x {tile_n} in {stages} stages")]
    TileShape { tile_m: u32, tile_n: u32, stages: u32, consumers: u32 },
    #[error(
        "a tile with head_dim {head_dim} and head_dim_v {head_dim_v} needs multiples of {multiple} and 8 \
         up to {limit}"
    )]
    TileHeadDim { head_dim: u32, head_dim_v: u32, multiple: u32, limit: u32 },
    #[error("a warpgroup cannot have {columns} columns of O of which it sums {promoted_columns} at a time")]
    TileColumns { columns: u32, promoted_columns: u32 },
    #[error("{consumers} warpgroups with {rows} rows in all cannot compute with {p_place}")]
    TilePPlace { p_place: PPlace, consumers: u32, rows: u32 },
    #[error("{consumers} warpgroups with {rows} rows in all cannot take turns")]
    TilePingPong { consumers: u32, rows: u32 },
    #[error(
        "under three-stage overlap O is in flight during the softmax, so that it cannot be rescaled lazily"
    )]
    TileRescale,
    #[error("no tile for {dtype} with head_dim {head_dim} and head_dim_v {head_dim_v} fits an SM")]
    HeadDim { dtype: Dtype, head_dim: usize, head_dim_v: usize },
    #[error(
        "the chosen tile takes {inputs} up to head_dim {most} and head_dim_v {most_v}, not {dtype} with \
         {head_dim} and {head_dim_v}"
    )]
    Row { inputs: Inputs, most: u32, most_v: u32, dtype: Dtype, head_dim: usize, head_dim_v: usize },
    #[error("{tiles} tiles are too many to number, the limit is {limit}")]
    Tiles { tiles: u128, limit: u32 },
    #[error("the tile needs {needed} bytes of shared memory, the device has {available}")]
    SharedMemory { needed: u32, available: u32 },
    #[error("the tile needs {needed} registers a thread, {available} are to be had")]
    Registers { needed: u32, available: u32 },
    #[error("{group} query heads do not pack into tiles of {tile_m} rows")]
    Packing { group: u32, tile_m: u32 },
    #[error("{splits} partial results of {bytes} bytes each are more than 2^64 bytes")]
    Workspace { splits: u32, bytes: u64 },
}
