//! Questions that one number answers: times, frequencies, what is forbidden.

mod approximations;
mod barriers;
mod matrices;
mod proxies;
mod registers;
mod tensors;

use std::error::Error;

use fa3_cuda::host::Device;
use fa3_cuda::kernels::{Array, Job, JobArg};
use fa3_ir::{B32, B64, Builder, Elem, Launch, V};
use fa3_tests::gpu;

/// What a probe says, or why it cannot.
type Said = Result<String, Box<dyn Error>>;

/// A name, and what measures.
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

/// All of them.
pub(crate) fn all(device: &Device) -> Result<(), Box<dyn Error>> {
    PROBES.iter().try_for_each(|(name, _)| one(device, name))
}

/// One of them, or one of the tensor copies that may lose the device.
pub(crate) fn one(device: &Device, name: &str) -> Result<(), Box<dyn Error>> {
    let probe = PROBES.iter().find(|(known, _)| *known == name).map(|(_, probe)| probe(device));
    match probe.or_else(|| tensors::one(device, name)).ok_or("no such probe")? {
        Ok(said) => println!("{name}: {said}"),
        Err(error) => println!("{name}: {error}"),
    }
    Ok(())
}

/// A kernel that writes numbers into one array.
struct Meter {
    b: Builder,
    tid: V<B32>,
    out: V<B64>,
    bytes: usize,
}

impl Meter {
    fn new(name: &str, launch: Launch, bytes: usize) -> Meter {
        let mut b = Builder::new(name, launch);
        let (out, tid) = (b.param_pointer("out", Elem::U8), b.tid());
        Meter { b, tid, out, bytes }
    }

    fn run(self, device: &Device, grid: u32) -> Result<Vec<u8>, Box<dyn Error>> {
        let arrays = vec![Array::output("out", Elem::U8, &[self.bytes as u32])];
        let job = Job { kernel: self.b.finish(), grid: [grid, 1, 1], arrays, args: vec![JobArg::Pointer(0)] };
        let mut written = gpu::run(device, &job, &[vec![0; self.bytes]])?;
        Ok(written.remove(0))
    }
}

/// Waits for `cycles`.
fn spin(b: &mut Builder, cycles: V<B64>) {
    let start = b.clock();
    b.repeat(|b| {
        let now = b.clock();
        let passed = b.sub(now, start);
        let done = b.ge_u64(passed, cycles);
        b.break_if(done);
    });
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&chunk| u32::from_le_bytes(chunk)).collect()
}

fn longs(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&chunk| u64::from_le_bytes(chunk)).collect()
}
