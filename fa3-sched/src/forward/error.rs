//! Why a problem has no plan.

use fa3_types::{Dtype, ProblemError, TensorName, UnknownFeature};

use super::Precision;
use crate::packed::{self, NotInRows, PagesError};
use crate::{Order, Scheduler, TooManyTiles, quantize};

/// Reasons why [`Plan::new`](super::Plan::new) refuses a problem, each a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum PlanError {
    #[error("the forward kernels take f16, bf16 and e4m3, not {dtype}")]
    Dtype { dtype: Dtype },
    #[error("the forward kernels write O in the type of Q, {dtype}, not in {output}")]
    Output { dtype: Dtype, output: Dtype },
    #[error(transparent)]
    Rows(#[from] Box<ProblemError>),
    #[error(
        "the forward kernels have no tile for head_dim {head_dim} and head_dim_v {head_dim_v}: of {precision} they \
         take up to {most} and {most_v}"
    )]
    HeadDim { head_dim: usize, head_dim_v: usize, precision: Precision, most: u32, most_v: u32 },
    #[error(
        "the forward kernels have no tile for qv with head_dim {head_dim} and head_dim_v {head_dim_v}: they take up \
         to {most} and {most_v}"
    )]
    Latent { head_dim: usize, head_dim_v: usize, most: u32, most_v: u32 },
    #[error("the given tile is for problems with{} qv, and this is none", if *takes { "" } else { "out" })]
    GivenLatent { takes: bool },
    #[error(
        "the given tile takes head_dim up to {most} and head_dim_v up to {most_v}, not {head_dim} and {head_dim_v}"
    )]
    Narrow { most: u32, most_v: u32, head_dim: usize, head_dim_v: usize },
    #[error("the given tile is for {given}, and the problem has {needed}")]
    Precision { given: Precision, needed: Precision },
    #[error("the {scheduler} scheduler takes a tile with a producer, which draws the tiles")]
    NoProducer { scheduler: Scheduler },
    #[error(
        "packed sequences, and such in part, are computed by the dynamic persistent scheduler, not {scheduler}"
    )]
    VarlenScheduler { scheduler: Scheduler },
    #[error("packed sequences, and such in part, are not computed in clusters")]
    VarlenClusters,
    #[error(
        "tiles of packed sequences, and of such in part, are in sections that divide {heads} heads, from the end with \
         the longer tiles on, not {order}"
    )]
    VarlenOrder { order: Order, heads: u32 },
    #[error(
        "a table is given for sequences of Q and of K that are packed, without intervals, and whose keys are not \
         shared by CTAs"
    )]
    GivenTable,
    #[error("{rows} rows of e4m3 belong to no sequence, and there is none")]
    VarlenNothing { rows: usize },
    #[error("packed sequences, and such in part, take V in rows, which is transposed in the kernel")]
    VarlenTransposedV,
    #[error("the forward kernels take {tensor} of sequences in part with {source}")]
    VarlenRows { tensor: TensorName, source: NotInRows },
    #[error("the quantization kernels take x of packed sequences with {0}")]
    Quantized(NotInRows),
    #[error("the forward kernels take {0}")]
    Pages(#[from] PagesError),
    #[error(
        "pages of a multiple of 8 rows of {precision} without padding before them: others are loaded row by row, and \
         converted to 16 bits"
    )]
    CachePrecision { precision: Precision },
    #[error(
        "scales of tokens and heads go with head_dim and head_dim_v up to {most}, not {head_dim} and {head_dim_v}"
    )]
    TokenScales { head_dim: usize, head_dim_v: usize, most: u32 },
    #[error("lists of keys take one row of Q for each list, not {rows}")]
    ListRows { rows: usize },
    #[error("listed rows of {tensor} lie within {limit} bytes, not {given}")]
    ListedBytes { tensor: TensorName, given: u64, limit: u64 },
    #[error("a split of {keys} keys is not one or several blocks of {block} keys")]
    SplitSize { keys: u64, block: u32 },
    #[error("splits of a fixed size and lists of keys have tiles of the plan's choice, and a tile is given")]
    SplitTile,
    #[error("{rows} rows of all heads are 2^32 or more, too many for splits of a fixed size")]
    SplitRows { rows: u128 },
    #[error(
        "a sequence may have {blocks} KV blocks in all of its tiles, more than {limit}, for splits of a fixed size and \
         for lists of keys"
    )]
    SplitBlocks { blocks: u64, limit: u32 },
    #[error("splits of a fixed size would leave {bytes} bytes of partial results, more than {limit}")]
    SplitMemory { bytes: u128, limit: u64 },
    #[error(
        "lists of blocks are computed by tiles whose keys are a listed block's, which there are none of for head_dim \
         {head_dim} and head_dim_v {head_dim_v}"
    )]
    BlocksTile { head_dim: usize, head_dim_v: usize },
    #[error("tiles under a mask of intervals are drawn by the dynamic persistent scheduler, not {scheduler}")]
    IntervalsScheduler { scheduler: Scheduler },
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    #[error("there are no splits of a fixed size: {0}")]
    FixedSizeSplits(UnknownFeature),
    #[error(transparent)]
    Table(#[from] packed::PlanError),
    #[error(transparent)]
    Tile(#[from] TileError),
    #[error(transparent)]
    Tiles(#[from] TooManyTiles),
}

impl From<quantize::PlanError> for PlanError {
    fn from(error: quantize::PlanError) -> PlanError {
        match error {
            quantize::PlanError::Tiles(error) => error.into(),
            quantize::PlanError::Rows(error) => PlanError::Quantized(error),
        }
    }
}

impl PlanError {
    /// Whether no forward kernel computes the problem, on any device and with any options. The CPU computes it.
    pub fn is_cpu_only(&self) -> bool {
        match self {
            PlanError::Dtype { .. }
            | PlanError::Output { .. }
            | PlanError::Rows(_)
            | PlanError::Latent { .. }
            | PlanError::Unknown(_)
            | PlanError::VarlenRows { .. }
            | PlanError::Quantized(_)
            | PlanError::CachePrecision { .. }
            | PlanError::Pages(_)
            | PlanError::BlocksTile { .. }
            | PlanError::TokenScales { .. }
            | PlanError::ListRows { .. }
            | PlanError::ListedBytes { .. }
            | PlanError::HeadDim { .. } => true,
            PlanError::Precision { .. }
            | PlanError::GivenLatent { .. }
            | PlanError::Narrow { .. }
            | PlanError::NoProducer { .. }
            | PlanError::VarlenScheduler { .. }
            | PlanError::VarlenClusters
            | PlanError::VarlenOrder { .. }
            | PlanError::VarlenNothing { .. }
            | PlanError::GivenTable
            | PlanError::VarlenTransposedV
            | PlanError::SplitSize { .. }
            | PlanError::SplitTile
            | PlanError::SplitRows { .. }
            | PlanError::SplitBlocks { .. }
            | PlanError::SplitMemory { .. }
            | PlanError::IntervalsScheduler { .. }
            | PlanError::FixedSizeSplits(_)
            | PlanError::Table(_)
            | PlanError::Tile(_)
            | PlanError::Tiles(_) => false,
        }
    }
}

/// Reasons why [`CtaTile::check`](super::CtaTile::check) refuses a tile, each a sentence with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum TileError {
    #[error("{consumers} warpgroups cannot compute tiles of {tile_m} x {tile_n} in {stages} stages")]
    Shape { tile_m: u32, tile_n: u32, stages: u32, consumers: u32 },
    #[error(
        "a tile cannot have head_dim {head_dim} and head_dim_v {head_dim_v}, but multiples of 16 up to {most} and \
         of 8 up to {most_v}"
    )]
    HeadDim { head_dim: u32, head_dim_v: u32, most: u32, most_v: u32 },
    #[error(
        "no tile of {precision} has head_dim_v {head_dim_v} for two warpgroups of the same rows in this form: \
         elements have 16 bits, head_dim_v is a multiple of 128, a producer loads, and products are paired, without \
         turns"
    )]
    Columns { head_dim_v: u32, precision: Precision },
    #[error(
        "no tile of {precision} has {stages} stages and head_dim_v {head_dim_v} with qv in this form: elements have 16 \
         bits, head_dim_v is a multiple of 16, a producer loads, and products are paired, with several stages"
    )]
    Latent { head_dim_v: u32, stages: u32, precision: Precision },
    #[error("{consumers} warpgroup cannot take turns")]
    PingPong { consumers: u32 },
    #[error(
        "no tile of e4m3 has {tile_n} keys and head_dim_v {head_dim_v} in this form: keys are a multiple of 32 up to 128 (64 \
         or 128 where blocks have scales), head_dim_v is a power of two from 32 on, a producer loads, products are serial or \
         paired, and paired ones take a head_dim_v of at most 128"
    )]
    Fp8 { tile_n: u32, head_dim_v: u32 },
    #[error(
        "no tile that converts e4m3 has {tile_n} keys, {consumers} consumers and head_dim {head_dim} and {head_dim_v} in \
         this form: keys are a multiple of 64, consumers one, or two up to 192 columns of V, head dimensions multiples of 32, \
         and a producer loads"
    )]
    Converted { tile_n: u32, consumers: u32, head_dim: u32, head_dim_v: u32 },
    #[error("the tile needs {needed} bytes of shared memory, the device has {available}")]
    SharedMemory { needed: u32, available: u32 },
    #[error("the tile needs {needed} registers a thread, {available} are to be had")]
    Registers { needed: u32, available: u32 },
}
