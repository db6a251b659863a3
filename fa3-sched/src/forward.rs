//! Plans of the forward pass: the tile, the order of tiles, and their CTAs.
//!
//! - [`Plan`] decides everything for a [`fa3_types::Problem`]; [`PlanOptions`] override single decisions. A plan exists
//!   only if a kernel runs it; otherwise [`PlanError`] is the reason.
//! - [`TileRow`] is a row of the tile table: a [`CtaTile`], the registers and shared memory that it takes, and the
//!   problems that it serves.
//! - [`TablePlan`] plans the varlen table alone, which several forward passes may share.
//! - [`OrderComparison`] compares orders of tiles in a model of the device.

mod budget;
mod compare;
mod cta_tile;
mod error;
mod options;
mod pieces;
mod plan;
mod table;
mod table_plan;
mod tile_row;

pub use budget::{
    Accumulators, CONVERTED_SLOTS, FP8_REGISTER_RESERVE, LOADING_RESERVE, REGISTER_POOL, REGISTER_RESERVE,
    ROW_SUM_COLS, Registers, SMEM_RESERVE, Smem,
};
pub use compare::{OrderComparison, OrderTable};
pub use cta_tile::{CtaTile, Fp8Inputs, Loads, Pipeline, Precision};
pub use error::{PlanError, TileError};
pub use options::{PlanOptions, SplitKeys};
pub use pieces::{Pieces, RunningO};
pub use plan::{
    Cost, DensePlan, Plan, PlanKind, ReductionSource, SplitKvPlan, V_TILE_KEYS, VarlenPlan, Work,
    packed_positions,
};
pub use table_plan::TablePlan;
pub use tile_row::{MaskClass, TileRow};
