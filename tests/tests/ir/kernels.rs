//! Assembles whole kernels without spills, and compares their text with a snapshot.

use fa3_cuda::kernels::ladder::vector_add;
use fa3_ir::lang::*;
use fa3_ir::*;

use crate::one_product::one_product;
use crate::ptxas::assemble;
use crate::snapshot;

/// A producer warpgroup that gives registers to a consumer: the skeleton of a warp-specialized kernel.
fn two_roles() -> Kernel {
    Kernel::build("two_roles", Launch::threads(256), |b| {
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 1024, 128));
        let done = b.barrier("done", 256);
        let x = b.param_pointer("x", Elem::F32);
        let tid = b.tid();
        let first = tid.eq(0);
        b.guarded(first, || b.mbarrier_init(full, 1));
        b.fence(FenceInst::MbarrierInit);
        b.sync_cta();
        b.role(Role::new("producer", 0..4), || {
            b.set_max_registers_down(24);
            b.if_lanes(first, || {
                b.mbarrier_arrive_expect(full, 1024);
                b.bulk_load(tile, x, 1024, full, LoadOptions::default());
            });
            b.arrive(done);
        });
        b.role(Role::new("consumer", 4..8), || {
            b.set_max_registers_up(256);
            b.mbarrier_wait(full, 0);
            let thread = tid & 127;
            let [low, high] = b.load_vector::<F32, 2>(thread.mad(8, b.address(tile)));
            let sum = low + high;
            b.store(thread.mad_wide(4, x), sum);
            b.sync(done);
        });
    })
}

#[test]
fn kernels_assemble_without_spills() {
    for kernel in [one_product(8), one_product(128), one_product(256), two_roles()] {
        assert!(assemble(&kernel).is_none_or(|report| report.is_clean()), "{}", kernel.name);
    }
}

#[test]
fn vector_add_prints() {
    snapshot("vector_add.ptx", &ptx::emit(&vector_add::kernel()).unwrap().text);
}

#[test]
fn a_kernel_with_everything_declared_prints() {
    snapshot("two_roles.ir", &two_roles().to_string());
    snapshot("one_product.ir", &one_product(8).to_string());
}

#[test]
fn ptx_says_what_a_launch_needs() {
    let ptx = ptx::emit(&one_product(64)).unwrap();
    assert_eq!((ptx.entry.as_str(), ptx.threads, ptx.cluster), ("one_product", 128, 1));
    assert_eq!(ptx.smem_bytes, 1024 + 64 * 128 + 64 * 128);
    let kinds: Vec<ParamKind> = ptx.params.iter().map(|param| param.kind).collect();
    let map = |rows| ParamKind::TensorMap(BoxShape::new(Elem::Bf16, &[64, rows], Swizzle::B128));
    assert_eq!(kinds, [map(64), map(64), ParamKind::Pointer(Elem::F32)]);
}

/// Labels of roles, loops and waits are distinct, whatever the role's name.
#[test]
fn labels_are_distinct() {
    let kernel = Kernel::build("labels", Launch::threads(128), |b| {
        let full = b.mbarriers("full", 1, 1);
        let p = b.tid().eq(0);
        b.repeat(|| b.break_if(p));
        b.role(Role::new("loop_1", 0..2), || (0..2).for_each(|_| b.mbarrier_wait(full, 0)));
        b.role(Role::new("rest", 2..4), || b.if_lanes(p, || ()));
    });
    let text = ptx::emit(&kernel).unwrap().text;
    let mut labels: Vec<&str> = text.lines().filter(|line| line.ends_with(':')).collect();
    labels.sort_unstable();
    assert!(labels.windows(2).all(|pair| pair[0] != pair[1]), "{labels:?}");
    assemble(&kernel);
}

/// The text is a cache key: kernels that are built on different source lines have equal texts, except for annotations.
#[test]
fn ptx_does_not_depend_on_source_lines() {
    let one = Kernel::build("k", Launch::threads(32), |b| _ = b.tid());
    let other = Kernel::build("k", Launch::threads(32), |b| _ = b.tid());
    assert_ne!(one, other);
    assert_eq!(ptx::emit(&one), ptx::emit(&other));
    let annotated = ptx::emit_annotated(&one).unwrap().text;
    assert!(annotated.contains("// tests/tests/ir/kernels.rs:") && annotated.is_ascii());
    assert_ne!(annotated, ptx::emit_annotated(&other).unwrap().text);
}
