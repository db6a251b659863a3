//! The suite's own kernels on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fa3_cuda::host::{Device, Function, HostError};
use fa3_ir::{Kernel, Program, ptx};

/// The bytes of a program's buffers after it has run on `device`; they begin as `initial`.
///
/// # Errors
/// What the driver says.
#[allow(unsafe_code, reason = "a kernel gets plain addresses")]
pub fn run(
    device: &Device,
    program: &Program<Kernel>,
    initial: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, HostError> {
    // SAFETY: the programs are the suite's own and the ladder's, whose kernels stay within the buffers that they list.
    unsafe { device.run(program, initial) }
}

/// Kernels that are compiled once for many problems.
#[derive(Debug)]
pub struct Kernels {
    device: Device,
    /// By their PTX.
    compiled: Mutex<HashMap<String, Arc<Function>>>,
}

impl Kernels {
    /// None yet.
    pub fn new(device: &Device) -> Kernels {
        Kernels { device: device.clone(), compiled: Mutex::default() }
    }

    /// [`run`].
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Panics
    /// If a kernel breaks a rule.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    pub fn run(&self, program: &Program<Kernel>, initial: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, HostError> {
        let functions = program.try_map(|kernel| self.compiled(kernel))?;
        // SAFETY: see `run`.
        unsafe { self.device.run_functions(&functions, initial) }
    }

    fn compiled(&self, kernel: &Kernel) -> Result<Arc<Function>, HostError> {
        let ptx = ptx::emit(kernel).expect("the suite's kernels keep the rules");
        let functions = || self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = functions().get(&ptx.text) {
            return Ok(Arc::clone(function));
        }
        // Not under the lock: other threads may compile other kernels meanwhile.
        let function = Arc::new(self.device.compile(&ptx)?);
        Ok(Arc::clone(functions().entry(ptx.text).or_insert(function)))
    }
}
