//! A program with its data, from bytes to bytes.

use std::sync::Arc;

use fa3_ir::{Kernel, Program};

use super::{Device, DeviceBuffer, Function, HostError};

impl Device {
    /// Runs a program on buffers that begin as `initial`, waits for it, and returns the bytes of every buffer. It
    /// allocates, copies and compiles, so it is for tests and trials.
    ///
    /// # Safety
    /// The kernels get the addresses of the buffers and must stay within them. (The simulator
    /// finds where one does not.)
    ///
    /// # Errors
    /// A kernel that is not sound, and those of [`Device::run_functions`].
    pub unsafe fn run(
        &self,
        program: &Program<Kernel>,
        initial: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, HostError> {
        let functions = program.try_map(|kernel| self.compile_kernel(kernel).map(Arc::new))?;
        // SAFETY: as the caller's.
        unsafe { self.run_functions(&functions, initial) }
    }

    /// [`Device::run`] for kernels that are compiled.
    ///
    /// # Safety
    /// See [`Device::run`].
    ///
    /// # Errors
    /// Buffers that are not the program's, or what the driver says.
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
            // SAFETY: every address is of a buffer that lives until the stream is synchronised below, and the
            // caller vouches for the kernel.
            unsafe { step.kernel.launch(&stream, step.grid, &args) }?;
        }
        stream.synchronize()?;
        buffers.iter().map(|buffer| buffer.download(&stream)).collect()
    }
}
