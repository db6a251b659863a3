//! Micro-kernels in the simulator.

use fa3_sim::{Policy, ProgramSimulation};

use super::Micro;

impl Micro {
    /// Runs the micro-kernel in the simulator and returns the bytes that it wrote.
    ///
    /// # Errors
    /// The simulator's finding, in words.
    pub fn simulate(&self, policy: Policy) -> Result<Vec<u8>, String> {
        let run = ProgramSimulation::new(&self.program).policy(policy).run(&self.contents);
        let run = run.map_err(|error| error.to_string())?;
        match run.findings().next() {
            Some(finding) => Err(finding.to_string()),
            None => Ok(self.written(&run.buffers)),
        }
    }
}
