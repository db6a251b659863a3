//! The place where a call is computed.

/// A place, which callers give as a device (-1 for the CPU) and, unless the call is only checked, a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On a stream of a GPU.
    Stream {
        /// The number of the GPU.
        device: u32,
        /// The driver's handle of the stream.
        stream: usize,
    },
    /// On the CPU.
    Cpu,
    /// Nowhere: the call is only checked, by the rules of a GPU.
    CheckedForGpu,
    /// Nowhere: the call is only checked, by the rules of the CPU.
    CheckedForCpu,
}

impl Place {
    /// The place of a device and a stream.
    pub fn new(device: i32, stream: Option<usize>) -> Place {
        match (u32::try_from(device), stream) {
            (Ok(device), Some(stream)) => Place::Stream { device, stream },
            (Ok(_), None) => Place::CheckedForGpu,
            (Err(_), Some(_)) => Place::Cpu,
            (Err(_), None) => Place::CheckedForCpu,
        }
    }

    /// Whether the rules of the CPU apply.
    pub fn is_cpu(self) -> bool {
        matches!(self, Place::Cpu | Place::CheckedForCpu)
    }
}
