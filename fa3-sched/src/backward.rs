//! Plans of the backward pass: three kernels, each with its tiles, their order and their scheduler.
//!
//! 1. A kernel of row statistics computes D = rowsum(dO ∘ O) - dLSE, and LSE in base 2.
//! 2. The dK/dV kernel has a tile of keys in a CTA, which walks over the blocks of rows that see them: [`DkvTile`].
//! 3. dQ is computed in one of two ways, [`DqBy`]:
//!    - A kernel has a tile of rows in a CTA, which walks over the blocks of keys that they see: [`DqTile`]. No kernel
//!      adds to what another CTA has written, so that gradients are the same bits in every run. P and dS are computed
//!      twice for that: seven products in place of five.
//!    - The dK/dV kernel adds its part of dQ to sums in f32, and a last kernel rounds them. The order of the additions,
//!      and with it the last bits of dQ, differ from run to run.
//!
//! [`Plan`] decides everything for a [`fa3_types::BackwardProblem`]; [`PlanOptions`] override single decisions.

mod error;
mod options;
mod plan;
mod tile;

pub use error::{PlanError, TileError};
pub use options::PlanOptions;
pub use plan::{DqBy, Part, Plan, STATS_ROWS};
pub use tile::{ADDED_ROWS, Division, DkvTile, DqTile};
