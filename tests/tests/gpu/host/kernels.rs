//! Small kernels that use every part of the host layer.

use fa3_cuda::host::{Device, Function, HostError};
use fa3_ir::lang::{B32, Builder, F32, V};
use fa3_ir::{Elem, FenceInst, Kernel, Launch, LoadOptions, Ptx, Role, ptx};

/// The kernel that the tests of fa3-ir assemble.
#[path = "../../ir/one_product.rs"]
mod one_product;

pub(crate) use one_product::one_product;

pub(crate) fn ptx_of(kernel: &Kernel) -> Result<Ptx, String> {
    ptx::emit(kernel).map_err(|errors| errors.iter().map(|error| format!("{error}; ")).collect())
}

/// Compiles a kernel.
///
/// # Panics
/// If the kernel is not sound.
pub(crate) fn compiled(device: &Device, kernel: &Kernel) -> Result<Function, HostError> {
    device.compile(&ptx_of(kernel).unwrap_or_else(|errors| panic!("{errors}")))
}

/// The thread's index in a grid of CTAs of 256 threads.
fn index(b: &Builder) -> V<'_, B32> {
    let (tid, cta) = (b.tid(), b.cta_x());
    cta.mad(256, tid)
}

/// x[i] = x[2 i] + x[2 i + 1] for 512 elements: a producer warpgroup copies, two consumers add, and the producer gives
/// registers to the consumers.
pub(crate) fn two_roles() -> Kernel {
    Kernel::build("two_roles", Launch::threads(384), |b| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 2048, 128));
        let done = b.barrier("done", 384);
        let x = b.param_pointer("x", Elem::F32);
        let tid = b.tid();
        let first = tid.eq(0);
        b.guarded(first, || b.mbarrier_init(full, 1));
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..4).registers(24), || {
            b.if_lanes(first, || {
                b.mbarrier_arrive_expect(full, 2048);
                b.bulk_load(tile, x, 2048, full, LoadOptions::default());
            });
            b.arrive(done);
        });
        b.role(Role::new("consumer", 4..12).registers(240), || {
            b.mbarrier_wait(full, 0);
            let i = tid - 128;
            let [low, high] = b.load_vector::<F32, 2>(i.mad(8, b.address(tile)));
            let sum = low + high;
            b.store(i.mad_wide(4, x), sum);
            b.sync(done);
        });
    })
}

/// out[cta] = the CTA's rank in its cluster of `size`.
pub(crate) fn cluster_ranks(size: u32) -> Kernel {
    Kernel::build("cluster_ranks", Launch::threads(32).cluster(size), |b| {
        let out = b.param_pointer("out", Elem::U32);
        let (tid, cta, rank) = (b.tid(), b.cta_x(), b.cluster_cta_rank());
        let at = cta.mad_wide(4, out);
        b.guarded(tid.eq(0), || b.store(at, rank));
    })
}

/// x[i] = x[i] + 1, after the previous kernel has ended. Lets the next kernel start before this kernel has ended (PDL).
pub(crate) fn increment() -> Kernel {
    Kernel::build("increment", Launch::threads(256), |b| {
        let x = b.param_pointer("x", Elem::U32);
        let i = index(b);
        b.launch_dependents();
        b.grid_dependency_wait();
        let at = i.mad_wide(4, x);
        b.store(at, b.load::<B32>(at) + 1);
    })
}

/// A kernel that neither works nor waits for the previous grid. If it `triggers`, the next kernel may start before this
/// kernel has ended.
pub(crate) fn stranger(triggers: bool) -> Kernel {
    Kernel::build("stranger", Launch::threads(32), |b| {
        if triggers {
            b.launch_dependents();
        }
    })
}
