//! A compiled kernel.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUfunc_st, CUfunction_attribute};
use fa3_ir::Ptx;

use super::context::{Context, RelaxedCapture};
use super::driver::Handle;
use super::module::Module;
use super::{Device, HostError};
use crate::report::JitReport;

/// The largest cluster that every GPU with clusters can launch; a kernel must opt in to larger clusters.
const PORTABLE_CLUSTER: u32 = 8;

/// The place where a kernel's machine code comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The device's [archive](Device::with_archive).
    Archive,
    /// The driver's cache on disk, where an earlier process left it.
    DriverCache,
    /// The driver's compiler.
    Compiler,
}

/// A kernel, compiled for a device and loaded onto it.
#[derive(Debug)]
pub struct Function {
    module: Module,
    raw: Handle<CUfunc_st>,
    name: Arc<str>,
    ptx: Ptx,
    registers: u32,
    local_bytes: u32,
    report: Option<JitReport>,
    origin: Origin,
    compile_time: Duration,
}

impl Function {
    /// Loads a kernel from the device's archive, or compiles it, and sets its shared memory and cluster size.
    pub(super) fn compile(device: &Device, ptx: &Ptx) -> Result<Function, HostError> {
        let limit = device.smem_bytes();
        if ptx.smem_bytes > limit {
            let (kernel, given) = (ptx.entry.clone(), ptx.smem_bytes);
            return Err(HostError::SharedMemory { kernel, given, limit });
        }
        let start = Instant::now();
        // Loading must not invalidate a capture on another thread.
        let _relaxed = RelaxedCapture::begin()?;
        let context = device.context();
        let archived = device.archive().and_then(|archive| archive.find(ptx));
        let archived = archived.map_or(Ok(None), |cubin| Module::load(context, &cubin))?;
        let (module, report, origin) = match archived {
            Some(module) => (module, None, Origin::Archive),
            None => {
                let (module, log) = Module::compile(context, ptx)?;
                let origin = if log.is_empty() { Origin::DriverCache } else { Origin::Compiler };
                (module, JitReport::parse(&log), origin)
            }
        };
        let mut function = Function {
            raw: module.entry(&ptx.entry)?,
            module,
            name: ptx.entry.as_str().into(),
            ptx: ptx.clone(),
            registers: 0,
            local_bytes: 0,
            report,
            origin,
            compile_time: start.elapsed(),
        };
        use CUfunction_attribute as A;
        function.set(A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, ptx.smem_bytes.cast_signed())?;
        if ptx.cluster > PORTABLE_CLUSTER {
            function.set(A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)?;
        }
        function.registers = function.get(A::CU_FUNC_ATTRIBUTE_NUM_REGS)?;
        function.local_bytes = function.get(A::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?;
        Ok(function)
    }

    fn set(&self, which: CUfunction_attribute, value: i32) -> Result<(), HostError> {
        let current = self.context().enter()?;
        // SAFETY: the function belongs to a loaded module.
        let result = unsafe { sys::cuFuncSetAttribute(self.raw.0, which, value) };
        current.check_kernel("cuFuncSetAttribute", &self.name, result)
    }

    fn get(&self, which: CUfunction_attribute) -> Result<u32, HostError> {
        let current = self.context().enter()?;
        let mut value = 0;
        // SAFETY: `value` is valid for the result; the function belongs to a loaded module.
        let result = unsafe { sys::cuFuncGetAttribute(&raw mut value, which, self.raw.0) };
        current.check_kernel("cuFuncGetAttribute", &self.name, result)?;
        Ok(value.unsigned_abs())
    }

    /// The PTX text of the kernel.
    pub fn ptx(&self) -> &Ptx {
        &self.ptx
    }

    /// Registers of a thread at kernel entry.
    pub fn registers(&self) -> u32 {
        self.registers
    }

    /// Bytes of local memory of a thread; 0 means no spills.
    pub fn local_bytes(&self) -> u32 {
        self.local_bytes
    }

    /// The compiler's report. `None` if the compiler did not run, because an archive had the kernel, or the driver had
    /// it in its cache on disk (`CUDA_CACHE_DISABLE=1` disables that cache).
    pub fn report(&self) -> Option<&JitReport> {
        self.report.as_ref()
    }

    /// The place where the machine code comes from.
    pub fn origin(&self) -> Origin {
        self.origin
    }

    /// Time of compiling and loading.
    pub fn compile_time(&self) -> Duration {
        self.compile_time
    }

    pub(super) fn name(&self) -> Arc<str> {
        Arc::clone(&self.name)
    }

    pub(super) fn raw(&self) -> Handle<CUfunc_st> {
        self.raw
    }

    pub(super) fn context(&self) -> &Context {
        self.module.context()
    }
}
