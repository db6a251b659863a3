#![doc = include_str!("../README.md")]
//!
//! # What is here
//!
//! Every operation shares:
//!
//! - [`Int`], the integer algebra, and [`FastDiv`], its division. Code that both host and kernel run is one generic
//!   function over them: `u32` runs it, a kernel builder's value emits it as instructions. The host's numbers enter a
//!   kernel by the `map` methods, as parameters or as literals.
//! - [`Tiling`], which gives the KV range of a tile under every mask.
//! - [`Order`] and its [`Decoder`], which number tiles; [`Scheduler`], the tile scheduler, which assigns them to CTAs;
//!   [`Schedule`], all of these for one launch on a device with [`DeviceLimits`].
//! - [`Makespan`], which says how well tiles fill a device, and [`certified_bound`], which says how well they could
//!   fill it.
//! - [`packed`], the table through which a kernel finds the tiles of packed sequences (varlen), whose lengths only the
//!   device knows.
//!
//! Each operation has a module: [`forward`] plans the forward pass, [`backward`] its gradients, [`quantize`] the
//! conversion of a tensor to e4m3, [`fp8`] attention in 8 bits over 16-bit tensors, [`combine`] the merge of partial
//! results, [`append`] an append to a KV cache, and [`cached`] an append and the attention after it.
#![forbid(unsafe_code)]

// Integers with which a kernel can compute as well.
#[cfg(test)]
mod checked;
mod div;

// Tiles, the blocks that they visit, their order, and their CTAs.
mod block_ranges;
mod decoder;
mod dense;
mod limits;
mod lists;
mod makespan;
mod order;
mod range;
mod schedule;
mod scheduler;
mod work_decomposition;

// Plans of operations.
pub mod append;
pub mod backward;
pub mod cached;
pub mod combine;
pub mod forward;
pub mod fp8;
pub mod packed;
pub mod quantize;

pub use block_ranges::{BlockRange, BlockRanges, Bounds, keys_of_interval, num_ranges};
pub use decoder::{Decoder, TileCoord, TileCounts, TooManyTiles};
pub use div::FastDiv;
pub use fa3_types::Int;
pub use limits::DeviceLimits;
pub use lists::{ListBlock, ListLens, ListedRows};
pub use makespan::{Makespan, Span, TILE_COST, certified_bound, lower_bound};
pub use order::{Longest, Order};
pub use range::{KvRange, SeqLens, Tiling, VisibleKeys};
pub use schedule::Schedule;
pub use scheduler::{Scheduler, next_dynamic, next_static};
pub use work_decomposition::{
    CtaSplit, EqualSequences, IterationSpace, Split, Splits, WorkDecomposition, WorkUnits,
};
