//! A kernel that is verified and decoded once, for any number of runs.

use std::sync::Arc;

use fa3_ir::{Kernel, VerifyErrors, verify};

use crate::decoded::Decoded;
use crate::simulation::SimError;

/// A kernel, verified and decoded. Clones share it.
#[derive(Clone, Debug)]
pub struct Loaded<'k> {
    kernel: &'k Kernel,
    decoded: Arc<Result<Decoded<'k>, VerifyErrors>>,
}

impl<'k> Loaded<'k> {
    /// Verifies a kernel, and decodes it if the verifier accepts it.
    pub fn new(kernel: &'k Kernel) -> Loaded<'k> {
        Loaded { kernel, decoded: Arc::new(verify(kernel).map(|()| Decoded::new(kernel))) }
    }

    /// The kernel.
    pub fn kernel(&self) -> &'k Kernel {
        self.kernel
    }

    /// The verdict of the verifier.
    ///
    /// # Errors
    /// The rules that the kernel breaks.
    pub fn verdict(&self) -> Result<(), &VerifyErrors> {
        self.decoded.as_ref().as_ref().map(|_| ())
    }

    /// The kernel as the simulator runs it.
    pub(crate) fn decoded(&self) -> Result<&Decoded<'k>, SimError> {
        let unsound = |errors: &VerifyErrors| SimError::Verify {
            kernel: self.kernel.name.clone(),
            errors: errors.clone(),
        };
        self.decoded.as_ref().as_ref().map_err(unsound)
    }
}
