//! Attention in 8 bits of 16-bit tensors, planned and compiled.

use fa3_sched::fp8::Plan;
use fa3_types::{Address, Fp8Addresses, Fp8Placement, Fp8Problem};

use super::planned::Planned;
use super::unfit::{check_given, check_sizes};
use super::{Device, DeviceBuffer, ForwardError, Function, HostError, Stream, Workspace};
use crate::kernels::fp8;

/// Attention of f16 or bf16 tensors in 8 bits, planned and compiled for one device: made once, run any number of times,
/// from any thread. Kernels quantize Q, K and V, which a Hadamard matrix mixes before if there are signs, and the
/// forward pass takes their codes. These lie in the workspace.
///
/// Running it allocates no device memory, waits for nothing and works while the stream is captured into a graph.
///
/// ```
/// use fa3_cuda::host::{Device, ForwardError, Fp8Forward, Fp8Tensors, Workspace};
/// use fa3_types::{Dtype, Fp8Spec, ProblemSpec, Shape};
///
/// let run = || -> Result<Vec<u16>, ForwardError> {
///     let shape = Shape { batch: 1, seqlen: 300, heads: 2, head_dim: 64 };
///     let attention = ProblemSpec::dense(Dtype::Bf16, shape, shape).causal();
///     let problem = Fp8Spec::new(attention).validate().expect("bf16 has codes");
///
///     let device = Device::open(0)?;
///     let forward = Fp8Forward::new(&device, &problem)?;
///     let stream = device.stream()?;
///     let mut workspace = Workspace::new(&device, &stream, forward.workspace_bytes())?;
///     // 1 in bf16
///     let x = device.upload(&stream, &[0x3F80_u16; 300 * 2 * 64])?;
///     let mut o = device.alloc(x.bytes())?;
///     forward.run(&stream, Fp8Tensors::new(&x, &x, &x, &mut o), &mut workspace)?;
///     Ok(o.download(&stream)?)
/// };
/// match run() {
///     Ok(o) => assert_eq!(o, [0x3F80; 300 * 2 * 64]), // the mean of ones
///     Err(error) => println!("skipped: {error}"),
/// }
/// ```
#[derive(Debug)]
pub struct Fp8Forward {
    device: Device,
    plan: Plan,
    planned: Planned,
}

/// Buffers that hold a problem's tensors from their first bytes on, all of 16 bits but LSE.
#[derive(Debug)]
#[non_exhaustive]
pub struct Fp8Tensors<'a> {
    /// Q.
    pub q: &'a DeviceBuffer,
    /// K.
    pub k: &'a DeviceBuffer,
    /// V.
    pub v: &'a DeviceBuffer,
    /// O.
    pub o: &'a mut DeviceBuffer,
    /// LSE; without one it is not written.
    pub lse: Option<&'a mut DeviceBuffer>,
    /// Cosines and sines, f32 (table_rows, rotary_dim / 2), if Q and K are rotated.
    pub tables: Option<[&'a DeviceBuffer; 2]>,
}

impl<'a> Fp8Tensors<'a> {
    /// Q, K, V and O. LSE is not written, and nothing is rotated.
    pub fn new(
        q: &'a DeviceBuffer,
        k: &'a DeviceBuffer,
        v: &'a DeviceBuffer,
        o: &'a mut DeviceBuffer,
    ) -> Fp8Tensors<'a> {
        Fp8Tensors { q, k, v, o, lse: None, tables: None }
    }

    /// Has LSE written here, if anywhere.
    #[must_use]
    pub fn lse(self, lse: impl Into<Option<&'a mut DeviceBuffer>>) -> Fp8Tensors<'a> {
        Fp8Tensors { lse: lse.into(), ..self }
    }

    /// Gives the tables of cosines and sines, if Q and K are rotated.
    #[must_use]
    pub fn tables(self, tables: impl Into<Option<[&'a DeviceBuffer; 2]>>) -> Fp8Tensors<'a> {
        Fp8Tensors { tables: tables.into(), ..self }
    }
}

impl Fp8Forward {
    /// Plans and compiles.
    ///
    /// # Errors
    /// [`ForwardError`] if no kernel computes the problem, or what the driver says.
    pub fn new(device: &Device, problem: &Fp8Problem) -> Result<Fp8Forward, ForwardError> {
        let plan = Plan::new(problem, &device.limits())?;
        let planned = Planned::new(device, &fp8::program(&plan), device.may_overlap(None))?;
        Ok(Fp8Forward { device: device.clone(), plan, planned })
    }

    /// What was decided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The kernels that it launches, in this order.
    pub fn functions(&self) -> impl Iterator<Item = &Function> {
        self.planned.functions()
    }

    /// Bytes of the [`Workspace`] that a launch needs: codes and scales among them.
    pub fn workspace_bytes(&self) -> usize {
        self.planned.workspace_bytes()
    }

    /// How many of them, from the first on, must be 0 before the first launch: those of counters, at most
    /// [`Workspace::COUNTERS`].
    pub fn counter_bytes(&self) -> usize {
        self.planned.counter_bytes()
    }

    /// Puts it on `stream`: writes O of the tensors at `at`, and LSE if that has an address. Returns at once.
    ///
    /// # Safety
    /// Those of [`Forward::launch`](super::Forward::launch).
    ///
    /// # Errors
    /// What the driver says.
    pub unsafe fn launch(&self, stream: &Stream, at: &Fp8Placement, workspace: u64) -> Result<(), HostError> {
        let Fp8Addresses { q, k, v, o, lse, tables } = at.addresses();
        let [cos, sin] = tables.unwrap_or([Address(0); 2]);
        let addresses: [Address; fp8::OF_CALLER] = [q, k, v, o, lse.unwrap_or(Address(0)), cos, sin];
        let count = if tables.is_some() { fp8::OF_CALLER } else { fp8::OF_CALLER - 2 };
        let addresses = addresses.map(|Address(start)| start);
        // SAFETY: the caller vouches for tensors and workspace.
        unsafe { self.planned.launch(stream, &addresses[..count], workspace) }
    }

    /// Puts it on `stream`. Returns at once. Launches that share a workspace must run one after the other: on one
    /// stream, or on streams that wait for each other.
    ///
    /// # Errors
    /// A buffer that is too small or of another device, or what the driver says.
    pub fn run(
        &self,
        stream: &Stream,
        tensors: Fp8Tensors<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), ForwardError> {
        let Fp8Tensors { q, k, v, o, lse, tables } = tensors;
        let lse = lse.as_deref();
        let [cos, sin] = tables.map_or([None; 2], |tables| tables.map(Some));
        let buffers = [Some(q), Some(k), Some(v), Some(&*o), lse, cos, sin];
        check_given(self.device.context(), stream, buffers, workspace, self.workspace_bytes())?;
        let at = placed(self.plan.problem(), buffers.map(|x| x.map(|x| (x.address(), x.bytes()))))?;
        // SAFETY: every tensor lies within its buffer, and O and LSE apart from all others. A buffer of our own
        // that is dropped waits for the work under way, as does a kernel; one of the caller's outlives it, for
        // which the caller vouched.
        Ok(unsafe { self.launch(stream, &at, workspace.address()) }?)
    }
}

/// The addresses of Q, K, V, O, LSE, cosines and sines at the starts of memories with these addresses and sizes.
fn placed(problem: &Fp8Problem, memories: [Option<(u64, usize)>; 7]) -> Result<Fp8Placement, ForwardError> {
    check_sizes(problem.tensor_bytes(), memories)?;
    let [q, k, v, o, lse, cos, sin] = memories.map(|memory| memory.map(|(address, _)| Address(address)));
    let [q, k, v, o] = [q, k, v, o].map(|address| address.unwrap_or(Address(0)));
    let tables = cos.zip(sin).map(|(cos, sin)| [cos, sin]);
    Ok(Fp8Placement::new(problem, Fp8Addresses { q, k, v, o, lse, tables })?)
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, Fp8Spec, ProblemSpec, QkRotary, RopeStyle, Shape, TensorName};

    use super::*;

    #[test]
    fn memories_that_are_too_small_are_named() {
        let shape = Shape { batch: 1, seqlen: 100, heads: 2, head_dim: 64 };
        let (style, rotary_dim, table_rows) = (RopeStyle::HalfSplit, 32, 100);
        let rotary = QkRotary { style, rotary_dim, table_rows, q_position: 0, k_position: 0 };
        let spec = Fp8Spec::new(ProblemSpec::dense(Dtype::Bf16, shape, shape)).rotary(rotary);
        let problem = spec.validate().unwrap();
        // Tensors of 100 · 2 · 64 elements of 2 bytes, LSE of 2 · 100 numbers, tables of 100 · 16.
        let sizes = [25_600, 25_600, 25_600, 25_600, 800, 6400, 6400];
        let names = [
            TensorName::Q,
            TensorName::K,
            TensorName::V,
            TensorName::O,
            TensorName::Lse,
            TensorName::Cos,
            TensorName::Sin,
        ];
        let good = [0, 1, 2, 3, 4, 5, 6].map(|i| Some(((i as u64 + 1) << 20, sizes[i])));
        assert!(placed(&problem, good).is_ok());
        for (index, tensor) in names.into_iter().enumerate() {
            let (mut small, given, needed) = (good, sizes[index] - 1, sizes[index] as u64);
            small[index] = good[index].map(|(address, _)| (address, given));
            assert_eq!(placed(&problem, small), Err(ForwardError::BufferSize { tensor, given, needed }));
        }
    }
}
