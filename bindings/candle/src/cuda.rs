//! Attention over candle's tensors on a GPU, on candle's stream, without copies.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use candle_core::cuda_backend::{CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Shape, Storage, StorageRef, Tensor};
use fa3::cuda::{
    Backward, BackwardOptions, Compiled, Device, Forward, ForwardOptions, OperationError, PlanCache,
    SplitKeys, Stream, Workspace,
};
use fa3::problem::{BackwardSpec, TensorDesc, TensorName};

use crate::call::{Call, desc};
use crate::error::Error;
use crate::pass::{Gradients, Pass};

/// Open devices by their numbers, with all kernels compiled for them. They stay open until the process ends.
static DEVICES: LazyLock<Mutex<HashMap<u32, Device>>> = LazyLock::new(Mutex::default);
/// Plans of forward passes, by device number and call.
static FORWARD: LazyLock<PlanCache<(u32, Call), Forward>> = LazyLock::new(PlanCache::default);
/// Plans of backward passes, by device number and call.
static BACKWARD: LazyLock<PlanCache<(u32, BackwardCall), Backward>> = LazyLock::new(PlanCache::default);

/// A backward pass: everything that its plan depends on, except for the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BackwardCall {
    forward: Call,
    dout: TensorDesc,
    deterministic: bool,
}

/// Computes O and LSE.
///
/// # Errors
/// The call is invalid, no kernel supports it, or the driver reports an error.
pub(crate) fn forward(
    pass: &Pass,
    call: &Call,
    inputs: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    let device = &inputs[0].0.device;
    let stream = device.cuda_stream();
    let plan = FORWARD.find(&(ordinal(&stream)?, call.clone()), |(ordinal, call)| {
        let problem = call.spec().validate().map_err(Error::from)?;
        let options = ForwardOptions::default();
        let options = if call.is_cached() { options.split_keys(SplitKeys::Even) } else { options };
        Forward::with(&open(*ordinal)?, &problem, &options).map_err(refused)
    })?;
    let mut o = uninitialised(device, inputs[0].0.dtype(), &call.o_shape())?;
    let mut lse = uninitialised(device, DType::F32, &call.lse_shape())?;
    let lists = held(pass.tensors());
    let mut launch = Launch::new(&stream);
    for (name, (storage, layout)) in ["q", "k", "v"].into_iter().zip(inputs) {
        launch.input(name, storage, layout)?;
    }
    launch.inputs(&lists)?;
    launch.output("o", &mut o)?;
    launch.output("lse", &mut lse)?;
    launch.run(&plan, device)?;
    Ok((o, lse))
}

/// Computes dQ, dK and dV, and dsink if there are sinks.
///
/// # Errors
/// The errors of [`forward`].
pub(crate) fn backward(
    given: &Gradients<'_>,
    device: &CudaDevice,
    deterministic: bool,
) -> Result<([Tensor; 3], Option<Tensor>)> {
    let (stream, pass) = (device.cuda_stream(), given.pass);
    let of_dout = (given.dout.dtype(), given.dout.layout());
    let dout = desc(TensorName::DOut, of_dout, pass.rows.cu_seqlens_q.is_some())?;
    let call = BackwardCall { forward: given.call.clone(), dout, deterministic };
    let plan = BACKWARD.find(&(ordinal(&stream)?, call), |(ordinal, call)| {
        let mut spec = BackwardSpec::contiguous(call.forward.spec());
        spec.dout = call.dout;
        let problem = spec.validate().map_err(Error::from)?;
        let mut options = BackwardOptions::default();
        options.deterministic = call.deterministic;
        Backward::with(&open(*ordinal)?, &problem, &options).map_err(refused)
    })?;
    let [q, k, v] = given.inputs;
    let inputs = [("q", q), ("k", k), ("v", v), ("o", given.o), ("dout", &given.dout), ("lse", pass.lse())];
    let dlse = given.dlse.iter().map(|dlse| ("dlse", dlse));
    let inputs = held(inputs.into_iter().chain(dlse).chain(pass.tensors()));
    let outputs = ["dq", "dk", "dv"].into_iter().zip(given.call.input_shapes());
    let outputs = outputs.map(|(name, shape)| (name, q.dtype(), shape));
    let dsink = pass.sink.iter().map(|sink| ("dsink", DType::F32, sink.shape().clone()));
    let mut outputs = outputs
        .chain(dsink)
        .map(|(name, dtype, shape)| Ok((name, uninitialised(device, dtype, &shape)?, shape)))
        .collect::<Result<Vec<_>>>()?;

    let mut launch = Launch::new(&stream);
    launch.inputs(&inputs)?;
    for (name, storage, _) in &mut outputs {
        launch.output(name, storage)?;
    }
    launch.run(&plan, device)?;

    let mut gradients = outputs.into_iter().map(|(_, storage, shape)| {
        Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
    });
    let [dq, dk, dv] = [(); 3].map(|()| gradients.next().expect("there are three"));
    Ok(([dq, dk, dv], gradients.next()))
}

/// A tensor by its name, held while it is used.
type Held<'a> = (&'static str, (StorageRef<'a>, &'a Layout));

fn held<'a>(tensors: impl Iterator<Item = (&'static str, &'a Tensor)>) -> Vec<Held<'a>> {
    tensors.map(|(name, x)| (name, x.storage_and_layout())).collect()
}

/// Gets the address of a slice of any supported type, and a guard that must be dropped after the launch.
macro_rules! address {
    ($storage:expr, $slice:expr, $address:ident, $stream:expr) => {{
        let given = $storage.dtype();
        #[allow(clippy::wildcard_enum_match_arm, reason = "a type that candle adds is refused as others are")]
        match $slice {
            CudaStorageSlice::F16(slice) => Ok(slice.$address($stream)),
            CudaStorageSlice::BF16(slice) => Ok(slice.$address($stream)),
            CudaStorageSlice::F32(slice) => Ok(slice.$address($stream)),
            CudaStorageSlice::U32(slice) => Ok(slice.$address($stream)),
            CudaStorageSlice::I32(slice) => Ok(slice.$address($stream)),
            _ => Err(candle_core::Error::UnsupportedDTypeForOp(given, "fa3-attention")),
        }
    }};
}

/// The tensors of a launch, by their names. Dropping this value, after the launch, records candle's events.
struct Launch<'a> {
    stream: &'a Arc<CudaStream>,
    at: Vec<(&'static str, Option<u64>)>,
    uses: Vec<SyncOnDrop<'a>>,
}

impl<'a> Launch<'a> {
    fn new(stream: &'a Arc<CudaStream>) -> Launch<'a> {
        Launch { stream, at: Vec::new(), uses: Vec::new() }
    }

    /// Adds a tensor that is read.
    fn input(&mut self, name: &'static str, storage: &'a CudaStorage, layout: &Layout) -> Result<()> {
        let (start, used) = address!(storage, &storage.slice, device_ptr, self.stream)?;
        let offset = layout.start_offset() * storage.dtype().size_in_bytes();
        self.at.push((name, Some(start + offset as u64)));
        self.uses.push(used);
        Ok(())
    }

    /// Adds tensors that are read. A list entry has the same bits as u32 and as i32.
    fn inputs(&mut self, held: &'a [Held<'a>]) -> Result<()> {
        held.iter().try_for_each(|(name, (storage, layout))| self.input(name, on_gpu(storage)?, layout))
    }

    /// Adds a tensor that is written.
    fn output(&mut self, name: &'static str, storage: &'a mut CudaStorage) -> Result<()> {
        let (start, used) = address!(storage, &mut storage.slice, device_ptr_mut, self.stream)?;
        self.at.push((name, Some(start)));
        self.uses.push(used);
        Ok(())
    }

    /// Launches the plan, with a new workspace.
    fn run<P>(self, plan: &Compiled<P>, device: &CudaDevice) -> Result<()> {
        let bytes = Shape::from(plan.workspace_bytes());
        let CudaStorageSlice::U8(mut workspace) = uninitialised(device, DType::U8, &bytes)?.slice else {
            unreachable!("bytes are asked for")
        };
        if plan.counter_bytes() > 0 {
            let mut counters = workspace.slice_mut(..plan.counter_bytes());
            self.stream.memset_zeros(&mut counters).w()?;
        }
        let (workspace, _used) = workspace.device_ptr_mut(self.stream);
        // SAFETY: candle's stream is a stream of the device's primary context, as the plan's streams are. It outlives
        // this value, which is dropped at the end of this call.
        #[allow(unsafe_code, reason = "streams are plain numbers between libraries")]
        let stream = unsafe { Stream::from_raw(plan.device(), self.stream.cu_stream().expose_provenance()) };
        // SAFETY: these are the addresses of tensors of the plan's shapes, strides and types on that device, whose
        // storages are held until the launch is done. Candle frees memory in the order of its stream, and by events
        // where it was used on other streams, which are recorded when `uses` is dropped. Outputs and workspace are new,
        // and the workspace's counters are zeroed on this stream. If the plan is dropped, its device stays open.
        #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
        unsafe { plan.launch(&stream, &self.at, Workspace::parts(workspace)) }.map_err(refused)
    }
}

/// Memory for a kernel's output. It has at least one element, because the driver cannot allocate 0 bytes.
fn uninitialised(device: &CudaDevice, dtype: DType, shape: &Shape) -> Result<CudaStorage> {
    // SAFETY: any bits are a valid element, and the kernel that gets the memory writes all of it before anything reads
    // it.
    #[allow(unsafe_code, reason = "zeros would be written for nothing")]
    unsafe {
        device.alloc_uninit(&Shape::from(shape.elem_count().max(1)), dtype)
    }
}

/// The storage of a tensor on a GPU.
///
/// # Errors
/// The tensor is not on a GPU.
pub(crate) fn on_gpu<'a>(storage: &'a StorageRef<'_>) -> Result<&'a CudaStorage> {
    match &**storage {
        Storage::Cuda(storage) => Ok(storage),
        Storage::Cpu(_) | Storage::Metal(_) => {
            Err(Error::Device { given: storage.device().location() }.into())
        }
    }
}

/// The number of candle's device, as the driver counts devices.
fn ordinal(stream: &CudaStream) -> Result<u32> {
    u32::try_from(stream.context().ordinal()).map_err(candle_core::Error::wrap)
}

/// The device, opened once.
fn open(ordinal: u32) -> Result<Device> {
    // If another thread panicked, the map still has all devices that were inserted.
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(device) = devices.get(&ordinal) {
        return Ok(device.clone());
    }
    let device = Device::open(ordinal).map_err(|error| refused(error.into()))?;
    devices.insert(ordinal, device.clone());
    Ok(device)
}

fn refused(error: OperationError) -> candle_core::Error {
    Error::Attention(error.into()).into()
}
