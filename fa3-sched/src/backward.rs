//! Plans of the backward pass: three kernels, each with its tiles, their order and their scheduler.
//!
//! - A kernel of row statistics computes D = rowsum(dO ∘ O) - dLSE, and LSE in base 2.
//! - The dK/dV kernel has a tile of keys in a CTA, which walks over the blocks of rows that see them: [`DkvTile`].
//! - The dQ kernel has a tile of rows in a CTA, which walks over the blocks of keys that they see: [`DqTile`].
//!
//! No kernel adds to what another CTA has written, so that gradients are the same bits in every run. P and dS are
//! computed twice for that: seven products in place of five.
//!
//! [`Plan`] decides everything for a [`fa3_types::BackwardProblem`]; [`PlanOptions`] override single decisions.

mod error;
mod options;
mod plan;
mod tile;

pub use error::{PlanError, TileError};
pub use options::PlanOptions;
pub use plan::{Part, Plan, STATS_ROWS};
pub use tile::{Division, DkvTile, DqTile};
