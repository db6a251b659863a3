//! The forward pass over memory that the caller has from [`cudarc`].

use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut};
use fa3_types::Dtype;
use half::{bf16, f16};

use super::{Forward, ForwardError, placed};
use crate::host::Stream;

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
    /// Puts it on a stream of [`cudarc`], over its slices or views of them, which hold the problem's tensors from their first
    /// elements on. Returns at once; the slices' events are waited for and recorded as for every other use of them.
    /// For slices of 16-bit floats, cudarc wants its feature `f16`.
    ///
    /// ```no_run
    /// use fa3_cuda::cudarc::driver::CudaContext;
    /// use fa3_cuda::host::{Device, Forward};
    /// use fa3_types::{Dtype, ProblemSpec, Shape};
    /// use half::bf16;
    ///
    /// let shape = Shape { batch: 1, seqlen: 1000, heads: 4, head_dim: 64 };
    /// let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).validate()?;
    /// let forward = Forward::new(&Device::open(0)?, &problem)?;
    ///
    /// let stream = CudaContext::new(0)?.new_stream()?;
    /// let x = stream.clone_htod(&vec![bf16::ONE; 1000 * 4 * 64])?;
    /// let mut o = stream.alloc_zeros::<bf16>(1000 * 4 * 64)?;
    /// let mut lse = stream.alloc_zeros::<f32>(4 * 1000)?;
    /// forward.run_slices(&stream, &x, &x, &x, &mut o, &mut lse)?;
    /// assert_eq!(stream.clone_dtoh(&o)?[0], bf16::ONE); // the mean of ones
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Slices that are too small, of other elements or of another device, or what the driver says.
    pub fn run_slices<T: Element>(
        &self,
        stream: &CudaStream,
        q: &impl DevicePtr<T>,
        k: &impl DevicePtr<T>,
        v: &impl DevicePtr<T>,
        o: &mut impl DevicePtrMut<T>,
        lse: &mut impl DevicePtrMut<f32>,
    ) -> Result<(), ForwardError> {
        let expected = self.plan.problem().dtype();
        if T::DTYPE != expected {
            return Err(ForwardError::Element { given: T::DTYPE, expected });
        }
        let raw = |stream: &CudaStream| stream.context().cu_ctx();
        let contexts = [stream, q.stream(), k.stream(), v.stream(), o.stream(), lse.stream()].map(raw);
        if !contexts.into_iter().all(|context| self.device.context().is_raw(context)) {
            return Err(ForwardError::OtherDevice);
        }
        let bytes = [q.num_bytes(), k.num_bytes(), v.num_bytes(), o.num_bytes(), lse.num_bytes()];
        let (q, _q) = q.device_ptr(stream);
        let (k, _k) = k.device_ptr(stream);
        let (v, _v) = v.device_ptr(stream);
        let (o, _o) = o.device_ptr_mut(stream);
        let (lse, _lse) = lse.device_ptr_mut(stream);
        let memories = [(q, bytes[0]), (k, bytes[1]), (v, bytes[2]), (o, bytes[3]), (lse, bytes[4])];
        let at = placed(self.plan.problem(), memories)?;
        // SAFETY: the stream is of this device's context, and outlives the value, which is gone at the end of this call.
        let stream = unsafe { Stream::from_raw(&self.device, stream.cu_stream().expose_provenance()) };
        // SAFETY: every tensor lies within its slice, and O and LSE apart from all others. The slices' events, which are
        // recorded after this, keep them alive and to this work until it is done.
        Ok(unsafe { self.launch(&stream, &at) }?)
    }
}
