//! Launches that must be refused, and a kernel that breaks the context.

use fa3_cuda::host::{Device, HostError};
use fa3_cuda::kernels::ladder::vector_add;
use fa3_ir::{ArgError, ArgValue, Elem, Ptx, TensorMapError, TensorView};

use super::{compiled, floats, kernels, launch, pointer, ptx_of};
use crate::{Fallible, ensure};

pub(crate) fn arguments(device: &Device) -> Fallible<String> {
    let (stream, add) = (device.stream()?, compiled(device, &vector_add::kernel())?);
    let product = compiled(device, &kernels::one_product(64))?;
    let clusters = compiled(device, &kernels::cluster_ranks(4))?;
    let x = floats(device, 256)?;
    let mut said = Vec::new();

    let short = [pointer(&x)];
    let error = launch(&add, &stream, [1, 1, 1], &short).err();
    let expected = ArgError::Count { given: 1, expected: 4 };
    said.push(refused_as(error, |error| is_arg(error, &expected))?);

    let error = launch(&clusters, &stream, [6, 1, 1], &short).err();
    let expected = ArgError::Clusters { x: 6, cluster: 4 };
    said.push(refused_as(error, |error| is_arg(error, &expected))?);

    let view = TensorView::contiguous(x.address() + 8, &[64, 64], Elem::Bf16);
    let args = [ArgValue::Tensor(view.clone()), ArgValue::Tensor(view), pointer(&x)];
    let error = launch(&product, &stream, [1, 1, 1], &args).err();
    let given = TensorMapError::Address { given: x.address() + 8 };
    let expected = ArgError::Tensor { param: "a".to_owned(), error: given };
    said.push(refused_as(error, |error| is_arg(error, &expected))?);

    let error = device.alloc(1 << 50).err();
    said.push(refused_as(error, |error| matches!(error, HostError::OutOfMemory { .. }))?);
    let error = device.alloc(7)?.download::<f32>(&stream).err();
    said.push(refused_as(error, |error| matches!(error, HostError::BufferSize { given: 4, bytes: 7 }))?);
    let error = Device::open(99).err();
    said.push(refused_as(error, |error| matches!(error, HostError::NoDevice { ordinal: 99, .. }))?);
    Ok(said.join("; "))
}

/// Kernels that only the driver can refuse. The data of a kernel is public, so it may contain any of these faults.
pub(crate) fn compilations(device: &Device) -> Fallible<String> {
    let (stream, good) = (device.stream()?, ptx_of(&vector_add::kernel())?);
    let mut said = Vec::new();

    let bogus = Ptx { text: good.text.replace("add.rn.f32", "bogus.f32"), ..good.clone() };
    let compiles =
        |error: &HostError| matches!(error, HostError::Compile { log, .. } if log.contains("bogus"));
    said.push(refused_as(device.compile(&bogus).err(), compiles)?);

    let absent = Ptx { entry: "absent".to_owned(), ..good.clone() };
    let error = device.compile(&absent).err();
    let is_absent =
        |error: &HostError| matches!(error, HostError::Kernel { kernel, .. } if kernel == "absent");
    said.push(refused_as(error, is_absent)?);

    let large = Ptx { smem_bytes: 300_000, ..good.clone() };
    let is_large = |error: &HostError| matches!(error, HostError::SharedMemory { given: 300_000, .. });
    said.push(refused_as(device.compile(&large).err(), is_large)?);

    let wide = device.compile(&Ptx { threads: 512, ..good })?;
    let x = floats(device, 256)?;
    let args = [pointer(&x), pointer(&x), pointer(&x), ArgValue::U32(256)];
    let error = launch(&wide, &stream, [1, 1, 1], &args).err();
    said.push(refused_as(error, |error| matches!(error, HostError::Launch { .. }))?);

    device.synchronize()?;
    Ok(said.join("; "))
}

pub(crate) fn illegal_address(device: &Device) -> Fallible<String> {
    let (stream, add) = (device.stream()?, compiled(device, &vector_add::kernel())?);
    let args = |address| [(); 3].map(|()| ArgValue::Pointer(address));
    let with_count = |[x, y, z]: [ArgValue; 3]| [x, y, z, ArgValue::U32(256)];
    // With CUDA_LAUNCH_BLOCKING=1 the launch reports the fault.
    let ended = launch(&add, &stream, [3, 1, 1], &with_count(args(16))).and_then(|()| stream.synchronize());
    let Err(HostError::Poisoned { by }) = ended else { return Err("nothing happened".into()) };
    let suspect = by.suspects.last().ok_or("no suspects")?;
    ensure(&*suspect.kernel == "vector_add" && suspect.grid == [3, 1, 1], "the wrong suspect")?;
    let again = [
        device.alloc(16).err(),
        device.compile(&ptx_of(&kernels::two_roles())?).err(),
        launch(&add, &stream, [1, 1, 1], &with_count(args(0))).err(),
        device.synchronize().err(),
        device.memory().err(),
    ];
    for error in again {
        let same = matches!(&error, Some(HostError::Poisoned { by: again }) if *again == by);
        ensure(same, "a later call does not say so")?;
    }
    Ok(HostError::Poisoned { by }.to_string())
}

fn refused_as(error: Option<HostError>, expected: impl Fn(&HostError) -> bool) -> Result<String, String> {
    match error {
        Some(error) if expected(&error) => Ok(error.to_string().replace('\n', " | ")),
        Some(error) => Err(format!("refused otherwise: {error}")),
        None => Err("not refused".to_owned()),
    }
}

fn is_arg(error: &HostError, expected: &ArgError) -> bool {
    matches!(error, HostError::Args { error, .. } if **error == *expected)
}
