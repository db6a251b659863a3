//! A suite of attention problems, which many engines run.
//!
//! ```text
//! |engine(case) − oracle(case)| ≤ the bound of the error law, or the engine gives its reason to skip the case
//! ```
//!
//! Cases, engines and families of kernels come from [`fa3_trials`], which this crate re-exports. `testdata/*.toml`
//! holds the chosen cases, and a [`Ledger`] keeps the engines' score. [`micro`] has kernels of one instruction with
//! results that a GPU recorded, and [`lock`] the output of ptxas for the shipped kernels. This crate is not optimized,
//! so slow code is in other crates.
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

/// Every pair of an element of `first` and an element of `second`.
pub fn pairs<A: Copy, B: Copy>(
    first: impl IntoIterator<Item = A>,
    second: impl IntoIterator<Item = B>,
) -> Vec<(A, B)> {
    let second: Vec<B> = second.into_iter().collect();
    first.into_iter().flat_map(|a| second.iter().map(move |&b| (a, b))).collect()
}

/// Each element of `first` with `times` elements of `second`, whose elements take turns.
pub fn in_turn<A: Clone, B>(
    first: impl IntoIterator<Item = A>,
    times: usize,
    second: impl IntoIterator<Item = B, IntoIter: Clone>,
) -> Vec<(A, B)> {
    let first = first.into_iter().flat_map(|a| std::iter::repeat_n(a, times));
    first.zip(second.into_iter().cycle()).collect()
}
