//! Plans of the backward pass: two or three kernels, each with its tiles, their order and their scheduler.
//!
//! 1. A kernel of row statistics computes D = rowsum(dO ∘ O) - dLSE, and LSE in base 2.
//! 2. The dK/dV kernel has a tile of keys in a CTA, which walks over the blocks of rows that see them: [`DkvTile`].
//! 3. dQ is computed in one of three ways, [`DqBy`]:
//!    - The dK/dV kernel adds its part of dQ to sums in f32, in the order of keys: [`AddOrder`]. The last tile to add
//!      to a row writes dQ.
//!    - Tiles add in any order, so that the last bits of dQ differ from run to run, and a last kernel rounds the sums.
//!    - A kernel has a tile of rows in a CTA, which walks over the blocks of keys that they see: [`DqTile`]. It
//!      computes P and dS again: seven products in place of five. With wide heads there are no registers for additions.
//!
//! Gradients are the same bits in every run, except dQ that is added up in any order: [`MOST_KEYS_IN_ORDER`].
//!
//! [`Plan`] decides everything for a [`fa3_types::BackwardProblem`]; [`PlanOptions`] override single decisions.

mod error;
mod options;
mod plan;
mod seeing;
mod splits;
mod tile;

pub use error::{PlanError, TileError};
pub use options::PlanOptions;
pub use plan::{
    DqBy, Listed, MOST_KEYS_IN_ORDER, MOST_KEYS_IN_ORDER_GROUPED, MOST_KEYS_IN_ORDER_MASKED, Numbered, Part,
    Plan, STATS_ROWS, Way,
};
pub use seeing::Seeing;
pub use splits::{Splits, is_split, part};
pub use tile::{ADDED_ROWS, AddOrder, Division, DkvTile, DqTile};
