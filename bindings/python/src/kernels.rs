//! Kernels that are compiled before the calls that launch them.

use std::collections::HashSet;

use fa3_cuda::host::{OperationError, Origin};
use fa3_cuda::kernels::Spec;

use crate::call::Planning;
use crate::caught::caught;
use crate::devices;
use crate::error::Error;

/// A kernel: its entry, and where its machine code comes from.
pub(crate) type Found = (String, &'static str);

/// Compiles the kernels that calls launch on a device, side by side, and returns each once.
///
/// # Errors
/// A call has no plan on this device, the driver reports an error, or a bug panicked.
pub(crate) fn compile(ordinal: u32, plannings: Vec<Planning>) -> Result<Vec<Found>, Error> {
    let result = caught(|| {
        let device = devices::open(ordinal).map_err(OperationError::from)?;
        let limits = device.limits();
        let mut specs = HashSet::<Spec>::new();
        for planning in plannings {
            specs.extend(planning(&limits)?);
        }
        let functions =
            device.all_kernels(&specs.iter().collect::<Vec<_>>()).map_err(OperationError::from)?;
        Ok(functions
            .iter()
            .map(|function| (function.ptx().entry.clone(), place(function.origin())))
            .collect())
    });
    result.unwrap_or_else(|message| Err(Error::Panic { message }))
}

fn place(origin: Origin) -> &'static str {
    match origin {
        Origin::Archive => "archive",
        Origin::DriverCache => "driver's cache",
        Origin::Compiler => "compiler",
    }
}
