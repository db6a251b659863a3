//! Attention over candle's tensors on a GPU, on candle's stream, where they lie.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop,
};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{CudaDevice, CudaStorage, DType, Layout, Result, Storage, StorageRef, Tensor};
use fa3::cuda::{
    Backward, BackwardOptions, Compiled, Device, Forward, Kept, OperationError, Stream, Workspace,
};
use fa3::half::{bf16, f16};
use fa3::problem::{BackwardSpec, Dtype, TensorDesc, TensorName};

use crate::Packed;
use crate::call::{Call, desc};
use crate::error::Error;
use crate::op::Gradients;

/// Devices by their numbers, open until the process ends, with all kernels that were compiled for them.
static DEVICES: LazyLock<Mutex<HashMap<u32, Device>>> = LazyLock::new(Mutex::default);
/// Forward passes by the numbers of their devices and their calls.
static FORWARD: LazyLock<Kept<(u32, Call), Forward>> = LazyLock::new(Kept::default);
/// Backward passes likewise.
static BACKWARD: LazyLock<Kept<(u32, BackwardCall), Backward>> = LazyLock::new(Kept::default);

/// A backward pass: all that its plan depends on but the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct BackwardCall {
    forward: Call,
    dout: TensorDesc,
    deterministic: bool,
}

/// Computes O and LSE.
///
/// # Errors
/// The call makes no sense, no kernel computes it, or the driver says no.
pub(crate) fn forward(
    call: &Call,
    packed: Option<&Packed>,
    inputs: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    match call.dtype() {
        Dtype::F16 => forward_of::<f16>(call, packed, inputs),
        Dtype::Bf16 => forward_of::<bf16>(call, packed, inputs),
        // Its plan says that there is no kernel of f32.
        Dtype::F32 => forward_of::<f32>(call, packed, inputs),
        Dtype::E4m3 => unreachable!("no type of candle is taken for e4m3"),
    }
}

fn forward_of<T: CudaDType + DeviceRepr + 'static>(
    call: &Call,
    packed: Option<&Packed>,
    inputs: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, CudaStorage)> {
    let device = &inputs[0].0.device;
    let stream = device.cuda_stream();
    let plan = FORWARD.find(&(ordinal(&stream)?, call.clone()), |(ordinal, call)| {
        let problem = call.spec().validate().map_err(Error::from)?;
        Forward::new(&open(*ordinal)?, &problem).map_err(refused)
    })?;
    let mut o = uninitialised::<T>(device, call.o_shape().elem_count())?;
    let mut lse = uninitialised::<f32>(device, call.lse_shape().elem_count())?;
    let lists = packed.map(lists);
    let mut launch = Launch::new(&stream);
    for (name, (storage, layout)) in ["q", "k", "v"].into_iter().zip(inputs) {
        launch.input::<T>(name, storage, layout)?;
    }
    launch.lists(lists.as_ref())?;
    launch.output("o", &mut o);
    launch.output("lse", &mut lse);
    launch.run(&plan, device)?;
    Ok((CudaStorage::wrap_cuda_slice(o, device.clone()), CudaStorage::wrap_cuda_slice(lse, device.clone())))
}

/// Computes dQ, dK and dV.
///
/// # Errors
/// As for [`forward`].
pub(crate) fn backward(
    given: &Gradients<'_>,
    device: &CudaDevice,
    deterministic: bool,
) -> Result<[Tensor; 3]> {
    match given.call.dtype() {
        Dtype::F16 => backward_of::<f16>(given, device, deterministic),
        Dtype::Bf16 => backward_of::<bf16>(given, device, deterministic),
        Dtype::F32 => backward_of::<f32>(given, device, deterministic),
        Dtype::E4m3 => unreachable!("no type of candle is taken for e4m3"),
    }
}

fn backward_of<T: CudaDType + DeviceRepr + 'static>(
    given: &Gradients<'_>,
    device: &CudaDevice,
    deterministic: bool,
) -> Result<[Tensor; 3]> {
    let stream = device.cuda_stream();
    let of_dout = (given.dout.dtype(), given.dout.layout());
    let dout = desc(TensorName::DOut, of_dout, given.packed.is_some())?;
    let call = BackwardCall { forward: given.call.clone(), dout, deterministic };
    let plan = BACKWARD.find(&(ordinal(&stream)?, call), |(ordinal, call)| {
        let mut spec = BackwardSpec::contiguous(call.forward.spec());
        spec.dout = call.dout;
        let problem = spec.validate().map_err(Error::from)?;
        let mut options = BackwardOptions::default();
        options.deterministic = call.deterministic;
        Backward::with(&open(*ordinal)?, &problem, &options).map_err(refused)
    })?;
    let shapes = given.call.input_shapes();
    let [q, k, v] = given.inputs;
    let inputs = [("q", q), ("k", k), ("v", v), ("o", given.o), ("dout", given.dout)];
    let inputs = inputs.map(|(name, x)| (name, x.storage_and_layout()));
    let of_rows = [("lse", Some(given.lse)), ("dlse", given.dlse)];
    let of_rows = of_rows.map(|(name, x)| (name, x.map(Tensor::storage_and_layout)));
    let lists = given.packed.map(lists);
    let [dq, dk, dv] = shapes.each_ref().map(|shape| uninitialised::<T>(device, shape.elem_count()));
    let mut gradients = [dq?, dk?, dv?];

    let mut launch = Launch::new(&stream);
    for (name, (storage, layout)) in &inputs {
        launch.input::<T>(name, on_gpu(storage)?, layout)?;
    }
    for (name, x) in &of_rows {
        if let Some((storage, layout)) = x {
            launch.input::<f32>(name, on_gpu(storage)?, layout)?;
        }
    }
    launch.lists(lists.as_ref())?;
    for (name, gradient) in ["dq", "dk", "dv"].into_iter().zip(&mut gradients) {
        launch.output(name, gradient);
    }
    launch.run(&plan, device)?;

    let mut shapes = shapes.into_iter();
    Ok(gradients.map(|gradient| {
        let storage = Storage::Cuda(CudaStorage::wrap_cuda_slice(gradient, device.clone()));
        let shape = shapes.next().expect("there are three");
        Tensor::from_storage(storage, shape, candle_core::op::BackpropOp::none(), false)
    }))
}

/// A list of packed sequences, held while it is used.
type List<'a> = (&'static str, DType, (StorageRef<'a>, &'a Layout));

fn lists(packed: &Packed) -> [List<'_>; 2] {
    packed.tensors().map(|(name, list)| (name, list.dtype(), list.storage_and_layout()))
}

/// The tensors of a launch, by their names. Candle's events are recorded when it is dropped, after the launch.
struct Launch<'a> {
    stream: &'a CudaStream,
    at: Vec<(&'static str, Option<u64>)>,
    uses: Vec<SyncOnDrop<'a>>,
}

impl<'a> Launch<'a> {
    fn new(stream: &'a CudaStream) -> Launch<'a> {
        Launch { stream, at: Vec::new(), uses: Vec::new() }
    }

    /// Adds a tensor that is read.
    fn input<T: CudaDType + DeviceRepr + 'static>(
        &mut self,
        name: &'static str,
        storage: &'a CudaStorage,
        layout: &Layout,
    ) -> Result<()> {
        let (start, used) = storage.as_cuda_slice::<T>()?.device_ptr(self.stream);
        self.at.push((name, Some(start + (layout.start_offset() * size_of::<T>()) as u64)));
        self.uses.push(used);
        Ok(())
    }

    /// Adds a tensor that is written.
    fn output<T>(&mut self, name: &'static str, slice: &'a mut impl DevicePtrMut<T>) {
        let (start, used) = slice.device_ptr_mut(self.stream);
        self.at.push((name, Some(start)));
        self.uses.push(used);
    }

    /// Adds the lists of packed sequences, whose numbers are the same bits in u32 and i32.
    fn lists(&mut self, lists: Option<&'a [List<'a>; 2]>) -> Result<()> {
        for (name, dtype, (storage, layout)) in lists.into_iter().flatten() {
            let storage = on_gpu(storage)?;
            if *dtype == DType::I32 {
                self.input::<i32>(name, storage, layout)?;
            } else {
                self.input::<u32>(name, storage, layout)?;
            }
        }
        Ok(())
    }

    /// Launches it, with a workspace of its own.
    fn run<P>(self, plan: &Compiled<P>, device: &CudaDevice) -> Result<()> {
        let mut workspace = uninitialised::<u8>(device, plan.workspace_bytes())?;
        if plan.counter_bytes() > 0 {
            let mut counters = workspace.slice_mut(..plan.counter_bytes());
            device.cuda_stream().memset_zeros(&mut counters).w()?;
        }
        let (workspace, _used) = workspace.device_ptr_mut(self.stream);
        // SAFETY: candle's stream is one of the device's primary context, which is that of the plan, and outlives this
        // value, which is gone at the end of this call.
        #[allow(unsafe_code, reason = "streams are plain numbers between libraries")]
        let stream = unsafe { Stream::from_raw(plan.device(), self.stream.cu_stream().expose_provenance()) };
        // SAFETY: these are the addresses of tensors of the plan's shapes, strides and types on that device, whose
        // storages are held until the launch is done. Candle frees memory in the order of its stream, and by events
        // where it was used on other ones, which are recorded when `uses` is dropped. Outputs and workspace are new,
        // and its counters zeroed on this stream. A plan that is dropped leaves its device, which stays open.
        #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
        unsafe { plan.launch(&stream, &self.at, Workspace::parts(workspace)) }.map_err(refused)
    }
}

/// Memory that a kernel will write, of one element at least: the driver allocates no empty memory.
fn uninitialised<T: DeviceRepr>(device: &CudaDevice, elements: usize) -> Result<CudaSlice<T>> {
    // SAFETY: any bits are an element, and the kernel that gets the memory writes all of it before anyone reads it.
    #[allow(unsafe_code, reason = "zeros would be written for nothing")]
    unsafe {
        device.alloc::<T>(elements.max(1))
    }
}

/// The storage of a tensor on a GPU.
///
/// # Errors
/// It is elsewhere.
fn on_gpu<'a>(storage: &'a StorageRef<'_>) -> Result<&'a CudaStorage> {
    match &**storage {
        Storage::Cuda(storage) => Ok(storage),
        Storage::Cpu(_) | Storage::Metal(_) => {
            Err(Error::Device { given: storage.device().location() }.into())
        }
    }
}

/// The number of candle's device, which is the driver's.
fn ordinal(stream: &CudaStream) -> Result<u32> {
    u32::try_from(stream.context().ordinal()).map_err(candle_core::Error::wrap)
}

/// The device, opened once.
fn open(ordinal: u32) -> Result<Device> {
    // What a panic left behind is a map of what was put there before.
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
