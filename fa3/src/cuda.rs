//! Attention on a Hopper GPU.
//!
//! [`Attention::forward`](crate::Attention::forward) copies arrays to the GPU and back. Where the tensors are there already,
//! make a [`Forward`] of the problem once and run it many times.
//!
//! Over memory of this library:
//!
//! ```
//! use fa3::cuda::{Device, Forward, ForwardError};
//! use fa3::types::{Dtype, ProblemSpec, Shape};
//!
//! let attend = || -> Result<Vec<f32>, ForwardError> {
//!     // (batch, seqlen, heads, head_dim)
//!     let shape = Shape { batch: 1, seqlen: 1000, heads: 4, head_dim: 128 };
//!     let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
//!     let device = Device::open(0)?;
//!     let forward = Forward::new(&device, &problem)?;
//!
//!     let stream = device.stream()?;
//!     let one = [0x80, 0x3f].repeat(1000 * 4 * 128); // 1 in bf16
//!     let mut x = device.alloc(one.len())?;
//!     x.upload(&stream, &one)?;
//!     let (mut o, mut lse) = (device.alloc(one.len())?, device.alloc(4 * 4 * 1000)?);
//!     for _ in 0..10 {
//!         forward.run(&stream, &x, &x, &x, &mut o, &mut lse)?;
//!     }
//!     Ok(lse.download(&stream)?)
//! };
//! match attend() {
//!     // The last row sees 1000 keys with the score 128 / sqrt(128).
//!     Ok(lse) => assert!((lse[999] - (1000_f32.ln() + 128_f32.sqrt())).abs() < 1e-4),
//!     Err(error) => println!("skipped: {error}"),
//! }
//! ```
//!
//! Over slices of [`cudarc`], on a stream of its own; for slices of 16-bit floats it wants its feature `f16`:
//!
//! ```no_run
//! use fa3::cuda::cudarc::driver::CudaContext;
//! use fa3::cuda::{Device, Forward};
//! use fa3::half::bf16;
//! use fa3::types::{Dtype, ProblemSpec, Shape};
//!
//! let shape = Shape { batch: 1, seqlen: 1000, heads: 4, head_dim: 128 };
//! let problem = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal().validate()?;
//! let forward = Forward::new(&Device::open(0)?, &problem)?;
//!
//! let stream = CudaContext::new(0)?.new_stream()?;
//! let x = stream.clone_htod(&vec![bf16::ONE; 1000 * 4 * 128])?;
//! let mut o = stream.alloc_zeros::<bf16>(1000 * 4 * 128)?;
//! let mut lse = stream.alloc_zeros::<f32>(4 * 1000)?;
//! forward.run_slices(&stream, &x, &x, &x, &mut o, &mut lse)?;
//! assert_eq!(stream.clone_dtoh(&o)?[0], bf16::ONE); // the mean of ones
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Over addresses on a stream of another library, there is [`Forward::launch`].

use fa3_types::Problem;
use ndarray::{Array3, Array4, ArrayView4};

use crate::scalar::sealed::Sealed;
use crate::{Output, Scalar};

pub use fa3_cuda::cudarc;
pub use fa3_cuda::host::{
    Device, DeviceBuffer, Element, Event, Forward, ForwardError, Function, Graph, HostError, Memory, Stream,
};

/// The forward pass of a problem with contiguous tensors, and back. The views have the problem's shapes: both come from one
/// [`crate::Attention`].
pub(crate) fn forward<T: Scalar>(
    device: &Device,
    problem: &Problem,
    qkv: [ArrayView4<'_, T>; 3],
) -> Result<Output<T::Output>, ForwardError> {
    let forward = Forward::new(device, problem)?;
    let stream = device.default_stream();
    let upload = |x: ArrayView4<'_, T>| -> Result<DeviceBuffer, HostError> {
        let bits: Vec<T::Bits> = x.iter().map(|x| x.to_bits()).collect();
        let mut buffer = device.alloc(size_of_val(bits.as_slice()))?;
        buffer.upload(&stream, &bits)?;
        Ok(buffer)
    };
    let [q, k, v] = qkv.map(upload);
    let (q, k, v) = (q?, k?, v?);
    let lse_shape = problem.lse_shape();
    let mut o = device.alloc(problem.o().extent_bytes().0 as usize)?;
    let mut lse = device.alloc(lse_shape.iter().product::<usize>() * size_of::<f32>())?;
    forward.run(&stream, &q, &k, &v, &mut o, &mut lse)?;
    let o = o.download(&stream)?.into_iter().map(T::Output::from_bits).collect();
    let lse = lse.download(&stream)?;
    Ok(Output {
        o: Array4::from_shape_vec(problem.o().shape.dims(), o).expect("one element each"),
        lse: Array3::from_shape_vec(lse_shape, lse).expect("one element each"),
    })
}
