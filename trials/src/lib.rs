//! Attention problems, the engines that compute them, and families of kernels with what is run of them.
//!
//! A [`Case`] is a problem and what its inputs are like; [`strategies`] makes random ones. An [`Engine`] computes a
//! case or [`Skip`]s it with a sentence; [`engines`] lists all there are. The [`Judge`] of a case applies the error law
//! of [`fa3_ref::law`]. [`reshape`] cuts and rearranges cases for properties that relate two calls with each other.
//!
//! A [`Family`] is an operation's kernels with what is run of them: [`Trial`]s in the simulator and on a GPU, a few
//! under many schedules, and mutants.
//!
//! The crate `fa3-tests` runs all this. Here is what takes time when it runs, and is optimised.
#![forbid(unsafe_code)]

use std::num::NonZeroU32;

use fa3_types::{Chunk, Mask};

pub mod append;
pub mod bwd;
pub mod cache;
pub mod canonical;
mod case;
pub mod combine;
mod covering;
mod engine;
pub mod facade;
mod family;
pub mod fwd;
pub mod intervals;
mod judge;
pub mod ladder;
pub mod memory;
pub mod mutate;
pub mod packed;
pub mod quantize;
pub mod reshape;
mod scales;
pub mod strategies;
mod trial;
mod values;

pub use case::Case;
pub use covering::{Levels, covering, covering_cases};
pub use engine::{Answer, Arithmetic, Engine, NoAnswer, Skip, emulated, engines};
pub use family::{Family, families};
pub use judge::{Judge, Verdict};
pub use scales::Scaled;
pub use trial::{Bits, Trial, simulate};
pub use values::{Dist, Poison, Values};

/// The mask of chunks of so many keys, in which a query sees so many behind its position, or all.
///
/// # Panics
/// If they have no keys.
pub const fn chunks(keys: u32, right: Option<u32>) -> Mask {
    let keys = NonZeroU32::new(keys).expect("a chunk has keys");
    Mask::Chunk { chunk: Chunk { keys, transposed: false }, left: None, right }
}
