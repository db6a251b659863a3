//! Quantization to e4m3, planned and compiled: running it is one launch, or three where scales take another pass.

mod error;

use fa3_sched::quantize::Plan;
use fa3_types::{Address, QuantizeAddresses, QuantizePlacement, QuantizeProblem};

use super::planned::Planned;
use super::unfit::{check_given, check_sizes};
use super::{Device, DeviceBuffer, Function, HostError, Stream, Workspace};
use crate::kernels::quantize;

pub use error::QuantizeError;

/// Quantization to e4m3, with rotary embedding and incoherent processing before it, planned and compiled for one
/// device: made once, run any number of times, from any thread.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
/// ```
///
/// With [`QuantizeSpec::transposed`](fa3_types::QuantizeSpec::transposed) codes are as products read V.
/// [`Scaling`](fa3_types::Scaling) says what else may have a scale: heads, the tensor, or channels, whose means are
/// subtracted first. These take another pass over the tensor, and a workspace.
///
/// Running it allocates no device memory, waits for nothing and works while the stream is captured into a graph.
///
/// ```
/// use fa3_cuda::host::{Device, Quantize, QuantizeError, QuantizeTensors, Workspace};
/// use fa3_types::{Dtype, QuantizeSpec, Shape};
///
/// let run = || -> Result<Vec<f32>, QuantizeError> {
///     // (batch, seqlen, heads, head_dim), with a scale for each 128 rows of a head
///     let shape = Shape { batch: 1, seqlen: 1000, heads: 2, head_dim: 64 };
///     let problem = QuantizeSpec::contiguous(Dtype::Bf16, shape).validate()?;
///
///     let device = Device::open(0)?;
///     let quantize = Quantize::new(&device, &problem)?;
///
///     let stream = device.stream()?;
///     let mut x = device.alloc(problem.x().extent_bytes().0 as usize)?;
///     x.fill(&stream, 0)?;
///     let (mut codes, mut scales) = (device.alloc(1000 * 2 * 64)?, device.alloc(4 * 2 * 8)?);
///     let mut workspace = Workspace::new(&device, &stream, quantize.workspace_bytes())?;
///     let tensors = QuantizeTensors::new(&x, &mut codes).scales(&mut scales);
///     quantize.run(&stream, tensors, &mut workspace)?;
///     Ok(scales.download(&stream)?)
/// };
/// match run() {
///     Ok(scales) => assert_eq!(scales, [1.0; 16]), // of zeros
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct Quantize {
    device: Device,
    plan: Plan,
    planned: Planned,
}

/// Buffers that hold a problem's tensors from their first bytes on: those that the problem has.
#[derive(Debug)]
#[non_exhaustive]
pub struct QuantizeTensors<'a> {
    /// The tensor.
    pub x: &'a DeviceBuffer,
    /// Its codes, in the problem's layout.
    pub codes: &'a mut DeviceBuffer,
    /// Its scales, f32 of [`QuantizeProblem::scales_shape`]; none if the scale is given.
    pub scales: Option<&'a mut DeviceBuffer>,
    /// The means of its channels, f32 (batch, heads, head_dim), if these have scales.
    pub mean: Option<&'a mut DeviceBuffer>,
    /// What a rotation needs.
    pub rotary: Option<RotaryTensors<'a>>,
}

/// Buffers of rotary embedding.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct RotaryTensors<'a> {
    /// Cosines, f32 (table_rows, rotary_dim / 2).
    pub cos: &'a DeviceBuffer,
    /// Sines, of the same shape.
    pub sin: &'a DeviceBuffer,
    /// The positions of rows, i32 (batch, seqlen), if they are listed.
    pub positions: Option<&'a DeviceBuffer>,
}

impl<'a> QuantizeTensors<'a> {
    /// The tensor and its codes.
    pub fn new(x: &'a DeviceBuffer, codes: &'a mut DeviceBuffer) -> QuantizeTensors<'a> {
        QuantizeTensors { x, codes, scales: None, mean: None, rotary: None }
    }

    /// Has scales written here, if anywhere.
    #[must_use]
    pub fn scales(self, scales: impl Into<Option<&'a mut DeviceBuffer>>) -> QuantizeTensors<'a> {
        QuantizeTensors { scales: scales.into(), ..self }
    }

    /// Has the means of channels written here, if anywhere.
    #[must_use]
    pub fn mean(self, mean: impl Into<Option<&'a mut DeviceBuffer>>) -> QuantizeTensors<'a> {
        QuantizeTensors { mean: mean.into(), ..self }
    }

    /// Gives what a rotation needs, if there is one.
    #[must_use]
    pub fn rotary(self, rotary: impl Into<Option<RotaryTensors<'a>>>) -> QuantizeTensors<'a> {
        QuantizeTensors { rotary: rotary.into(), ..self }
    }
}

impl<'a> RotaryTensors<'a> {
    /// Tables of cosines and sines, for rows at successive positions.
    pub fn new(cos: &'a DeviceBuffer, sin: &'a DeviceBuffer) -> RotaryTensors<'a> {
        RotaryTensors { cos, sin, positions: None }
    }

    /// Gives the positions of rows, if they are listed.
    #[must_use]
    pub fn positions(self, positions: impl Into<Option<&'a DeviceBuffer>>) -> RotaryTensors<'a> {
        RotaryTensors { positions: positions.into(), ..self }
    }
}

impl Quantize {
    /// Plans and compiles.
    ///
    /// # Errors
    /// [`QuantizeError::Tiles`], or what the driver says. Most kernels that rotate or transform need one for CUDA 12.1.
    pub fn new(device: &Device, problem: &QuantizeProblem) -> Result<Quantize, QuantizeError> {
        let plan = Plan::new(problem, &device.limits())?;
        let planned = Planned::new(device, &quantize::program(&plan), device.may_overlap(None))?;
        Ok(Quantize { device: device.clone(), plan, planned })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels that it launches; none if there are no rows.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// Bytes of the [`Workspace`] that a launch needs; 0 unless scales take another pass. What they hold does not
    /// matter.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// Puts it on `stream`. Returns at once.
    ///
    /// # Safety
    /// - The stream must be of this device.
    /// - `at` must be where the problem's tensors are, in memory that the device may touch.
    /// - `workspace` must be the address, a multiple of 256, of [`Quantize::workspace_bytes`] bytes; any address where
    ///   that is 0.
    /// - All of that memory must live until the work is done, as must this value or a clone of its [`Device`]. Nobody
    ///   else may use the outputs or the workspace or change the inputs meanwhile. A graph that captured it holds its
    ///   addresses.
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        at: &QuantizePlacement,
        workspace: u64,
    ) -> Result<(), HostError> {
        let given = at.addresses().all().into_iter().flatten();
        let mut addresses = [0; 7];
        let count = addresses.iter_mut().zip(given).map(|(to, Address(from))| *to = from).count();
        // SAFETY: the caller vouches for the tensors and the workspace.
        unsafe { self.planned.launch(stream, &addresses[..count], workspace) }
    }

    /// Puts it on `stream`. Returns at once. Launches that share a workspace must run one after the other: on one
    /// stream, or on streams that wait for each other.
    ///
    /// # Errors
    /// A buffer that is missing, not wanted, too small or of another device, or what the driver says.
    pub fn run(
        &self,
        stream: &Stream,
        tensors: QuantizeTensors<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), QuantizeError> {
        let QuantizeTensors { x, codes, scales, mean, rotary } = tensors;
        let (cos, sin) = (rotary.map(|rotary| rotary.cos), rotary.map(|rotary| rotary.sin));
        let positions = rotary.and_then(|rotary| rotary.positions);
        let buffers = [Some(x), Some(&*codes), scales.as_deref(), mean.as_deref(), cos, sin, positions];
        check_given(self.device.context(), stream, buffers, workspace, self.workspace_bytes())?;
        let at = placed(self.plan.problem(), buffers.map(|x| x.map(|x| (x.address(), x.bytes()))))?;
        // SAFETY: every tensor lies within its buffer, and outputs apart from all others. A buffer of our own
        // that is dropped waits for the work under way, as does a kernel; one of the caller's outlives it, for
        // which the caller vouched.
        Ok(unsafe { self.launch(stream, &at, workspace.address()) }?)
    }
}

/// The addresses of tensors at the starts of memories with these addresses and sizes.
fn placed(
    problem: &QuantizeProblem,
    memories: [Option<(u64, usize)>; 7],
) -> Result<QuantizePlacement, QuantizeError> {
    let needed = problem.tensor_bytes().map(|(tensor, bytes)| (tensor, bytes.unwrap_or(0)));
    check_sizes(needed, memories)?;
    let [x, codes, scales, mean, cos, sin, positions] =
        memories.map(|memory| memory.map(|(address, _)| Address(address)));
    let (x, codes) = (x.unwrap_or(Address(0)), codes.unwrap_or(Address(0)));
    Ok(QuantizePlacement::new(problem, QuantizeAddresses { x, codes, scales, mean, cos, sin, positions })?)
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemError, QuantizeProblemError, QuantizeSpec, Scaling, Shape, TensorName};

    use super::*;

    #[test]
    fn memories_that_are_too_small_or_not_wanted_are_named() {
        let shape = Shape { batch: 1, seqlen: 100, heads: 2, head_dim: 64 };
        let problem = QuantizeSpec::contiguous(Dtype::F16, shape).validate().unwrap();
        let good =
            [Some((0x1_0000, 25_600)), Some((0x2_0000, 12_800)), Some((0x3_0000, 8)), None, None, None, None];
        assert!(placed(&problem, good).is_ok());
        let mut small = good;
        small[1] = Some((0x2_0000, 12_799));
        let (tensor, given, needed) = (TensorName::Codes, 12_799, 12_800);
        assert_eq!(placed(&problem, small), Err(QuantizeError::BufferSize { tensor, given, needed }));
        // Transposed, rows are 128 keys.
        let transposed = QuantizeSpec::contiguous(Dtype::F16, shape).transposed().validate().unwrap();
        let needed = 2 * 64 * 128;
        let error = QuantizeError::BufferSize { tensor: TensorName::Codes, given: 12_800, needed };
        assert_eq!(placed(&transposed, good), Err(error));
        let mut unwanted = good;
        unwanted[6] = Some((0x4_0000, 1000));
        let error = ProblemError::Unwanted { tensor: TensorName::Positions };
        assert_eq!(placed(&problem, unwanted), Err(QuantizeProblemError::from(error).into()));
        // Means of two heads of 64 channels.
        let channels =
            QuantizeSpec::contiguous(Dtype::F16, shape).scaling(Scaling::Channel).validate().unwrap();
        let mut memories = good;
        (memories[2], memories[3]) = (Some((0x3_0000, 512)), Some((0x4_0000, 511)));
        let (tensor, given, needed) = (TensorName::Mean, 511, 512);
        assert_eq!(placed(&channels, memories), Err(QuantizeError::BufferSize { tensor, given, needed }));
        memories[3] = Some((0x4_0000, 512));
        assert!(placed(&channels, memories).is_ok());
    }
}
