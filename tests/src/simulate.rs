//! Jobs in the simulator.

use fa3_cuda::kernels::{ArrayUse, Job};
use fa3_sim::{Memory, Mode, Outcome, Policy, SimError, Simulation};

/// What a run gives.
pub struct Simulated {
    /// The bytes of every array.
    pub arrays: Vec<Vec<u8>>,
    /// What was found and counted.
    pub outcome: Outcome,
}

/// Runs a job on arrays that begin as `initial`.
///
/// # Errors
/// If the simulator does not take the kernel.
pub fn simulate(job: &Job, initial: &[Vec<u8>], policy: Policy, mode: Mode) -> Result<Simulated, SimError> {
    let mut memory = Memory::new();
    let mut buffers = Vec::new();
    for (array, bytes) in job.arrays.iter().zip(initial) {
        buffers.push(match array.used {
            ArrayUse::Input | ArrayUse::Sum => memory.alloc_from(array.name, bytes),
            ArrayUse::Output => {
                let buffer = memory.alloc(array.name, array.bytes());
                memory.expect_written_once(buffer);
                buffer
            }
        });
    }
    let addresses: Vec<u64> = buffers.iter().map(|buffer| buffer.address()).collect();
    let outcome = Simulation::new(&job.kernel)
        .grid(job.grid)
        .args(job.bind(&addresses))
        .policy(policy)
        .mode(mode)
        .run(&mut memory)?;
    Ok(Simulated { arrays: buffers.iter().map(|&buffer| memory.read(buffer)).collect(), outcome })
}
