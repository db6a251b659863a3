//! Probes that measure times, frequencies, and the effects of forbidden operations.

mod approximations;
mod barriers;
mod matrices;
mod proxies;
mod registers;
mod tensors;

use std::error::Error;

use fa3_cuda::host::Device;
use fa3_ir::lang::{Arg, B32, B64, Builder, V};
use fa3_ir::{BufferRole, Elem, Kernel, Launch, Passed, Program};
use fa3_tests::gpu;

/// The result of a probe, or the reason for its absence.
type Said = Result<String, Box<dyn Error>>;

/// A name and a measuring function.
type Probe = (&'static str, fn(&Device) -> Said);

const PROBES: [Probe; 10] = [
    ("elect", barriers::elect),
    ("suspend", barriers::suspend),
    ("spurious", barriers::spurious),
    ("row-slices", matrices::row_slices),
    ("operand-fence", matrices::operand_fence),
    ("proxy-fence", proxies::fence_of_the_reader),
    ("unread-sums", proxies::sums_not_waited_for),
    ("register-pool", registers::pool),
    ("approximations", approximations::errors),
    ("tensor-copies", tensors::rules),
];

/// Runs all probes.
pub(crate) fn all(device: &Device) -> Result<(), Box<dyn Error>> {
    PROBES.iter().try_for_each(|(name, _)| one(device, name))
}

/// Runs one probe, or one of the tensor copies that may lose the device.
pub(crate) fn one(device: &Device, name: &str) -> Result<(), Box<dyn Error>> {
    let probe = PROBES.iter().find(|(known, _)| *known == name).map(|(_, probe)| probe(device));
    match probe.or_else(|| tensors::one(device, name)).ok_or("no such probe")? {
        Ok(said) => println!("{name}: {said}"),
        Err(error) => println!("{name}: {error}"),
    }
    Ok(())
}

/// A kernel under construction that writes numbers into one array.
struct Meter<'k> {
    b: &'k Builder,
    tid: V<'k, B32>,
    out: V<'k, B64>,
}

/// Runs the kernel that `build` builds in `grid` CTAs, and returns the `bytes` of its array.
fn measure(
    device: &Device,
    (name, launch, grid): (&str, Launch, u32),
    bytes: u32,
    build: impl FnOnce(&Meter<'_>),
) -> Result<Vec<u8>, Box<dyn Error>> {
    let kernel = Kernel::build(name, launch, |b| {
        let (out, tid) = (b.param_pointer("out", Elem::U8), b.tid());
        build(&Meter { b, tid, out });
    });
    let mut program = Program::new();
    let out = program.buffer("out", Elem::U8, &[bytes], BufferRole::Output);
    program.step(kernel, [grid, 1, 1], vec![("out".to_owned(), Passed::Pointer(out))]);
    let mut written = gpu::run(device, &program, &[vec![0; bytes as usize]])?;
    Ok(written.remove(0))
}

/// Waits for `cycles`.
fn spin(b: &Builder, cycles: impl Arg<Ty = B64>) {
    let start = b.clock();
    b.repeat(|| b.break_if((b.clock() - start).ge(cycles)));
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&chunk| u32::from_le_bytes(chunk)).collect()
}

fn longs(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&chunk| u64::from_le_bytes(chunk)).collect()
}
