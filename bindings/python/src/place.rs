//! The place where a call is computed.

/// A place, which Python gives as a device (-1 for the CPU) and a stream or None.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// On a stream of a GPU.
    Stream { device: u32, stream: usize },
    /// On the CPU.
    Cpu,
    /// Nowhere: the call is only checked, by the rules of a GPU.
    CheckedForGpu,
    /// Nowhere: the call is only checked, by the rules of the CPU.
    CheckedForCpu,
}

impl Place {
    /// The place of a device and a stream.
    pub(crate) fn new(device: i32, stream: Option<usize>) -> Place {
        match (u32::try_from(device), stream) {
            (Ok(device), Some(stream)) => Place::Stream { device, stream },
            (Ok(_), None) => Place::CheckedForGpu,
            (Err(_), Some(_)) => Place::Cpu,
            (Err(_), None) => Place::CheckedForCpu,
        }
    }
}
