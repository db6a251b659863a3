//! Kernels that are compiled before the calls that launch them: in the package's archive, or for `warm_up`.

use std::collections::HashSet;
use std::path::Path;

use fa3_call::{Error, caught, open_device, use_archive};
use fa3_cuda::host::{OperationError, Origin};
use fa3_cuda::kernels::Spec;
use pyo3::prelude::*;

use crate::call::Planning;

/// The file of compiled kernels in the package's folder, which a wheel has and a build from source may lack.
const ARCHIVE: &str = "kernels.sm_90a";

/// A kernel: its entry, and where its machine code comes from.
pub(crate) type Found = (String, &'static str);

/// Names the archive beside the extension module.
pub(crate) fn name_archive(module: &Bound<'_, PyModule>) {
    if let Ok(file) = module.filename() {
        use_archive(Path::new(&file.to_string()).with_file_name(ARCHIVE));
    }
}

/// Compiles the kernels that calls launch on a device, side by side, and returns each once.
///
/// # Errors
/// A call has no plan on this device, the driver reports an error, or a bug panicked.
pub(crate) fn compile(ordinal: u32, plannings: Vec<Planning>) -> Result<Vec<Found>, Error> {
    let result = caught(|| {
        let device = open_device(ordinal).map_err(OperationError::from)?;
        let mut specs = HashSet::<Spec>::new();
        for planning in plannings {
            specs.extend(planning(&device)?);
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
