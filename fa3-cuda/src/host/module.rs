//! A compiled module, and the driver's compiler.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUfunc_st, CUjit_option, CUmod_st};
use fa3_ir::Ptx;

use super::HostError;
use super::context::Context;
use super::driver::Handle;

/// Bytes of each of the compiler's logs; longer logs are cut off.
const LOG_BYTES: usize = 16 << 10;

/// A module of one kernel, loaded into a context.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    raw: Handle<CUmod_st>,
}

impl Module {
    /// Loads machine code. `None` if the driver refuses it, for example because a newer compiler made it.
    ///
    /// # Errors
    /// [`HostError::Poisoned`].
    pub(super) fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Option<Module>, HostError> {
        let current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: machine code says its own length, and an archive has it as a compiler made it.
        let result = unsafe { sys::cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast()) };
        match current.check("cuModuleLoadData", result) {
            Ok(()) => Ok(Some(Module { context: Arc::clone(context), raw: Handle(raw) })),
            Err(error @ HostError::Poisoned { .. }) => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// Has the driver compile and load `ptx`, and returns the compiler's log as well. The log is empty if the driver
    /// found the kernel in its cache on disk.
    pub(super) fn compile(context: &Arc<Context>, ptx: &Ptx) -> Result<(Module, String), HostError> {
        let current = context.enter()?;
        let (text, mut raw) = (format!("{}\0", ptx.text), ptr::null_mut());
        let (mut info, mut errors) = (vec![0_u8; LOG_BYTES], vec![0_u8; LOG_BYTES]);
        let mut options = [
            CUjit_option::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_INFO_LOG_BUFFER,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
            CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
            CUjit_option::CU_JIT_LOG_VERBOSE,
        ];
        // The value of an option is passed as a pointer, even if it is a number.
        let size = ptr::without_provenance_mut::<c_void>(LOG_BYTES);
        let verbose = ptr::without_provenance_mut(1);
        let mut values = [size, info.as_mut_ptr().cast(), size, errors.as_mut_ptr().cast(), verbose];
        // SAFETY: the text ends with a zero; the numbers of options and of values are equal; both logs have the given
        // size and live until the call returns.
        let result = unsafe {
            sys::cuModuleLoadDataEx(
                &raw mut raw,
                text.as_ptr().cast(),
                options.len() as u32,
                options.as_mut_ptr(),
                values.as_mut_ptr(),
            )
        };
        current.check_or("cuModuleLoadDataEx", result, |error| {
            let log = until_zero(&errors);
            HostError::Compile { kernel: ptx.entry.clone(), error, log }
        })?;
        Ok((Module { context: Arc::clone(context), raw: Handle(raw) }, until_zero(&info)))
    }

    /// The kernel of this name.
    pub(super) fn entry(&self, kernel: &str) -> Result<Handle<CUfunc_st>, HostError> {
        let current = self.context.enter()?;
        let (name, mut raw) = (format!("{kernel}\0"), ptr::null_mut());
        // SAFETY: the module is loaded, the name ends with a zero, and `raw` is valid for the result.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut raw, self.raw.0, name.as_ptr().cast()) };
        current.check_kernel("cuModuleGetFunction", kernel, result)?;
        Ok(Handle(raw))
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Ok(_current) = self.context.enter() {
            // SAFETY: it was loaded into this context and is unloaded once. Kernels under way end first.
            let _ = unsafe { sys::cuModuleUnload(self.raw.0) };
        }
    }
}

fn until_zero(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).trim_end().to_owned()
}
