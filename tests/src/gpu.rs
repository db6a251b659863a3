//! Runs the suite's own kernels on a GPU.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fa3_cuda::host::{Device, Function, HostError};
use fa3_ir::{Kernel, Program, ptx};

/// Runs a program on `device` with buffers that begin as `initial`. Returns the bytes of its buffers.
///
/// # Errors
/// The driver's error.
#[allow(unsafe_code, reason = "a kernel gets plain addresses")]
pub fn run(
    device: &Device,
    program: &Program<Kernel>,
    initial: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, HostError> {
    // SAFETY: the programs belong to the suite or to the ladder. Their kernels stay within the buffers that they list.
    unsafe { device.run(program, initial) }
}

/// Kernels that are compiled once for many problems.
#[derive(Debug)]
pub struct Kernels {
    device: Device,
    /// Compiled functions by their PTX.
    compiled: Mutex<HashMap<String, Arc<Function>>>,
}

impl Kernels {
    /// An empty cache of kernels.
    pub fn new(device: &Device) -> Kernels {
        Kernels { device: device.clone(), compiled: Mutex::default() }
    }

    /// Runs a program as [`run`] does, with cached kernels.
    ///
    /// # Errors
    /// The driver's error.
    ///
    /// # Panics
    /// If a kernel breaks a rule of the verifier.
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
        // The lock is not held here: other threads may compile other kernels meanwhile.
        let function = Arc::new(self.device.compile(&ptx)?);
        Ok(Arc::clone(functions().entry(ptx.text).or_insert(function)))
    }
}
