//! Why a problem has no plan.

use fa3_types::{Dtype, ProblemError, TensorName, UnknownFeature};

use crate::packed::NotInRows;
use crate::{TooManyTiles, packed};

/// Reasons why [`Plan::new`](super::Plan::new) refuses a problem or an option, each a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlanError {
    #[error(
        "the backward kernels take f16 and bf16 tensors of one type, not {dtype} with an output of {output}"
    )]
    Dtype { dtype: Dtype, output: Dtype },
    #[error(transparent)]
    Rows(#[from] Box<ProblemError>),
    #[error("the backward kernels have no tile for head_dim {head_dim} and head_dim_v {head_dim_v}")]
    HeadDim { head_dim: usize, head_dim_v: usize },
    #[error(
        "the given tile takes head_dim up to {most} and head_dim_v up to {most_v}, not {head_dim} and {head_dim_v}"
    )]
    Narrow { most: u32, most_v: u32, head_dim: usize, head_dim_v: usize },
    #[error(
        "dQ cannot have a tile of its own, as it is given, and be added to by the given tile of dK and dV"
    )]
    DqTwice,
    #[error(
        "blocks of {rows} rows of the dQ tile, which sequences whose lengths are data have, must be whole blocks of \
         {block} rows of the dK/dV tile"
    )]
    VarlenTiles { rows: u32, block: u32 },
    #[error("of sequences whose lengths are data the backward kernels take {tensor} with {source}")]
    VarlenRows { tensor: TensorName, source: NotInRows },
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    #[error("under a mask of intervals dQ is not added up in order, as the given tile adds it")]
    IntervalsInOrder,
    #[error(
        "under lists of blocks of {side} rows and keys, the given tile's blocks of {given} must divide them"
    )]
    BlocksTile { given: u32, side: usize },
    #[error("the backward kernels compute no gradient of t{table}: {why}")]
    TableGradient { table: usize, why: BiasError },
    #[error(
        "gradients of tables that are read by key or by distance need {bytes} bytes of workspace, more than {most}"
    )]
    LineSums { bytes: u64, most: u64 },
    #[error("gradients of tables need a dQ kernel, and the given dK/dV tile adds to dQ")]
    TablesWhereAdded,
    #[error(transparent)]
    Table(#[from] packed::PlanError),
    #[error(transparent)]
    Tile(#[from] TileError),
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
}

impl PlanError {
    /// Whether the problem itself is refused, so that only the CPU computes its gradients.
    pub fn is_cpu_only(&self) -> bool {
        match self {
            PlanError::Dtype { .. }
            | PlanError::Rows(_)
            | PlanError::VarlenRows { .. }
            | PlanError::Unknown(_)
            | PlanError::TableGradient { .. }
            | PlanError::LineSums { .. }
            | PlanError::HeadDim { .. } => true,
            PlanError::Narrow { .. }
            | PlanError::DqTwice
            | PlanError::IntervalsInOrder
            | PlanError::TablesWhereAdded
            | PlanError::BlocksTile { .. }
            | PlanError::VarlenTiles { .. }
            | PlanError::Table(_)
            | PlanError::Tile(_)
            | PlanError::Tiles(_) => false,
        }
    }
}

/// Reasons why kernels do not compute the gradient of a table that is read by query and key. Each ends a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum BiasError {
    #[error(
        "its indices depend on query and key in other ways than t[.., q + i, .., k + j, ..] with constants i and j"
    )]
    Indices,
    #[error("it is read by query and key, and elsewhere once more")]
    ReadTwice,
    #[error("it is read by query and key of sequences whose lengths are data")]
    Packed,
    #[error("it is read by query and key under lists of blocks")]
    Blocks,
    #[error("it is read from {first} to {last} along axis {axis}, which has {extent} elements")]
    Beyond { axis: usize, first: i64, last: i64, extent: usize },
}

/// Reasons why [`DkvTile::check`](super::DkvTile::check) and [`DqTile::check`](super::DqTile::check) refuse a tile,
/// each a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum TileError {
    #[error(
        "a tile cannot be of {tile_m} rows and {tile_n} keys: one side is 64 for each of one or two warpgroups, \
         the other a multiple of 16 up to 256, or 64 or 128 where two that share out keys add to dQ"
    )]
    Shape { tile_m: u32, tile_n: u32 },
    #[error(
        "a tile cannot have head_dim {head_dim} and head_dim_v {head_dim_v}, but multiples of 16 up to 256"
    )]
    HeadDim { head_dim: u32, head_dim_v: u32 },
    #[error("{given} stages of a pipeline, expected {least} to 16")]
    Stages { given: u32, least: u32 },
    #[error("the tile needs {needed} bytes of shared memory, the device has {available}")]
    SharedMemory { needed: u32, available: u32 },
    #[error("the tile needs {needed} registers a thread, {available} are to be had")]
    Registers { needed: u32, available: u32 },
}
