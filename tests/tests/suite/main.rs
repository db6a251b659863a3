//! Tests that concern several crates, in one binary, so that they share the machine's cores. A module's name chooses
//! its tests: `cargo test -p fa3-tests --test suite fwd::`.
#![forbid(unsafe_code)]

// Attention by every engine.
mod backward;
mod forward;
mod metamorphic;
mod minilm;
mod properties;

// Kernels in the simulator.
mod bwd;
mod families;
mod fp8;
mod fwd;
mod golden;
mod mutants;
mod quantize;
mod timeline;

// Plans, and the repository itself.
mod sched;
mod tidy;
