//! Small whole kernels: their results are those of a plain computation, under every policy, bit by bit.

use fa3_ir::lang::*;
use fa3_ir::*;
use fa3_sim::{Buffer, Memory, Outcome, Policy, Simulation};
use half::bf16;

/// Every kind of schedule.
pub(crate) fn policies() -> impl Iterator<Item = Policy> {
    [Policy::Eager, Policy::Lazy].into_iter().chain((0..20).map(Policy::Random))
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub(crate) fn floats(memory: &Memory, buffer: Buffer) -> Vec<f32> {
    memory.read(buffer).chunks_exact(4).map(|x| f32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

pub(crate) fn assert_clean(outcome: &Outcome) {
    let findings: String = outcome.findings.iter().map(ToString::to_string).collect();
    assert!(outcome.is_clean(), "{findings}");
}

/// z = x + y over n elements, one a thread.
fn vector_add() -> Kernel {
    Kernel::build("vector_add", Launch::threads(256), |b| {
        let [x, y, z] = ["x", "y", "z"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta) = (b.tid(), b.cta_x());
        let i = cta.mad(256, tid);
        b.if_lanes(i.lt(n), || {
            let [x, y, z] = [x, y, z].map(|array| i.mad_wide(4, array));
            let (x, y) = (b.load::<F32>(x), b.load::<F32>(y));
            b.store(z, x + y);
        });
    })
}

#[test]
fn vectors_are_added() {
    let kernel = vector_add();
    let (x, y): (Vec<f32>, Vec<f32>) = (0..700).map(|i| (i as f32 * 0.25, 1000.0 - i as f32)).unzip();
    for policy in policies() {
        let mut memory = Memory::new();
        let [bx, by] = [("x", &x), ("y", &y)].map(|(name, x)| memory.alloc_from(name, &bytes_of(x)));
        let z = memory.alloc("z", 4 * 700);
        memory.expect_written_once(z);
        let pointers = [bx, by, z].map(|buffer| ArgValue::Pointer(buffer.address()));
        let args = pointers.into_iter().chain([ArgValue::U32(700)]).collect();
        let outcome =
            Simulation::new(&kernel).grid([3, 1, 1]).args(args).policy(policy).run(&mut memory).unwrap();
        assert_clean(&outcome);
        let expected: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x + y).collect();
        assert_eq!(floats(&memory, z), expected);
    }
}

/// y = softmax(x) of rows of n elements, one row a warp, 4 warps a CTA.
fn row_softmax() -> Kernel {
    Kernel::build("row_softmax", Launch::threads(128), |b| {
        let [x, y] = ["x", "y"].map(|name| b.param_pointer(name, Elem::F32));
        let n = b.param_u32("n");
        let (tid, cta, lane) = (b.tid(), b.cta_x(), b.lane_id());
        let first = cta.mad(4, tid >> 5) * n;
        let [x, y] = [x, y].map(|array| first.mad_wide(4, array));

        let score = |block: V<B32>| {
            let column = lane + block;
            let inside = column.lt(n);
            let at = column.mad_wide(4, x);
            let score = b.var("score", f32::NEG_INFINITY);
            b.guarded(inside, || score.set(b.load::<F32>(at) * std::f32::consts::LOG2_E));
            (score.get(), column, inside)
        };
        let max = b.var("max", f32::NEG_INFINITY);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            max.update(|max| max.max(score));
        });
        all_lanes(max, |x, y| x.max(y));
        let sum = b.var("sum", 0.0);
        b.for_each((0, n), 32, |block| {
            let (score, ..) = score(block);
            sum.set(sum + (score - max).ex2());
        });
        all_lanes(sum, |x, y| x + y);
        let scale = sum.now().rcp();
        b.for_each((0, n), 32, |block| {
            let (score, column, inside) = score(block);
            let p = (score - max).ex2() * scale;
            let at = column.mad_wide(4, y);
            b.guarded(inside, || b.store(at, p));
        });
    })
}

#[test]
fn rows_become_distributions() {
    let (kernel, n) = (row_softmax(), 75usize);
    let x: Vec<f32> = (0..8 * n).map(|i| ((i * 37) % 101) as f32 * 0.07 - 3.0).collect();
    let mut bits = None;
    for policy in policies() {
        let mut memory = Memory::new();
        let (bx, y) = (memory.alloc_from("x", &bytes_of(&x)), memory.alloc("y", 4 * x.len()));
        memory.expect_written_once(y);
        let args =
            vec![ArgValue::Pointer(bx.address()), ArgValue::Pointer(y.address()), ArgValue::U32(n as u32)];
        let outcome =
            Simulation::new(&kernel).grid([2, 1, 1]).args(args).policy(policy).run(&mut memory).unwrap();
        assert_clean(&outcome);
        for (row, got) in x.chunks(n).zip(floats(&memory, y).chunks(n)) {
            let sum: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            for (&x, &got) in row.iter().zip(got) {
                let expected = f64::from(x).exp() / sum;
                assert!((f64::from(got) - expected).abs() < 1e-6, "{got} {expected}");
            }
        }
        let now = memory.read(y);
        assert_eq!(*bits.get_or_insert(now.clone()), now, "the schedule is no part of the result");
    }
}

/// Combines a variable over the lanes of the warp.
fn all_lanes<'k>(var: Var<'k, F32>, combine: impl Fn(V<'k, F32>, V<'k, F32>) -> V<'k, F32>) {
    for mask in [16, 8, 4, 2, 1] {
        var.update(|x| combine(x, x.shfl_bfly(mask)));
    }
}

/// D = A · Bᵀ of 64 x n by one warpgroup, A and B loaded as boxes of 64 columns with 128-byte swizzle.
fn one_product(n: u32) -> Kernel {
    Kernel::build("one_product", Launch::threads(128), |b| {
        let [map_a, map_b] = [("a", 64), ("b", n)].map(|(name, rows)| {
            b.param_tensor_map(name, BoxShape::new(Elem::Bf16, &[64, rows], Swizzle::B128))
        });
        let d = b.param_pointer("d", Elem::F32);
        let full = b.mbarriers("full", 1, 1);
        let (tile_a, tile_b) = (b.region("a", 64 * 128, 1024), b.region("b", n * 128, 1024));
        let tid = b.tid();
        b.if_lanes(tid.eq(0), || {
            b.mbarrier_init(full, 1);
            b.fence(FenceInst::MbarrierInit);
            b.mbarrier_arrive_expect(full, (64 + n) * 128);
            b.tma_load(tile_a, map_a, (0, 0), full, LoadOptions::default());
            b.tma_load(tile_b, map_b, (0, 0), full, LoadOptions::default());
        });
        b.sync_cta();
        b.mbarrier_wait(full, 0);

        let layout = Layout::k_major(Swizzle::B128);
        let [desc_a, desc_b] =
            [tile_a, tile_b].map(|tile| b.address(tile).bfe(4, 14).to_u64() | layout.descriptor());
        let acc = b.accumulator("acc", n / 2);
        b.wgmma_fence();
        for step in 0..4 {
            let advance = step * layout.k_step(Major::K);
            let mma = Mma::new(WgmmaType::Bf16, &acc, desc_a + advance, desc_b + advance);
            b.wgmma(if step == 0 { mma } else { mma.accumulate() });
        }
        b.wgmma_commit();
        b.wgmma_wait(0);

        let (warp, lane) = (tid >> 5, tid & 31);
        let (warp_row, lane_row) = (warp << 4, lane >> 2);
        let at = (warp_row + lane_row).mad(n, (lane & 3) << 1).mad_wide(4, d);
        for (index, pair) in acc.chunks_exact(2).enumerate() {
            let (columns, rows) = (8 * (index as u32 / 2), 8 * (index as u32 % 2));
            b.store_vector(at.at(4 * (rows * n + columns) as i32), [pair[0], pair[1]]);
        }
    })
}

/// Small integers, whose products are exact in every arithmetic.
fn integers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 31 + seed * 17 + i / 64 * 7) % 15) as f32 - 7.0).collect()
}

#[test]
fn matrices_are_multiplied() {
    for n in [8, 64, 256] {
        let kernel = one_product(n);
        let (a, bt) = (integers(64 * 64, 1), integers(n as usize * 64, 2));
        let codes = |x: &[f32]| x.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect::<Vec<u8>>();
        for policy in policies() {
            let mut memory = Memory::new();
            let (ba, bb) = (memory.alloc_from("a", &codes(&a)), memory.alloc_from("b", &codes(&bt)));
            let d = memory.alloc("d", 64 * n as usize * 4);
            memory.expect_written_once(d);
            let view = |buffer: Buffer, rows: u64| {
                ArgValue::Tensor(TensorView::contiguous(buffer.address(), &[64, rows], Elem::Bf16))
            };
            let args = vec![view(ba, 64), view(bb, n.into()), ArgValue::Pointer(d.address())];
            let outcome = Simulation::new(&kernel).args(args).policy(policy).run(&mut memory).unwrap();
            assert_clean(&outcome);
            assert_eq!(outcome.counters.products, 4);
            assert_eq!(outcome.counters.loads.bytes, u64::from(64 + n) * 128);
            let product = floats(&memory, d);
            for (row, column) in (0..64).flat_map(|row| (0..n as usize).map(move |column| (row, column))) {
                let dot: f32 = (0..64).map(|k| a[64 * row + k] * bt[64 * column + k]).sum();
                assert_eq!(product[row * n as usize + column], dot, "({row}, {column}) under {policy:?}");
            }
        }
    }
}
