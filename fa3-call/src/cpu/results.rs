//! The memory that a forward pass writes.

use fa3::ndarray::{Array3, ArrayViewMut3, ArrayViewMut4};
use fa3::{Error as CpuError, Output, Scalar};
use fa3_types::Problem;

use super::inputs::of_rows;
use super::memory::Memory;
use crate::error::Error;

/// The memory that a forward pass writes: O, and LSE and the largest scores of rows, if they are wanted.
pub(super) struct Results<'a, T> {
    o: ArrayViewMut4<'a, T>,
    lse: Option<ArrayViewMut3<'a, f32>>,
    max_logits: Option<ArrayViewMut3<'a, f32>>,
    /// The shape of LSE.
    rows: [usize; 3],
}

impl<T: Scalar> Results<'_, T> {
    /// The results of a call.
    ///
    /// # Safety
    /// `memory` must have the results of `problem`, and no other code uses them as long as these views live.
    ///
    /// # Errors
    /// An address is invalid.
    #[allow(unsafe_code, reason = "tensors are plain addresses")]
    pub(super) unsafe fn of(problem: &Problem, memory: &Memory<'_>) -> Result<Self, Error> {
        // SAFETY: the caller guarantees the tensors. In a valid problem no two elements of an output overlap.
        let (o, lse, max_logits) = unsafe {
            let [lse, max_logits] = ["lse", "max_logits"].map(|name| of_rows(name, problem, memory));
            (memory.view_mut("o", problem.o())?, lse?, max_logits?)
        };
        Ok(Results { o, lse, max_logits, rows: problem.lse_shape() })
    }

    /// Whether the largest scores are wanted. [`Results::assign`] takes them.
    pub(super) fn has_max_logits(&self) -> bool {
        self.max_logits.is_some()
    }

    /// Copies results with the largest scores.
    pub(super) fn assign(self, (output, largest): (Output<T>, Array3<f32>)) {
        output.o.assign_to(self.o);
        self.lse.into_iter().for_each(|lse| output.lse.assign_to(lse));
        self.max_logits.into_iter().for_each(|to| largest.assign_to(to));
    }

    /// Lets `compute` write O and LSE.
    ///
    /// # Errors
    /// The errors of `compute`.
    pub(super) fn write(
        self,
        compute: impl FnOnce(ArrayViewMut4<'_, T>, ArrayViewMut3<'_, f32>) -> Result<(), CpuError>,
    ) -> Result<(), CpuError> {
        let mut unwanted = Array3::zeros(if self.lse.is_some() { [0; 3] } else { self.rows });
        compute(self.o, self.lse.unwrap_or_else(|| unwanted.view_mut()))
    }
}
