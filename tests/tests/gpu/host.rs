//! Checks of the host layer: compiler, memory, launches, and refusals.

pub(crate) mod kernels;
mod refusals;

use std::sync::Arc;
use std::time::Instant;

use fa3_cuda::host::{Device, DeviceBuffer, Function, HostError, Stream};
use fa3_cuda::kernels::Spec;
use fa3_cuda::kernels::ladder::{self, row_softmax, vector_add};
use fa3_ir::{ArgValue, Elem, Ptx, TensorView};
use half::bf16;

use kernels::{compiled, ptx_of};

use crate::{Check, Fallible, ensure};

/// All checks except the last one.
pub(crate) const CHECKS: [(&str, Check); 15] = [
    ("host::device", facts),
    ("host::vector_add", vector_add),
    ("host::row_softmax", row_softmax),
    ("host::one_product", one_product),
    ("host::one_product_beyond_the_tensor", product_beyond_the_tensor),
    ("host::two_roles", two_roles),
    ("host::clusters", clusters),
    ("host::dependent_launches", dependent_launches),
    ("host::cache", cache),
    ("host::events", events),
    ("host::cost_of_a_launch", cost_of_a_launch),
    ("host::other_threads", other_threads),
    ("host::compilers_advice", advice),
    ("host::refused_arguments", refusals::arguments),
    ("host::refused_kernels", refusals::compilations),
];

/// The check that breaks the context: no other check can follow in this process.
pub(crate) const LAST: (&str, Check) = ("host::illegal_address", refusals::illegal_address);

/// Launches a kernel of these checks.
#[allow(unsafe_code, reason = "a launch is unsafe, and the checks are about launches")]
fn launch(function: &Function, stream: &Stream, grid: [u32; 3], args: &[ArgValue]) -> Result<(), HostError> {
    // SAFETY: every check keeps its buffers until it has synchronized, and its kernels stay within them, except for the
    // last check, whose kernel must fault.
    unsafe { function.launch(stream, grid, args) }
}

fn facts(device: &Device) -> Fallible<String> {
    let memory = device.memory()?;
    let (major, minor) = device.compute_capability();
    let (stream, mut empty) = (device.stream()?, device.alloc(0)?);
    empty.fill(&stream, 1)?;
    empty.upload::<u8>(&stream, &[])?;
    ensure(empty.download::<f32>(&stream)?.is_empty(), "something in an empty buffer")?;
    ensure(memory.free <= memory.total && device.sm_count() > 100, "memory or SMs are impossible")?;
    Ok(format!(
        "{device}, {major}.{minor}, l2 {} MiB, smem {} bytes, {} of {} MiB free",
        device.l2_bytes() >> 20,
        device.smem_bytes(),
        memory.free >> 20,
        memory.total >> 20
    ))
}

fn vector_add(device: &Device) -> Fallible<String> {
    let (stream, n) = (device.stream()?, 1_000_003_u32);
    let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let y: Vec<f32> = (0..n).map(|i| 3.0 - i as f32).collect();
    let (add, z) = (compiled(device, &vector_add::kernel())?, floats(device, n as usize)?);
    let (x_device, y_device) = (device.upload(&stream, &x)?, device.upload(&stream, &y)?);
    let args = [pointer(&x_device), pointer(&y_device), pointer(&z), ArgValue::U32(n)];
    launch(&add, &stream, [n.div_ceil(256), 1, 1], &args)?;
    let sums = z.download::<f32>(&stream)?;
    let right = sums.iter().zip(x.iter().zip(&y)).all(|(sum, (x, y))| *sum == x + y);
    ensure(right, "wrong sums")?;
    Ok(format!("{n} sums, {}", described(&add)))
}

fn row_softmax(device: &Device) -> Fallible<String> {
    let (stream, rows, n) = (device.default_stream(), 64_usize, 1000_usize);
    let x: Vec<f32> = (0..rows * n).map(|i| ((i * 7919) % 2003) as f32 * 0.01 - 10.0).collect();
    let (softmax, y) = (compiled(device, &row_softmax::kernel())?, floats(device, rows * n)?);
    let x_device = device.upload(&stream, &x)?;
    let args = [pointer(&x_device), pointer(&y), ArgValue::U32(rows as u32), ArgValue::U32(n as u32)];
    launch(&softmax, &stream, [rows as u32 / 4, 1, 1], &args)?;
    let given = y.download::<f32>(&stream)?;
    let mut worst = 0.0_f64;
    for (x, given) in x.chunks_exact(n).zip(given.chunks_exact(n)) {
        let exp: Vec<f64> = x.iter().map(|x| f64::from(*x).exp()).collect();
        let sum: f64 = exp.iter().sum();
        let errors = exp.iter().zip(given).map(|(exp, given)| (f64::from(*given) * sum / exp - 1.0).abs());
        worst = errors.fold(worst, f64::max);
    }
    // ex2 is accurate to 2 ulp. Its argument, at most 30, is accurate to half an ulp of 16. So the bound is 30 · 2⁻²⁴ ·
    // ln 2 and a margin.
    ensure(worst < 4e-6, "too far from the definition")?;
    Ok(format!("relative error {worst:.1e}, {}", described(&softmax)))
}

fn one_product(device: &Device) -> Fallible<String> {
    let mut said = Vec::new();
    for n in [8, 64, 128, 256] {
        let (product, wrong) = product(device, n, n)?;
        ensure(wrong == 0, &format!("n = {n}: {wrong} wrong elements"))?;
        said.push(format!("n = {n}: {}", described(&product)));
    }
    Ok(said.join("; "))
}

/// Rows beyond the tensor are read as zeros.
fn product_beyond_the_tensor(device: &Device) -> Fallible<String> {
    let (_, wrong) = product(device, 64, 61)?;
    ensure(wrong == 0, &format!("{wrong} wrong elements"))?;
    Ok("3 of 64 rows of b are zeros".to_owned())
}

/// Number of wrong elements of A · Bᵀ. B has `rows` rows, followed by zeros up to row `n`. All elements are small
/// integers.
fn product(device: &Device, n: u32, rows: u32) -> Result<(Function, usize), HostError> {
    let stream = device.stream()?;
    let integers = |count: u32, step: u32| (0..count).map(move |i| ((i * step + 5) % 17) as f32 - 8.0);
    let (a, b) = (integers(64 * 64, 13).collect::<Vec<_>>(), integers(rows * 64, 11).collect::<Vec<_>>());
    let bits = |values: &[f32]| values.iter().map(|x| bf16::from_f32(*x).to_bits()).collect::<Vec<u16>>();
    let (a_device, b_device) = (device.upload(&stream, &bits(&a))?, device.upload(&stream, &bits(&b))?);
    let view = |buffer: &DeviceBuffer, rows: u32| {
        ArgValue::Tensor(TensorView::contiguous(buffer.address(), &[64, rows.into()], Elem::Bf16))
    };
    let (multiply, d) = (compiled(device, &kernels::one_product(n))?, floats(device, 64 * n as usize)?);
    launch(&multiply, &stream, [1, 1, 1], &[view(&a_device, 64), view(&b_device, rows), pointer(&d)])?;
    let given = d.download::<f32>(&stream)?;
    let expected = |row: usize, column: usize| -> f32 {
        let column = b.get(64 * column..64 * (column + 1)).unwrap_or_default();
        a[64 * row..].iter().zip(column).map(|(a, b)| a * b).sum()
    };
    let wrong = |(i, given): &(usize, &f32)| **given != expected(i / n as usize, i % n as usize);
    Ok((multiply, given.iter().enumerate().filter(wrong).count()))
}

fn two_roles(device: &Device) -> Fallible<String> {
    let stream = device.stream()?;
    let x: Vec<f32> = (0..512).map(|i| (i * i) as f32).collect();
    let (roles, buffer) = (compiled(device, &kernels::two_roles())?, device.upload(&stream, &x)?);
    launch(&roles, &stream, [1, 1, 1], &[pointer(&buffer)])?;
    let given = buffer.download::<f32>(&stream)?;
    let right = (0..256).all(|i| given[i] == x[2 * i] + x[2 * i + 1]) && given[256..] == x[256..];
    ensure(right, "wrong sums")?;
    Ok(described(&roles))
}

/// A cluster of 16 CTAs exceeds the portable cluster size.
fn clusters(device: &Device) -> Fallible<String> {
    let stream = device.stream()?;
    for size in [1, 2, 4, 8, 16] {
        let (ranks, mut out) = (compiled(device, &kernels::cluster_ranks(size))?, device.alloc(4 * 48)?);
        out.fill(&stream, 0xff)?;
        launch(&ranks, &stream, [48, 1, 1], &[pointer(&out)])?;
        let expected: Vec<u32> = (0..48).map(|cta| cta % size).collect();
        ensure(out.download::<u32>(&stream)? == expected, &format!("wrong ranks in clusters of {size}"))?;
    }
    Ok("ranks in clusters of 1, 2, 4, 8 and 16".to_owned())
}

#[allow(unsafe_code, reason = "a launch is unsafe")]
fn dependent_launches(device: &Device) -> Fallible<String> {
    let (stream, launches, threads) = (device.stream()?, 200, 256 * 132_u32);
    let (increment, mut x) = (compiled(device, &kernels::increment())?, floats(device, threads as usize)?);
    x.fill(&stream, 0)?;
    for _ in 0..launches {
        // SAFETY: the kernel waits for the previous one, and stays within `x`, which is downloaded below.
        unsafe { increment.launch_dependent(&stream, [threads / 256, 1, 1], &[pointer(&x)]) }?;
    }
    ensure(x.download::<u32>(&stream)?.iter().all(|x| *x == launches), "wrong counts")?;
    Ok(format!("{launches} in a chain"))
}

fn cache(device: &Device) -> Fallible<String> {
    let spec = Spec::from(ladder::Spec::Gemm(Elem::Bf16));
    let start = Instant::now();
    let (first, second) = (device.kernel(&spec)?, device.clone().kernel(&spec)?);
    let found = start.elapsed();
    ensure(Arc::ptr_eq(&first, &second), "compiled twice")?;
    let other = device.kernel(&ladder::Spec::Gemm(Elem::F16).into())?;
    ensure(!Arc::ptr_eq(&first, &other), "two kernels are one")?;
    // A newly opened device has no cached kernels, although the driver may have some.
    let again = Device::open(0)?.kernel(&spec)?;
    ensure(!Arc::ptr_eq(&first, &again) && again.registers() == first.registers(), "not compiled anew")?;
    let report = again.report().map_or("no report".to_owned(), ToString::to_string);
    Ok(format!(
        "compiled in {:?}, found twice in {found:?}, by the driver again in {:?} with {report}",
        first.compile_time(),
        again.compile_time()
    ))
}

fn events(device: &Device) -> Fallible<String> {
    let (stream, n) = (device.stream()?, 64 << 20_u32);
    let (x, y, z) = (floats(device, n as usize)?, floats(device, n as usize)?, floats(device, n as usize)?);
    let add = compiled(device, &vector_add::kernel())?;
    let args = [pointer(&x), pointer(&y), pointer(&z), ArgValue::U32(n)];
    launch(&add, &stream, [n / 256, 1, 1], &args)?;
    let (clock, start) = (Instant::now(), stream.record()?);
    for _ in 0..20 {
        launch(&add, &stream, [n / 256, 1, 1], &args)?;
    }
    let launched = clock.elapsed();
    let millis = f64::from(stream.record()?.millis_since(&start)?);
    let wall = clock.elapsed().as_secs_f64() * 1e3;
    let rate = 20.0 * 12.0 * f64::from(n) / millis * 1e-9;
    ensure(millis > 0.0 && millis <= wall + 1.0 && rate < 5.0, "times are impossible")?;
    Ok(format!(
        "20 in {millis:.3} ms by events, {wall:.3} by the clock, {rate:.2} TB/s; launched in {launched:?}"
    ))
}

/// Host time of a launch whose arguments are only pointers, and of a launch that encodes two tensor maps.
fn cost_of_a_launch(device: &Device) -> Fallible<String> {
    let (stream, buffer) = (device.stream()?, device.alloc(1 << 16)?);
    let view = ArgValue::Tensor(TensorView::contiguous(buffer.address(), &[64, 64], Elem::Bf16));
    let [plain, maps] = [
        (kernels::increment(), vec![pointer(&buffer)]),
        (kernels::one_product(8), vec![view.clone(), view, pointer(&buffer)]),
    ]
    .map(|(kernel, args)| -> Result<f64, HostError> {
        let (function, launches) = (compiled(device, &kernel)?, 500);
        let start = Instant::now();
        for _ in 0..launches {
            launch(&function, &stream, [1, 1, 1], &args)?;
        }
        let micros = start.elapsed().as_secs_f64() * 1e6 / f64::from(launches);
        stream.synchronize()?;
        Ok(micros)
    });
    Ok(format!("{:.2} us, with two tensor maps {:.2} us", plain?, maps?))
}

/// Without a fixed number of threads there is no register pool, as the compiler reports.
fn advice(device: &Device) -> Fallible<String> {
    let good = ptx_of(&kernels::two_roles())?;
    let is_bound = |line: &&str| line.starts_with(".maxntid") || line.starts_with(".minnctapersm");
    let text = good.text.lines().filter(|line| !is_bound(line)).map(|line| format!("{line}\n")).collect();
    let function = device.compile(&Ptx { text, ..good })?;
    let Some(report) = function.report() else {
        return Ok("known to the driver, which says nothing".to_owned());
    };
    ensure(report.warnings.iter().any(|warning| warning.code == Some(7508)), "not warned of")?;
    Ok(report.to_string())
}

/// Uses the device from a thread that never saw the context, and uses objects that outlive the device handle.
fn other_threads(device: &Device) -> Fallible<String> {
    let device = device.clone();
    std::thread::spawn(move || -> Result<(), HostError> {
        let (stream, add) = (device.stream()?, compiled(&device, &vector_add::kernel())?);
        let (one, sum) = (device.upload(&stream, &[1.0_f32; 256])?, floats(&device, 256)?);
        drop(device);
        launch(&add, &stream, [1, 1, 1], &[pointer(&one), pointer(&one), pointer(&sum), ArgValue::U32(256)])?;
        assert_eq!(sum.download::<f32>(&stream)?, [2.0; 256]);
        Ok(())
    })
    .join()
    .map_err(|_| "wrong sums")??;
    Ok("a kernel from a second thread".to_owned())
}

/// Registers, warnings and compile time of a kernel, as text.
fn described(function: &Function) -> String {
    let report = function.report().map_or("no report".to_owned(), ToString::to_string);
    let (local, time) = (function.local_bytes(), function.compile_time());
    format!("{report} (driver: {} registers, {local} bytes local), {time:.1?}", function.registers())
}

fn pointer(buffer: &DeviceBuffer) -> ArgValue {
    ArgValue::Pointer(buffer.address())
}

fn floats(device: &Device, count: usize) -> Result<DeviceBuffer, HostError> {
    device.alloc(4 * count)
}
