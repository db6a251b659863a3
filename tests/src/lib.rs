//! One suite of attention problems, many engines.
//!
//! ```text
//! |engine(case) − oracle(case)| ≤ what the error law allows, or the engine says why it skips the case
//! ```
//!
//! A [`Case`] is a problem and what its inputs are like: `testdata/*.toml` holds the chosen ones, [`strategies`] makes
//! random ones. An [`Engine`] computes a case or [`Skip`]s it with a sentence; [`engines`] lists all there are. The
//! [`Judge`] of a case applies the error law of [`fa3_ref::law`], and a [`Ledger`] keeps the score. [`reshape`]
//! cuts and rearranges cases for properties that relate two calls with each other.
//!
//! A [`Family`] is an operation's kernels with what is run of them: [`Trial`]s in the simulator and on a GPU, a few
//! under many schedules, and mutants.
//!
//! ```
//! use fa3_tests::{Judge, engines, testdata};
//!
//! let case = testdata::load("forward.toml").into_iter().find(|case| case.name == "one-query").unwrap();
//! let values = case.values();
//! let judge = Judge::new(&case, &values);
//! for engine in engines() {
//!     if let Ok(answer) = engine.forward(&case, &values) {
//!         judge.forward(engine.arithmetic(&case), &answer, "cargo test --doc -p fa3-tests").unwrap();
//!     }
//! }
//! ```
#![deny(unsafe_code)]

use std::num::NonZeroU32;

use fa3_types::{Chunk, Mask};

pub mod append;
pub mod bwd;
pub mod cache;
mod case;
pub mod combine;
mod covering;
mod engine;
mod family;
pub mod fwd;
pub mod gpu;
pub mod intervals;
mod judge;
pub mod ladder;
mod ledger;
pub mod lock;
pub mod micro;
pub mod mutate;
pub mod packed;
pub mod quantize;
pub mod reshape;
mod scales;
pub mod strategies;
pub mod testdata;
mod values;

pub use case::Case;
pub use covering::covering;
pub use engine::{Answer, Arithmetic, Engine, NoAnswer, Skip, emulated, engines};
pub use family::{Bits, Family, Judgement, Trial, families};
pub use judge::{Judge, Verdict};
pub use ledger::Ledger;
pub use scales::Scaled;
pub use values::{Dist, Poison, Values};

/// The mask of chunks of so many keys, in which a query sees so many behind its position, or all.
///
/// # Panics
/// If they have no keys.
pub const fn chunks(keys: u32, right: Option<u32>) -> Mask {
    let keys = NonZeroU32::new(keys).expect("a chunk has keys");
    Mask::Chunk { chunk: Chunk { keys, transposed: false }, left: None, right }
}
