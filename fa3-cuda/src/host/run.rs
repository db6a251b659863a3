//! Runs a whole program, from bytes to bytes.

use std::sync::Arc;

use fa3_ir::{Kernel, Program};

use super::{Device, DeviceBuffer, Function, HostError};

impl Device {
    /// Runs a program on buffers with the contents `initial`, waits for it, and returns the bytes of every buffer. It
    /// allocates, copies and compiles, so it is meant for tests and trials.
    ///
    /// # Safety
    /// The kernels get the addresses of the buffers and must stay within them. (The simulator finds accesses outside of
    /// them.)
    ///
    /// # Errors
    /// The kernel is not sound; or the errors of [`Device::run_functions`].
    pub unsafe fn run(
        &self,
        program: &Program<Kernel>,
        initial: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, HostError> {
        let functions = program.try_map(|kernel| self.compile_kernel(kernel).map(Arc::new))?;
        // SAFETY: the caller fulfils the conditions.
        unsafe { self.run_functions(&functions, initial) }
    }

    /// Like [`Device::run`], for compiled kernels.
    ///
    /// # Safety
    /// The conditions of [`Device::run`].
    ///
    /// # Errors
    /// The buffers do not match the program's buffers, or the driver reports an error.
    pub unsafe fn run_functions(
        &self,
        program: &Program<Arc<Function>>,
        initial: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, HostError> {
        let (given, expected) = (initial.len(), program.buffers.len());
        if given != expected {
            return Err(HostError::Buffers { given, expected });
        }
        let stream = self.stream()?;
        let mut buffers: Vec<DeviceBuffer> = Vec::new();
        for (buffer, bytes) in program.buffers.iter().zip(initial) {
            let mut memory = self.alloc(buffer.bytes())?;
            memory.upload(&stream, bytes)?;
            buffers.push(memory);
        }
        let addresses: Vec<u64> = buffers.iter().map(DeviceBuffer::address).collect();
        for step in &program.steps {
            let ptx = step.kernel.ptx();
            let refuse = |error| HostError::Args { kernel: ptx.entry.clone(), error: Box::new(error) };
            let args = step.bind(&ptx.params, &addresses).map_err(refuse)?;
            // SAFETY: every address belongs to a buffer that lives until the stream is synchronised below, and the
            // caller guarantees the kernel.
            unsafe { step.kernel.launch(&stream, step.grid, &args) }?;
        }
        stream.synchronize()?;
        buffers.iter().map(|buffer| buffer.download(&stream)).collect()
    }
}
