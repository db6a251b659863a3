//! The compiled kernels of a device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fa3_ir::{Kernel, ptx};

use super::{Device, Function, HostError};
use crate::kernels::Spec;

/// Compiled kernels by their specs. If a problem's kernel is in the cache, it is not built again, and no PTX text is
/// made. Kernels live as long as the device.
#[derive(Debug, Default)]
pub(super) struct Cache(Mutex<HashMap<Spec, Arc<Function>>>);

impl Cache {
    fn functions(&self) -> MutexGuard<'_, HashMap<Spec, Arc<Function>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Device {
    /// The kernel of `spec`, which is compiled at the first call.
    ///
    /// # Errors
    /// Errors of the driver's compiler.
    pub fn kernel(&self, spec: &Spec) -> Result<Arc<Function>, HostError> {
        if let Some(function) = self.cache().functions().get(spec) {
            return Ok(Arc::clone(function));
        }
        // The lock is not held here: other threads may compile other kernels meanwhile. If two compile this kernel, the
        // first result stays.
        let function = Arc::new(self.compile_kernel(&spec.kernel())?);
        Ok(Arc::clone(self.cache().functions().entry(spec.clone()).or_insert(function)))
    }

    /// Writes a kernel's PTX and compiles it.
    ///
    /// # Errors
    /// [`HostError::Unsound`] if the kernel breaks a rule, and the errors of [`Device::compile`].
    pub(super) fn compile_kernel(&self, kernel: &Kernel) -> Result<Function, HostError> {
        let ptx = ptx::emit(kernel).map_err(|errors| HostError::Unsound {
            kernel: kernel.name.clone(),
            faults: errors.iter().map(ToString::to_string).collect(),
        })?;
        self.compile(&ptx)
    }
}
