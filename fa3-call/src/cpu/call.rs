//! A call that the CPU computes.

use super::memory::Memory;
use crate::call::Call;
use crate::error::Error;

/// A call that the CPU computes.
pub trait CpuCall: Call {
    /// Checks the call by the rules of the CPU, which takes any strides.
    ///
    /// # Errors
    /// The call is invalid.
    fn check_for_cpu(&self) -> Result<(), Error>;

    /// Computes the call over its tensors in `memory`, with the threads of the current pool.
    ///
    /// # Errors
    /// The call or an address is invalid.
    fn compute(&self, memory: &Memory<'_>) -> Result<(), Error>;
}
