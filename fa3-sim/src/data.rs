//! Results of instructions: pure functions of bits, without threads, memory or time.
//!
//! The meaning of every operation is the PTX ISA's, restricted to what sm_90a does. Where the ISA leaves bits open
//! (sums of the tensor core, approximations), the function says which bits it gives and why.

// Operations of a lane.
pub mod approx;
pub mod convert;
pub mod float;
pub mod lane;

// Operations on matrices.
pub mod matrix;
pub mod operand;
pub mod tensor_core;

// The cost of accesses.
pub mod bank;

/// One register of a warp: the bits of its 32 lanes, zero-extended. A predicate is 0 or 1, B16 has 16 bits, B32 and
/// F32 have 32, B64 has 64.
pub type Lanes = [u64; 32];
