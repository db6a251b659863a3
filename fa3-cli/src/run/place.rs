//! Where a call is computed.

use std::fmt;

use clap::ValueEnum;
use fa3::cuda::ForwardError;
use fa3::{Attention, Device, Error, Output, Scalar};

/// What the command line says about it.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
pub(super) enum Wanted {
    /// The GPU, where there is a Hopper GPU whose kernels take the problem; the CPU otherwise
    #[default]
    Auto,
    /// The CPU
    Cpu,
    /// The GPU, or nothing
    Gpu,
}

/// Where it was computed.
#[derive(Debug)]
pub(super) struct Place {
    device: Device,
    /// Why not on a GPU, if that was left open.
    why: Option<Error>,
}

impl Wanted {
    /// The first device that may compute a call, and why none before it does.
    ///
    /// # Errors
    /// There is no GPU, and nothing else is wanted.
    pub(super) fn place(self) -> Result<Place, Error> {
        match self {
            Wanted::Cpu => Ok(Place { device: Device::Cpu, why: None }),
            Wanted::Gpu => Ok(Place { device: Device::gpu()?, why: None }),
            Wanted::Auto => {
                let (device, why) = Device::best();
                Ok(Place { device, why })
            }
        }
    }

    /// Computes a call there; on the CPU if the GPU's kernels do not take it and that was left open.
    ///
    /// # Errors
    /// What is wrong with the call, or with the GPU.
    pub(super) fn forward<T: Scalar>(
        self,
        attention: &Attention<'_, T>,
        place: Place,
    ) -> Result<(Output<T::Output>, Place), Error> {
        match attention.forward(&place.device) {
            Err(why @ Error::Cuda(ForwardError::Plan(_))) if matches!(self, Wanted::Auto) => {
                let output = attention.forward(&Device::Cpu)?;
                Ok((output, Place { device: Device::Cpu, why: Some(why) }))
            }
            output => Ok((output?, place)),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)?;
        self.why.as_ref().map_or(Ok(()), |why| write!(f, ", not on a gpu: {why}"))
    }
}
