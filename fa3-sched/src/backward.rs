//! Plans of the backward pass: two or three kernels, each with tiles, their order and a scheduler.
//!
//! 1. The statistics kernel computes D = rowsum(dO ∘ O) - dLSE, and LSE in base 2.
//! 2. The dK/dV kernel: a CTA holds a tile of keys and loops over the blocks of query rows that see them ([`DkvTile`]).
//! 3. dQ is computed in one of three ways ([`DqBy`]):
//!    - The dK/dV kernel adds its contributions to f32 sums, tile by tile in the order of keys ([`AddOrder`]). The last
//!      tile that adds to a row writes dQ.
//!    - The dK/dV kernel's tiles add in any order: dQ's last bits differ from run to run. A last kernel rounds sums.
//!    - A dQ kernel: a CTA holds a tile of query rows and loops over the blocks of keys that they see ([`DqTile`]). It
//!      recomputes P and dS: seven products in place of five. Wide heads take it, since they leave no registers for
//!      additions.
//!
//! Tables of a function of scores that are read by query and key have a further kernel for their gradients
//! ([`BiasTile`]).
//!
//! Gradients are bitwise reproducible, except for dQ where tiles add in any order: [`MOST_KEYS_IN_ORDER`] says when
//! they do.
//!
//! [`Plan`] decides everything for a [`fa3_types::BackwardProblem`]; [`PlanOptions`] override single decisions.

mod bias;
mod error;
mod options;
mod plan;
mod tile;
mod tile_split;
mod visible_q_blocks;

pub use bias::BiasTile;
pub use error::{BiasError, PlanError, TileError};
pub use options::PlanOptions;
pub use plan::{
    DensePlan, DqBy, MOST_KEYS_IN_ORDER, MOST_KEYS_IN_ORDER_GROUPED, MOST_KEYS_IN_ORDER_MASKED, Part, Plan,
    PlanKind, STATS_ROWS, SUMMED_ROWS, VarlenPlan, lines_of_block,
};
pub use tile::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile};
pub use tile_split::{TileSplit, is_split, part};
pub use visible_q_blocks::VisibleQBlocks;
