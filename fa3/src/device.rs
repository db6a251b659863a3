//! Where attention is computed.

use std::fmt;

/// A device that can run attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The CPU, on all threads of the current rayon pool.
    #[default]
    Cpu,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => match rayon::current_num_threads() {
                1 => write!(f, "cpu (1 thread)"),
                threads => write!(f, "cpu ({threads} threads)"),
            },
        }
    }
}
