//! The forward pass over memory of [`cudarc`](crate::cudarc).

use ::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use fa3_types::Dtype;
use half::{bf16, f16};

use super::{DeviceBuffer, Forward, OperationError, PlacementError, Stream, Tensors, Workspace};

/// Element types of Q, K, V and O on the GPU.
pub trait Element: sealed::Sealed {
    /// The type's name at run time.
    const DTYPE: Dtype;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}

impl Forward {
    /// Launches the operation on a stream of [`cudarc`](crate::cudarc), over its slices or views of them. Each slice
    /// must begin with its tensor. Returns at once. The slices' events are waited for and recorded, as in every other
    /// use of slices. For slices of 16-bit floats, cudarc needs its feature `f16`.
    ///
    /// ```no_run
    /// use fa3_cuda::cudarc::driver::CudaContext;
    /// use fa3_cuda::host::{Device, Forward, Workspace};
    /// use fa3_types::{Dtype, ProblemSpec, Shape};
    /// use half::bf16;
    ///
    /// let shape = Shape { batch: 1, seqlen: 1000, heads: 4, head_dim: 64 };
    /// let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).validate()?;
    /// let device = Device::open(0)?;
    /// let forward = Forward::new(&device, &problem)?;
    /// let mut workspace = Workspace::new(&device, &device.default_stream(), forward.workspace_bytes())?;
    ///
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let x = stream.clone_htod(&vec![bf16::ONE; 1000 * 4 * 64])?;
    /// let mut o = stream.alloc_zeros::<bf16>(1000 * 4 * 64)?;
    /// let mut lse = stream.alloc_zeros::<f32>(4 * 1000)?;
    /// forward.run_slices(&stream, &x, &x, &x, &mut o, &mut lse, &mut workspace)?;
    /// assert_eq!(stream.clone_dtoh(&o)?[0], bf16::ONE); // the mean of ones
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// A slice is too small, of another element type or of another device, or the driver reports an error.
    #[allow(clippy::too_many_arguments, reason = "cudarc's slices are five types")]
    pub fn run_slices<T: Element>(
        &self,
        stream: &CudaStream,
        q: &impl DevicePtr<T>,
        k: &impl DevicePtr<T>,
        v: &impl DevicePtr<T>,
        o: &mut impl DevicePtrMut<T>,
        lse: &mut impl DevicePtrMut<f32>,
        workspace: &mut Workspace,
    ) -> Result<(), OperationError> {
        // All slices have one type.
        let expected = self.plan().problem().k().dtype;
        if T::DTYPE != expected {
            return Err(PlacementError::Element { given: T::DTYPE, expected }.into());
        }
        let raw = |stream: &CudaStream| stream.context().cu_ctx();
        let contexts = [stream, q.stream(), k.stream(), v.stream(), o.stream(), lse.stream()].map(raw);
        let names = ["the stream", "q", "k", "v", "o", "lse"];
        for (given, context) in names.into_iter().zip(contexts) {
            if !self.device().context().is_raw(context) {
                return Err(PlacementError::OtherDevice { given }.into());
            }
        }
        let bytes = [q.num_bytes(), k.num_bytes(), v.num_bytes(), o.num_bytes(), lse.num_bytes()];
        let (q, _q) = q.device_ptr(stream);
        let (k, _k) = k.device_ptr(stream);
        let (v, _v) = v.device_ptr(stream);
        let (o, _o) = o.device_ptr_mut(stream);
        let (lse, _lse) = lse.device_ptr_mut(stream);
        let memory = |address, bytes| {
            // SAFETY: the slice belongs to this device's context. Its events are recorded at the end of this call. They
            // keep the slice alive and reserved for this work until the work is done. The value made here is dropped
            // before.
            unsafe { DeviceBuffer::from_raw(self.device(), address, bytes) }
        };
        let [q_bytes, k_bytes, v_bytes, o_bytes, lse_bytes] = bytes;
        let (q, k, v) = (memory(q, q_bytes), memory(k, k_bytes), memory(v, v_bytes));
        let (mut o, mut lse) = (memory(o, o_bytes), memory(lse, lse_bytes));
        // SAFETY: the stream belongs to this device's context, and outlives the value, which is dropped at the end of
        // this call.
        let stream = unsafe { Stream::from_raw(self.device(), stream.cu_stream().expose_provenance()) };
        // Elements have 16 bits, so there are no scales.
        let tensors = Tensors::new([("q", &q), ("k", &k), ("v", &v)], [("o", &mut o), ("lse", &mut lse)]);
        self.run(&stream, tensors, workspace)
    }
}
