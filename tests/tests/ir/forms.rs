//! Every form of every instruction: its exact PTX, and the test that ptxas accepts it.

use fa3_ir::lang::*;
use fa3_ir::*;

use crate::ptxas::{assemble, body};

/// Operands of the forms: values 0 to 3, and declarations.
struct Given<'k> {
    b: &'k Builder,
    r: V<'k, B32>,
    d: V<'k, B64>,
    f: V<'k, F32>,
    p: V<'k, Pred>,
    mbar: Region,
    bytes: Region,
    map: [TensorMap; 4],
    bar: Barrier,
}

/// A kernel that `build` builds from the given operands, with 128 threads and clusters of `cluster` CTAs.
fn kernel(cluster: u32, build: impl FnOnce(&Given)) -> Kernel {
    Kernel::build("form", Launch::threads(128).cluster(cluster), |b| {
        let (mbar, bytes) = (b.mbarriers("mbar", 2, 3), b.region("bytes", 4096, 1024));
        let map = [2, 3, 4, 5].map(|rank| {
            let shape = BoxShape::new(Elem::F32, &[4; 5][..rank], Swizzle::None);
            b.param_tensor_map(&format!("t{rank}"), shape)
        });
        let bar = b.barrier("bar", 128);
        let (r, d, f) = (b.param_u32("r"), b.param_pointer("d", Elem::F32), b.param_f32("f"));
        let p = r.eq(0);
        build(&Given { b, r, d, f, p, mbar, bytes, map, bar });
    })
}

/// A function that builds a form, and the form's lines of PTX.
type Form<'a> = (fn(&Given), &'a str);

/// Compares each form with its lines, and assembles all forms in one kernel.
fn check(cluster: u32, forms: &[Form]) {
    let skip = body(&kernel(cluster, |_| ())).len();
    for (build, expected) in forms {
        assert_eq!(body(&kernel(cluster, build))[skip..].join("\n"), *expected);
    }
    assemble(&kernel(cluster, |g| forms.iter().for_each(|(build, _)| build(g))));
}

const LOADS_AND_STORES: &[Form] = &[
    (|g| _ = g.b.load::<F32>(g.d), "ld.global.f32 %f4, [%d1];"),
    (|g| _ = g.b.load::<B16>(g.d.at(-2)), "ld.global.b16 %h4, [%d1+-2];"),
    (|g| _ = g.b.load_vector::<F32, 4>(g.d.at(16)), "ld.global.v4.f32 {%f4, %f5, %f6, %f7}, [%d1+16];"),
    (|g| _ = g.b.load_vector::<B64, 2>(g.d), "ld.global.v2.b64 {%d4, %d5}, [%d1];"),
    (|g| _ = g.b.load_read_only::<B32, 2>(g.d), "ld.global.nc.v2.b32 {%r4, %r5}, [%d1];"),
    (|g| _ = g.b.load::<B32>(g.r.at(4)), "ld.shared.b32 %r4, [%r0+4];"),
    (|g| _ = g.b.load::<B32>(g.bytes), "ld.shared.b32 %r4, [%smem+1024];"),
    (|g| g.b.store(g.d, 1.0), "st.global.f32 [%d1], 0f3F800000;"),
    (|g| g.b.store_vector(g.d, [g.r, g.r]), "st.global.v2.b32 [%d1], {%r0, %r0};"),
    (|g| g.b.store_vector(g.bytes.at(32), [g.f; 4]), "st.shared.v4.f32 [%smem+1056], {%f2, %f2, %f2, %f2};"),
    (|g| g.b.store(g.r, 7u16), "st.shared.b16 [%r0], 7;"),
    (|g| _ = g.b.load_acquire(g.d), "ld.acquire.gpu.global.b32 %r4, [%d1];"),
    (|g| g.b.store_release(g.d, g.r), "st.release.gpu.global.b32 [%d1], %r0;"),
    (|g| _ = g.b.address(g.bytes), "add.u32 %r4, %smem, 1024;"),
];

const ATOMICS: &[Form] = &[
    (|g| _ = g.b.atomic_add_u32(g.d, 1), "atom.relaxed.gpu.global.add.u32 %r4, [%d1], 1;"),
    (|g| _ = g.b.atomic_add_f32(g.r, g.f), "atom.relaxed.gpu.shared.add.f32 %f4, [%r0], %f2;"),
    (|g| _ = g.b.atomic_max_u32(g.d, g.r), "atom.relaxed.gpu.global.max.u32 %r4, [%d1], %r0;"),
    (|g| _ = g.b.atomic_inc_u32(g.d, 131), "atom.relaxed.gpu.global.inc.u32 %r4, [%d1], 131;"),
    (|g| _ = g.b.atomic_exchange(g.d, 0), "atom.relaxed.gpu.global.exch.b32 %r4, [%d1], 0;"),
    (|g| g.b.reduce_add_u32(g.d, 1), "red.relaxed.gpu.global.add.u32 [%d1], 1;"),
    (|g| g.b.reduce_add_f32(g.r, g.f), "red.relaxed.gpu.shared.add.f32 [%r0], %f2;"),
];

const ASYNCHRONOUS_COPIES: &[Form] = &[
    (|g| g.b.copy_async(g.bytes, g.d, 16), "cp.async.cg.shared.global [%smem+1024], [%d1], 16, 16;"),
    (|g| g.b.copy_async(g.r, g.d, g.r), "cp.async.cg.shared.global [%r0], [%d1], 16, %r0;"),
    (|g| g.b.copy_async_commit(), "cp.async.commit_group;"),
    (|g| g.b.copy_async_wait(1), "cp.async.wait_group 1;"),
];

const LANES_OF_A_WARP: &[Form] = &[
    (|g| _ = g.r.shfl_idx(0), "shfl.sync.idx.b32 %r4, %r0, 0, 31, -1;"),
    (|g| _ = g.f.shfl_bfly(1), "shfl.sync.bfly.b32 %f4, %f2, 1, 31, -1;"),
    (|g| _ = g.r.shfl_up(g.r), "shfl.sync.up.b32 %r4, %r0, %r0, 0, -1;"),
    (|g| _ = g.r.shfl_down(4), "shfl.sync.down.b32 %r4, %r0, 4, 31, -1;"),
    (|g| _ = g.p.vote_all(), "vote.sync.all.pred %p4, %p3, -1;"),
    (|g| _ = g.p.vote_any(), "vote.sync.any.pred %p4, %p3, -1;"),
    (|g| _ = g.p.vote_uniform(), "vote.sync.uni.pred %p4, %p3, -1;"),
    (|g| _ = g.p.ballot(), "vote.sync.ballot.b32 %r4, %p3, -1;"),
    (|g| _ = g.b.elect(), "elect.sync _|%p4, -1;"),
    (|g| g.b.warp_sync(), "bar.warp.sync -1;"),
    (|g| _ = g.b.ldmatrix::<1>(g.r, false), "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r0];"),
    (
        |g| _ = g.b.ldmatrix::<2>(g.r, true),
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r4, %r5}, [%r0];",
    ),
    (
        |g| _ = g.b.ldmatrix::<4>(g.r.at(16), true),
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r4, %r5, %r6, %r7}, [%r0+16];",
    ),
    (|g| g.b.stmatrix(g.r, [g.r], false), "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], {%r0};"),
    (
        |g| g.b.stmatrix(g.r, [g.r; 2], true),
        "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%r0], {%r0, %r0};",
    ),
    (
        |g| g.b.stmatrix(g.r, [g.r; 4], false),
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r0], {%r0, %r0, %r0, %r0};",
    ),
];

const BARRIERS_AND_FENCES: &[Form] = &[
    (|g| g.b.sync_cta(), "bar.sync 0;"),
    (|g| g.b.sync(g.bar), "bar.sync 1, 128;"),
    (|g| g.b.arrive(g.bar), "bar.arrive 1, 128;"),
    (|g| g.b.sync_computed(g.r, 64), "bar.sync %r0, 64;"),
    (|g| g.b.arrive_computed(g.r, 64), "bar.arrive %r0, 64;"),
    (
        |g| FenceInst::ALL.into_iter().for_each(|fence| g.b.fence(fence)),
        "fence.proxy.async;\n\
         fence.proxy.async.shared::cta;\n\
         fence.proxy.async.shared::cluster;\n\
         fence.proxy.async.global;\n\
         fence.mbarrier_init.release.cluster;\n\
         fence.acq_rel.cta;\n\
         fence.acq_rel.cluster;\n\
         fence.acq_rel.gpu;\n\
         fence.acq_rel.sys;",
    ),
];

const MBARRIERS: &[Form] = &[
    (|g| g.b.mbarrier_init(g.mbar.at(8), 3), "mbarrier.init.shared::cta.b64 [%smem+8], 3;"),
    (|g| g.b.mbarrier_invalidate(g.mbar), "mbarrier.inval.shared::cta.b64 [%smem];"),
    (|g| g.b.mbarrier_arrive(g.mbar), "mbarrier.arrive.shared::cta.b64 _, [%smem];"),
    (
        |g| g.b.mbarrier_arrive_expect(g.r, 16384),
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], 16384;",
    ),
    (|g| g.b.mbarrier_expect(g.r, g.r), "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r0], %r0;"),
    (|g| g.b.mbarrier_arrive_remote(g.r), "mbarrier.arrive.shared::cluster.b64 _, [%r0];"),
    (|g| g.b.mbarrier_arrive_copied(g.mbar), "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%smem];"),
    (
        |g| g.b.mbarrier_wait(g.mbar.at(8), g.r),
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%smem+8], %r0; @!done bra again; }",
    ),
    (|g| _ = g.b.mbarrier_try_wait(g.mbar, 1), "mbarrier.try_wait.parity.shared::cta.b64 %p4, [%smem], 1;"),
    (
        |g| _ = g.b.mbarrier_test_wait(g.mbar, g.r),
        "mbarrier.test_wait.parity.shared::cta.b64 %p4, [%smem], %r0;",
    ),
];

const TENSOR_COPIES: &[Form] = &[
    (
        |g| g.b.tma_load(g.bytes, g.map[0], (0, g.r), g.mbar, LoadOptions::default()),
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%smem+1024], [%map_t2, {0, %r0}], [%smem];",
    ),
    (
        |g| {
            let options = LoadOptions::multicast(3u16);
            g.b.tma_load(g.r, g.map[1], (g.r, g.r, 64), g.r.at(8), options);
        },
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%map_t3, {%r0, %r0, 64}], [%r0+8], 3;",
    ),
    (
        |g| g.b.tma_load(g.r, g.map[2], (0, 0, g.r, 0), g.mbar, LoadOptions::default()),
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%map_t4, {0, 0, %r0, 0}], [%smem];",
    ),
    (
        |g| g.b.tma_load(g.r, g.map[3], (0, 0, g.r, 0, -1), g.mbar, LoadOptions::default()),
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%map_t5, {0, 0, %r0, 0, 0xffffffff}], [%smem];",
    ),
    (
        |g| g.b.tma_store(g.map[2], (0, g.r, g.r, 0), g.bytes),
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%map_t4, {0, %r0, %r0, 0}], [%smem+1024];",
    ),
    (
        |g| g.b.tma_reduce_add(g.map[0], (0, g.r), g.r),
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%map_t2, {0, %r0}], [%r0];",
    ),
];

const BULK_COPIES: &[Form] = &[
    (
        |g| g.b.bulk_load(g.bytes, g.d, 4096, g.mbar, LoadOptions::default()),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem+1024], [%d1], 4096, [%smem];",
    ),
    (
        |g| {
            let options = LoadOptions::multicast(3u16);
            g.b.bulk_load(g.r, g.d, g.r, g.r, options);
        },
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%d1], %r0, [%r0], 3;",
    ),
    (
        |g| g.b.bulk_store(g.d, g.bytes, 64),
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%smem+1024], 64;",
    ),
    (
        |g| g.b.bulk_reduce_add_f32(g.d.at(256), g.bytes, 256),
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d1+256], [%smem+1024], 256;",
    ),
    (|g| g.b.prefetch_tensor_map(g.map[1]), "prefetch.tensormap [%map_t3];"),
    (|g| g.b.prefetch(g.d.at(256)), "prefetch.global.L2 [%d1+256];"),
    (|g| g.b.bulk_commit(), "cp.async.bulk.commit_group;"),
    (|g| g.b.bulk_wait(1), "cp.async.bulk.wait_group 1;"),
    (|g| g.b.bulk_wait_read(0), "cp.async.bulk.wait_group.read 0;"),
];

const CLUSTERS_AND_THE_REST: &[Form] = &[
    (|g| g.b.cluster_arrive(), "barrier.cluster.arrive.release.aligned;"),
    (|g| g.b.cluster_arrive_relaxed(), "barrier.cluster.arrive.relaxed.aligned;"),
    (|g| g.b.cluster_wait(), "barrier.cluster.wait.acquire.aligned;"),
    (|g| _ = g.b.map_address(g.mbar.at(8), 1), "mapa.shared::cluster.u32 %r4, smem+8, 1;"),
    (|g| _ = g.b.map_address(g.r, g.r), "mapa.shared::cluster.u32 %r4, %r0, %r0;"),
    (
        |g| g.b.store_async(g.r, 1.0, g.r),
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r0], 0f3F800000, [%r0];",
    ),
    (|g| g.b.grid_dependency_wait(), "griddepcontrol.wait;"),
    (|g| g.b.launch_dependents(), "griddepcontrol.launch_dependents;"),
    (|g| g.b.set_max_registers_down(40), "setmaxnreg.dec.sync.aligned.u32 40;"),
    (|g| g.b.set_max_registers_up(256), "setmaxnreg.inc.sync.aligned.u32 256;"),
    (|g| g.b.guarded(g.p, || g.b.trap()), "@%p3 trap;"),
];

const SPECIAL_REGISTERS: &[Form] = &[
    (|g| _ = g.b.tid(), "mov.u32 %r4, %tid.x;"),
    (|g| _ = g.b.lane_id(), "mov.u32 %r4, %laneid;"),
    (|g| _ = (g.b.cta_x(), g.b.cta_y()), "mov.u32 %r4, %ctaid.x;\nmov.u32 %r5, %ctaid.y;"),
    (|g| _ = (g.b.cta_z(), g.b.grid_x()), "mov.u32 %r4, %ctaid.z;\nmov.u32 %r5, %nctaid.x;"),
    (|g| _ = (g.b.grid_y(), g.b.grid_z()), "mov.u32 %r4, %nctaid.y;\nmov.u32 %r5, %nctaid.z;"),
    (|g| _ = g.b.cluster_cta_x(), "mov.u32 %r4, %cluster_ctaid.x;"),
    (|g| _ = g.b.cluster_cta_rank(), "mov.u32 %r4, %cluster_ctarank;"),
    (|g| _ = g.b.cluster_size(), "mov.u32 %r4, %cluster_nctarank;"),
    (|g| _ = g.b.sm_id(), "mov.u32 %r4, %smid;"),
    (|g| _ = g.b.global_timer(), "mov.u64 %d4, %globaltimer;"),
    (|g| _ = g.b.clock(), "mov.u64 %d4, %clock64;"),
];

const CONTROL_FLOW: &[Form] = &[
    (|g| g.b.if_uniform(g.p, || g.b.sync_cta()), "@!%p3 bra.uni else_1;\nbar.sync 0;\nelse_1:"),
    (
        |g| g.b.if_else_lanes(!g.p, || g.b.trap(), || g.b.launch_dependents()),
        "@%p3 bra else_1;\n\
         trap;\n\
         bra end_1;\n\
         else_1:\n\
         griddepcontrol.launch_dependents;\n\
         end_1:",
    ),
    (
        |g| g.b.for_each((0, g.r), 2, |i| g.b.store(i, i)),
        "mov.b32 %r4, 0;\n\
         loop_1:\n\
         setp.ge.u32 %p5, %r4, %r0;\n\
         @%p5 bra.uni after_loop_1;\n\
         mov.b32 %r6, %r4;\n\
         st.shared.b32 [%r6], %r6;\n\
         add.u32 %r7, %r6, 2;\n\
         mov.b32 %r4, %r7;\n\
         bra.uni loop_1;\n\
         after_loop_1:",
    ),
    (|g| g.b.guarded(!g.p, || g.b.store(g.r, 0)), "@!%p3 st.shared.b32 [%r0], 0;"),
    (|g| _ = g.r.add_f16x2(0x3C00_3C00), "mov.b32 %r5, 0x3c003c00;\nadd.rn.f16x2 %r4, %r0, %r5;"),
];

/// Clusters of one CTA, and of two.
#[test]
fn forms() {
    let alone = [
        LOADS_AND_STORES,
        ATOMICS,
        ASYNCHRONOUS_COPIES,
        LANES_OF_A_WARP,
        BARRIERS_AND_FENCES,
        MBARRIERS,
        CONTROL_FLOW,
    ];
    alone.into_iter().for_each(|forms| check(1, forms));
    let in_pairs = [TENSOR_COPIES, BULK_COPIES, CLUSTERS_AND_THE_REST, SPECIAL_REGISTERS];
    in_pairs.into_iter().for_each(|forms| check(2, forms));
}

/// A product with the fence, commit and wait that it needs.
fn product(g: &Given, mma: Mma) {
    g.b.wgmma_fence();
    g.b.wgmma(mma);
    g.b.wgmma_commit();
    g.b.wgmma_wait(0);
}

/// The lines that [`product`] puts around a product.
const REST: [&str; 3] =
    ["wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"];

#[test]
fn products() {
    type Build = fn(&Given) -> Mma;
    let forms: [(Build, &str); 6] = [
        (
            |g| Mma::new(WgmmaType::F16, &g.b.accumulator("c", 4), g.d, 64u64),
            "m64n8k16.f32.f16.f16 {%f4, %f5, %f6, %f7}, %d1, 64, 0, 1, 1, 0, 0;",
        ),
        (
            |g| Mma::new(WgmmaType::Bf16, &g.b.accumulator("c", 4), g.d, g.d).accumulate_if(g.p).b_mn_major(),
            "m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, %d1, %d1, %p3, 1, 1, 0, 1;",
        ),
        (
            |g| {
                let a = WgmmaA::Shared { desc: g.d.operand(), major: Major::Mn };
                let mma = Mma::new(WgmmaType::Bf16, &g.b.accumulator("c", 4), g.d, g.d);
                Mma { a, negate_a: true, negate_b: true, ..mma }
            },
            "m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, %d1, %d1, 0, -1, -1, 1, 0;",
        ),
        (
            |g| Mma::new(WgmmaType::E4m3, &g.b.accumulator("c", 4), g.d, g.d),
            "m64n8k32.f32.e4m3.e4m3 {%f4, %f5, %f6, %f7}, %d1, %d1, 0, 1, 1;",
        ),
        (
            |g| Mma::with_registers(WgmmaType::Bf16, &g.b.accumulator("c", 4), [g.r; 4], g.d).b_mn_major(),
            "m64n8k16.f32.bf16.bf16 {%f4, %f5, %f6, %f7}, {%r0, %r0, %r0, %r0}, %d1, 0, 1, 1, 1;",
        ),
        (
            |g| Mma::with_registers(WgmmaType::E4m3, &g.b.accumulator("c", 4), [g.r; 4], g.d),
            "m64n8k32.f32.e4m3.e4m3 {%f4, %f5, %f6, %f7}, {%r0, %r0, %r0, %r0}, %d1, 0, 1, 1;",
        ),
    ];
    let skip = body(&kernel(1, |_| ())).len();
    for (build, expected) in forms {
        let kernel = kernel(1, |g| product(g, build(g)));
        let expected = format!("wgmma.mma_async.sync.aligned.{expected}");
        assert_eq!(body(&kernel)[skip..], [REST[0], &expected, REST[1], REST[2]]);
        assemble(&kernel);
    }
}

/// Products of every width N, with A in shared memory and in registers.
#[test]
fn products_of_every_width() {
    let kernel = kernel(1, |g| {
        for n in (8..=256).step_by(8) {
            for ty in [WgmmaType::F16, WgmmaType::Bf16, WgmmaType::E4m3] {
                let d = g.b.accumulator("c", n / 2);
                let (shared, registers) =
                    (Mma::new(ty, &d, g.d, g.d), Mma::with_registers(ty, &d, [g.r; 4], g.d).accumulate());
                product(g, shared);
                product(g, registers);
                d.iter().for_each(|&value| g.b.store(g.bytes, value));
            }
        }
    });
    assemble(&kernel);
}
