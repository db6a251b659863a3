//! The forward kernels that a device has.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fa3_ir::Kernel;

use crate::host::{Device, Function, HostError};
use crate::kernels::fwd::FwdSpec;

/// Compiled kernels by their specs, so that a problem whose kernel is there costs no building and no text.
#[derive(Debug, Default)]
pub(in crate::host) struct Kernels(Mutex<HashMap<FwdSpec, Arc<Function>>>);

impl Kernels {
    /// The function of `spec`, compiled for `device` from `build(spec)` if it is not there.
    ///
    /// # Errors
    /// What the driver's compiler says.
    pub(super) fn function(
        &self,
        device: &Device,
        spec: &FwdSpec,
        build: impl FnOnce(&FwdSpec) -> Kernel,
    ) -> Result<Arc<Function>, HostError> {
        if let Some(function) = self.functions().get(spec) {
            return Ok(Arc::clone(function));
        }
        // Not under the lock: other threads may compile meanwhile.
        let function = device.compile_kernel(&build(spec))?;
        Ok(Arc::clone(self.functions().entry(*spec).or_insert(function)))
    }

    fn functions(&self) -> MutexGuard<'_, HashMap<FwdSpec, Arc<Function>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
