//! One suite of attention problems, many engines.
//!
//! ```text
//! |engine(case) − oracle(case)| ≤ what the error law allows, or the engine says why it skips the case
//! ```
//!
//! Cases, engines and families of kernels are those of [`fa3_trials`], which this crate re-exports. `testdata/*.toml`
//! holds the chosen cases, and a [`Ledger`] keeps the engines' score. [`micro`] has kernels of one instruction, whose
//! results a GPU recorded, and [`lock`] what ptxas makes of the shipped kernels. This crate is not optimised: what
//! takes time when it runs is in others.
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

pub mod gpu;
mod ledger;
pub mod lock;
pub mod micro;
pub mod testdata;

pub use fa3_trials::*;
pub use ledger::Ledger;
