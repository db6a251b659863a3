//! The `fa3` command.
#![forbid(unsafe_code)]

fn main() {}
