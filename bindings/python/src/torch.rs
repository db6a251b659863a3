//! Torch's functions that a repeated call needs, and its state that such a call depends on.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};

/// Torch's functions.
pub(crate) struct Torch {
    /// Functions whose results are false or 0 unless a tracer, a mode or a transform is active.
    states: [Py<PyAny>; 4],
    is_grad_enabled: Py<PyAny>,
    forward_ad: Py<PyAny>,
    empty_like: Py<PyAny>,
    float32: Py<PyAny>,
}

impl Torch {
    /// Torch's functions. `None` if it lacks one of them, some of which are private.
    pub(crate) fn find(py: Python<'_>) -> Option<&'static Torch> {
        static FOUND: PyOnceLock<Option<Torch>> = PyOnceLock::new();
        FOUND.get_or_init(py, || Torch::new(py).ok()).as_ref()
    }

    fn new(py: Python<'_>) -> PyResult<Torch> {
        let torch = py.import("torch")?;
        let of_c = torch.getattr("_C")?;
        let forward_ad = py.import("torch.autograd.forward_ad")?.into_any();
        forward_ad.getattr("_current_level")?;
        let state = |name| of_c.getattr(name).map(Bound::unbind);
        Ok(Torch {
            states: [
                state("_is_tracing")?,
                state("_len_torch_dispatch_stack")?,
                state("_len_torch_function_stack")?,
                state("_are_functorch_transforms_active")?,
            ],
            is_grad_enabled: torch.getattr("is_grad_enabled")?.unbind(),
            forward_ad: forward_ad.unbind(),
            empty_like: torch.getattr("empty_like")?.unbind(),
            float32: torch.getattr("float32")?.unbind(),
        })
    }

    /// Whether neither a tracer, a mode, a transform nor forward mode is active.
    ///
    /// # Errors
    /// Errors of torch's functions.
    pub(crate) fn is_plain(&self, py: Python<'_>) -> PyResult<bool> {
        for state in &self.states {
            if state.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        // Without forward mode its level is -1.
        let level: i64 = self.forward_ad.bind(py).getattr(intern!(py, "_current_level"))?.extract()?;
        Ok(level < 0)
    }

    /// Whether autograd records calls.
    ///
    /// # Errors
    /// Errors of torch's function.
    pub(crate) fn is_grad_enabled(&self, py: Python<'_>) -> PyResult<bool> {
        self.is_grad_enabled.bind(py).call0()?.is_truthy()
    }

    /// A new tensor like a contiguous one.
    ///
    /// # Errors
    /// Errors of the allocation.
    pub(crate) fn empty_like<'py>(&self, x: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.empty_like.bind(x.py()).call1((x,))
    }

    /// A new contiguous tensor of this shape, of the dtype of `like` or of float32.
    ///
    /// # Errors
    /// Errors of the allocation.
    pub(crate) fn new_empty<'py>(
        &self,
        like: &Bound<'py, PyAny>,
        shape: &[usize],
        is_float32: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = like.py();
        let named = is_float32.then(|| PyDict::new(py));
        if let Some(named) = &named {
            named.set_item(intern!(py, "dtype"), &self.float32)?;
        }
        like.call_method(intern!(py, "new_empty"), PyTuple::new(py, shape)?, named.as_ref())
    }
}
