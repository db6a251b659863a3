//! Every integer decision of attention on a Hopper GPU.
//!
//! ```text
//! O[m] = Σ_j P[m, j] V[j]      j over the KV blocks that tile m of queries must visit
//! ```
//!
//! Which blocks those are under a mask, in which order tiles run and on which CTA, whether keys are split and
//! query heads packed, how large tiles are and whether they fit an SM. No floating-point types of a device, no
//! kernel, no driver: numbers in, numbers out.
//!
//! - [`Int`] is the integer algebra and [`FastDiv`] its division. Whatever a kernel must compute as well as
//!   the host is one generic function over them: `u32` runs it, a kernel builder's value emits it. The host's
//!   numbers enter a kernel by the `map` methods, as parameters or as literals.
//! - [`Tiling`] gives the KV range of a tile under every mask, [`KvRange::split`] a part of it.
//! - [`Order`] and its [`Decoder`] number the tiles of equal sequences, [`Run`]s those of unequal ones;
//!   [`Scheduler`] deals them out.
//! - [`TileRow`] is a row of the tile table: its [`CtaTile`], which takes registers and shared memory, and what
//!   it serves.
//! - [`num_splits`] and [`packs_gqa`] are the heuristics.
//! - [`Plan`] puts all of it together for a [`fa3_types::Problem`], [`PlanOptions`] overrule it; [`Makespan`] says
//!   how well the tiles fill a device, [`certified_bound`] how well they could, [`OrderComparison`] what an
//!   order is worth.
//!
//! ```
//! use fa3_sched::{DeviceLimits, Plan};
//! use fa3_types::{Dtype, ProblemSpec, Shape};
//!
//! // 4096 rows, 8 heads, 4 sequences in tiles of 192 rows: 704 tiles for the 132 SMs of an H100.
//! let shape = Shape { batch: 4, seqlen: 4096, heads: 8, head_dim: 128 };
//! let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).validate()?;
//! let plan = Plan::new(&problem, &DeviceLimits::h100_sxm())?;
//! assert_eq!((plan.num_tiles, plan.grid), (704, 132));
//!
//! // Each CTA computes 5 or 6 of them.
//! let schedule = plan.simulate();
//! let tiles_of = |cta| schedule.spans().iter().filter(|span| span.cta == cta).count();
//! assert!((0..132).all(|cta| [5, 6].contains(&tiles_of(cta))));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

// Integers that a kernel can compute too.
#[cfg(test)]
mod checked;
mod div;

// Which tiles there are, what each visits, in which order they run, and where.
mod order;
mod range;
mod scheduler;

// How large tiles are, and what decides it.
mod budget;
mod limits;
mod shape;
mod splits;
mod table;
mod tiles;

// All of it for one problem, and how good it is.
mod compare;
mod error;
mod makespan;
mod plan;
mod runs;

pub use budget::{
    Accumulators, LOADING_RESERVE, REGISTER_POOL, REGISTER_RESERVE, Registers, SMEM_RESERVE, Smem,
};
pub use compare::{OrderComparison, OrderTable};
pub use div::FastDiv;
pub use error::PlanError;
pub use fa3_types::Int;
pub use limits::DeviceLimits;
pub use makespan::{Makespan, Span, TILE_COST, certified_bound, lower_bound};
pub use order::{Decoder, Longest, Order, Tile, TileCounts};
pub use plan::{Cost, Plan, PlanOptions, Work, Workspace};
pub use range::{KvRange, Lens, Tiling, VisibleKeys};
pub use runs::Run;
pub use scheduler::{Scheduler, is_last_ticket, next_dynamic, next_static};
pub use shape::{CtaTile, Inputs, Loads, Overlap, PPlace, Rescale};
pub use splits::{SplitQuery, TileGroup, num_splits, packs_gqa};
pub use tiles::{MaskClass, TileQuery, TileRow};
