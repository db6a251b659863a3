//! A kernel with its problem, from bytes to bytes.

use super::{Device, DeviceBuffer, HostError};
use crate::kernels::Job;

impl Device {
    /// Runs a job on arrays that begin as `initial`, waits for it, and gives the bytes of every array. It allocates, copies
    /// and compiles: for tests and trials.
    ///
    /// # Safety
    /// The job's kernel must stay within its arrays, whose addresses it gets. (The simulator finds where one does not.)
    ///
    /// # Errors
    /// A kernel that is not sound, arrays that are not the job's, or what the driver says.
    pub unsafe fn run(&self, job: &Job, initial: &[Vec<u8>]) -> Result<Vec<Vec<u8>>, HostError> {
        let (given, expected) = (initial.len(), job.arrays.len());
        if given != expected {
            return Err(HostError::Arrays { given, expected });
        }
        let function = self.compile_kernel(&job.kernel)?;
        let stream = self.stream()?;
        let mut buffers: Vec<DeviceBuffer> = Vec::new();
        for (array, bytes) in job.arrays.iter().zip(initial) {
            let mut buffer = self.alloc(array.bytes())?;
            buffer.upload(&stream, bytes)?;
            buffers.push(buffer);
        }
        let addresses: Vec<u64> = buffers.iter().map(DeviceBuffer::address).collect();
        // SAFETY: every address is of a buffer that lives until the stream is synchronised below, and the caller vouches for the
        // kernel.
        unsafe { function.launch(&stream, job.grid, &job.bind(&addresses)) }?;
        stream.synchronize()?;
        buffers.iter().map(|buffer| buffer.download(&stream)).collect()
    }
}
