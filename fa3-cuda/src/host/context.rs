//! The primary context of a GPU and its state.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ptr;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{self, CUctx_st, CUdevice, CUresult, CUstream_st, CUstreamCaptureMode};

use super::driver::{self, Handle};
use super::{CudaError, HostError, LaunchInfo, Poison};

/// Number of launches that are remembered as suspects.
const REMEMBERED: usize = 8;

/// A retained primary context. Every object in the context holds an `Arc` of this value.
#[derive(Debug)]
pub(super) struct Context {
    device: CUdevice,
    raw: Handle<CUctx_st>,
    poison: OnceLock<Poison>,
    /// Launches not known to have ended, oldest first, with their streams.
    pending: Mutex<VecDeque<(Handle<CUstream_st>, LaunchInfo)>>,
}

impl Context {
    /// Retains the primary context of `device`. The driver must be initialised.
    pub(super) fn retain(device: CUdevice) -> Result<Context, HostError> {
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is valid for the result; the driver checks `device`.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut raw, device) };
        driver::check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Context { device, raw: Handle(raw), poison: OnceLock::new(), pending: Mutex::default() })
    }

    /// Checks that calls in the context can still succeed.
    ///
    /// # Errors
    /// [`HostError::Poisoned`] once a sticky error was seen.
    pub(super) fn usable(&self) -> Result<(), HostError> {
        match self.poison.get() {
            Some(poison) => Err(HostError::Poisoned { by: Box::new(poison.clone()) }),
            None => Ok(()),
        }
    }

    /// A context for tests, with a handle that the driver did not give. It must not be dropped.
    #[cfg(test)]
    pub(super) fn unknown(raw: usize) -> Context {
        let raw = Handle(ptr::without_provenance_mut(raw));
        Context { device: 0, raw, poison: OnceLock::new(), pending: Mutex::default() }
    }

    /// Whether this and `other` are the same context of the driver.
    pub(super) fn is(&self, other: &Context) -> bool {
        self.raw.0 == other.raw.0
    }

    /// Whether `raw` is this context in the driver.
    #[cfg(feature = "cudarc")]
    pub(super) fn is_raw(&self, raw: *mut CUctx_st) -> bool {
        self.raw.0 == raw
    }

    /// Makes the context current on this thread while the guard lives. Every call in the context goes through this
    /// function.
    ///
    /// # Errors
    /// The errors of [`Context::usable`].
    pub(super) fn enter(&self) -> Result<Current<'_>, HostError> {
        self.usable()?;
        let mut before = ptr::null_mut();
        // SAFETY: `before` is valid for the result.
        driver::check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut before) })?;
        let pushed = before != self.raw.0;
        if pushed {
            // SAFETY: the context is retained until `self` is dropped.
            driver::check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.raw.0) })?;
        }
        Ok(Current { context: self, pushed, of_this_thread: PhantomData })
    }

    /// Remembers a launch until its stream is synchronised.
    fn launched(&self, stream: Handle<CUstream_st>, launch: LaunchInfo) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if pending.len() == REMEMBERED {
            pending.pop_front();
        }
        pending.push_back((stream, launch));
    }

    /// The remembered launches on a stream, oldest first.
    pub(super) fn launches_on(&self, stream: Handle<CUstream_st>) -> Vec<LaunchInfo> {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.iter().filter(|(other, _)| other.0 == stream.0).map(|(_, launch)| launch.clone()).collect()
    }

    /// Forgets the launches on the streams that `ended` selects, because these launches have ended without an error.
    pub(super) fn synchronised(&self, ended: impl Fn(Handle<CUstream_st>) -> bool) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).retain(|(stream, _)| !ended(*stream));
    }

    fn poison(&self, call: &'static str, error: CudaError) -> HostError {
        let poison = self.poison.get_or_init(|| {
            let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            Poison { error, call, suspects: pending.iter().map(|(_, launch)| launch.clone()).collect() }
        });
        HostError::Poisoned { by: Box::new(poison.clone()) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once, and no object in it is left. An error cannot be reported here.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// While this value lives, this thread may allocate even if another thread captures streams.
#[derive(Debug)]
pub(super) struct RelaxedCapture {
    before: CUstreamCaptureMode,
    /// Makes the type `!Send`: the mode belongs to a thread.
    of_this_thread: PhantomData<*const ()>,
}

impl RelaxedCapture {
    pub(super) fn begin() -> Result<RelaxedCapture, HostError> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: `mode` is valid for the previous mode.
        let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        driver::check("cuThreadExchangeStreamCaptureMode", result)?;
        Ok(RelaxedCapture { before: mode, of_this_thread: PhantomData })
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        // SAFETY: `before` is valid for the previous mode.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.before) };
    }
}

/// The guard that keeps a context current on this thread.
#[derive(Debug)]
pub(super) struct Current<'c> {
    context: &'c Context,
    pushed: bool,
    /// Makes the type `!Send`: the current context belongs to a thread.
    of_this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    /// Converts the result of a call. A sticky error poisons the context.
    pub(super) fn check(&self, call: &'static str, result: CUresult) -> Result<(), HostError> {
        self.check_or(call, result, |error| HostError::Driver { call, error })
    }

    /// Converts the result of a call about a kernel: see [`Current::check`].
    pub(super) fn check_kernel(
        &self,
        call: &'static str,
        kernel: &str,
        result: CUresult,
    ) -> Result<(), HostError> {
        self.check_or(call, result, |error| HostError::Kernel { kernel: kernel.to_owned(), call, error })
    }

    /// Converts the result of a query whether work is done. Unfinished work is not an error.
    pub(super) fn check_ready(&self, call: &'static str, result: CUresult) -> Result<bool, HostError> {
        if result == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        self.check(call, result).map(|()| true)
    }

    /// Converts the result of a call that puts `launches` on a stream. Remembers the launches unless the driver refused
    /// them. Under CUDA_LAUNCH_BLOCKING=1 the call also reports errors of its own kernels.
    pub(super) fn check_launch(
        &self,
        call: &'static str,
        result: CUresult,
        stream: Handle<CUstream_st>,
        launches: impl IntoIterator<Item = LaunchInfo>,
        say: impl FnOnce(CudaError) -> HostError,
    ) -> Result<(), HostError> {
        let refused = result.result().is_err_and(|error| !CudaError::new(error.0).is_sticky());
        if !refused {
            launches.into_iter().for_each(|launch| self.context.launched(stream, launch));
        }
        self.check_or(call, result, say)
    }

    /// Converts the result of a call; `say` converts an error that is not sticky.
    pub(super) fn check_or(
        &self,
        call: &'static str,
        result: CUresult,
        say: impl FnOnce(CudaError) -> HostError,
    ) -> Result<(), HostError> {
        let Err(error) = result.result() else { return Ok(()) };
        let error = CudaError::new(error.0);
        Err(if error.is_sticky() { self.context.poison(call, error) } else { say(error) })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped = ptr::null_mut();
            // SAFETY: `enter` pushed this context on this thread, and the guard has not left the thread.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::ManuallyDrop;

    use super::*;

    #[test]
    fn launches_that_the_driver_refuses_are_no_suspects() {
        let context = ManuallyDrop::new(Context::unknown(0x10));
        let current = Current { context: &context, pushed: false, of_this_thread: PhantomData };
        let stream = Handle(ptr::null_mut());
        let check = |kernel: &str, result| {
            let (kernel, grid) = (kernel.into(), [1; 3]);
            let launch = LaunchInfo { kernel, grid, threads: 32, smem_bytes: 0, cluster: 1 };
            let call = "cuGraphLaunch";
            current.check_launch(call, result, stream, [launch], |error| HostError::Driver { call, error })
        };
        let suspects = || -> Vec<String> {
            context.launches_on(stream).iter().map(|launch| launch.kernel.to_string()).collect()
        };
        assert!(check("refused", CUresult::CUDA_ERROR_INVALID_VALUE).is_err());
        assert!(suspects().is_empty());
        assert_eq!(check("launched", CUresult::CUDA_SUCCESS), Ok(()));
        assert_eq!(suspects(), ["launched"]);
        let lost = check("blocking", CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert!(matches!(lost, Err(HostError::Poisoned { .. })), "{lost:?}");
        assert_eq!(suspects(), ["launched", "blocking"]);
    }

    #[test]
    fn work_that_is_not_done_is_no_error() {
        let context = ManuallyDrop::new(Context::unknown(0x10));
        let current = Current { context: &context, pushed: false, of_this_thread: PhantomData };
        let ready = |result| current.check_ready("cuEventQuery", result);
        assert_eq!(ready(CUresult::CUDA_SUCCESS), Ok(true));
        assert_eq!(ready(CUresult::CUDA_ERROR_NOT_READY), Ok(false));
        assert!(ready(CUresult::CUDA_ERROR_INVALID_HANDLE).is_err());
    }
}
