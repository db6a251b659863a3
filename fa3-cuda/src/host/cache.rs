//! The compiled kernels of a device.

use std::io;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use fa3_ir::{Kernel, ptx};

use super::{Device, Function, HostError, KeyedMutex};
use crate::kernels::Spec;

/// Compiled kernels by their specs. If a problem's kernel is in the cache, it is not built again, and no PTX text is
/// made. Kernels live as long as the device.
pub(super) type Cache = KeyedMutex<Spec, Arc<Function>>;

impl Device {
    /// The kernel of `spec`, which is compiled at the first call. Other threads that ask for it wait; threads that ask
    /// for other kernels do not.
    ///
    /// # Errors
    /// Errors of the driver's compiler.
    pub fn kernel(&self, spec: &Spec) -> Result<Arc<Function>, HostError> {
        let make = || self.compile_kernel(&spec.kernel()).map(Arc::new);
        Ok(self.cache().find(spec.clone(), make)?.with(|function| Arc::clone(function)))
    }

    /// The kernels of these specs. Kernels that the device lacks are compiled side by side.
    ///
    /// # Errors
    /// The first error of [`Device::kernel`], in the order of the specs.
    pub fn all_kernels(&self, specs: &[&Spec]) -> Result<Vec<Arc<Function>>, HostError> {
        let missing: Vec<&Spec> = specs.iter().copied().filter(|spec| !self.cache().has(spec)).collect();
        let next = AtomicUsize::new(0);
        let compile = || {
            while let Some(spec) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
                // The error of a kernel comes again below.
                let _ = self.kernel(spec);
            }
        };
        // To start threads, or to count the processors, takes longer than to plan.
        if missing.len() > 1 {
            let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(missing.len());
            thread::scope(|scope| {
                for _ in 1..threads {
                    // With fewer threads it takes longer.
                    let _ = thread::Builder::new().spawn_scoped(scope, compile);
                }
                compile();
            });
        }
        specs.iter().map(|spec| self.kernel(spec)).collect()
    }

    /// Compiles kernels in background threads, so that later plans find them. They are an operation's
    /// ([`Operation::kernels`](super::Operation::kernels)), or [`usual`](crate::kernels::usual). The handle gives them.
    /// A process should join it before it ends, since the driver may be compiling.
    ///
    /// ```
    /// use fa3_cuda::host::{Device, Operation};
    /// use fa3_sched::forward::{Plan, PlanOptions};
    /// use fa3_types::{Dtype, ProblemSpec, Shape};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let Ok(device) = Device::open(0) else { return Ok(()) };
    /// let shape = Shape { batch: 1, seqlen: 4096, heads: 32, head_dim: 128 };
    /// let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
    /// let plan = Plan::with(&problem, &device.limits(), &PlanOptions::default())?;
    /// let warming = device.warm_up(plan.kernels())?;
    /// // Loads weights meanwhile.
    /// for kernel in warming.join().expect("no panic")? {
    ///     println!("{} is from {:?}", kernel.ptx().entry, kernel.origin());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// No thread can be started. The handle has the errors of [`Device::kernel`].
    #[allow(clippy::type_complexity, reason = "it is std's handle of a fallible result")]
    pub fn warm_up(
        &self,
        specs: impl IntoIterator<Item = Spec>,
    ) -> io::Result<JoinHandle<Result<Vec<Arc<Function>>, HostError>>> {
        let (device, specs) = (self.clone(), specs.into_iter().collect::<Vec<Spec>>());
        thread::Builder::new().spawn(move || device.all_kernels(&specs.iter().collect::<Vec<_>>()))
    }

    /// The kernels of this library that the device has, in any order.
    pub fn kernels(&self) -> Vec<Arc<Function>> {
        self.cache().values()
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
