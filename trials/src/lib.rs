//! Attention problems, the engines that compute them, and the families of kernels with their tests.
//!
//! A [`Case`] is a problem with a description of its inputs; [`strategies`] makes random ones. An [`Engine`] computes a
//! case or gives a [`Skip`] with the reason; [`engines`] lists them all. The [`Judge`] of a case applies the error law
//! of [`fa3_ref::law`]. [`reshape`] slices and reorders cases for properties that relate two calls.
//!
//! A [`Family`] is the kernels of an operation with their tests: [`Trial`]s in the simulator and on a GPU, small ones
//! under many schedules, and mutants.
//!
//! The crate `fa3-tests` runs all of these tests. This crate holds the slow code and is built with optimization.
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
pub mod sparse;
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

/// A chunked mask. A query sees `right` keys of its chunk after its own position, or with `None` all later keys of its
/// chunk.
///
/// # Panics
/// If `keys` is 0.
pub const fn chunks(keys: u32, right: Option<u32>) -> Mask {
    let keys = NonZeroU32::new(keys).expect("a chunk has keys");
    Mask::Chunk { chunk: Chunk { keys, transposed: false }, left: None, right }
}
