//! The cross-crate suite.
#![forbid(unsafe_code)]
