//! What instructions move and compute, against their definitions.

use fa3_ir::*;
use fa3_sim::{Buffer, Memory, Outcome, Policy, Rule, Simulation};
use half::f16;

use crate::rules::{descriptor, init, own_word, thread};
use crate::samples::{assert_clean, bytes_of, floats, policies};

fn words(memory: &Memory, buffer: Buffer) -> Vec<u32> {
    memory.read(buffer).chunks_exact(4).map(|x| u32::from_le_bytes([x[0], x[1], x[2], x[3]])).collect()
}

fn run(kernel: &Kernel, args: Vec<ArgValue>, policy: Policy, memory: &mut Memory) -> Outcome {
    Simulation::new(kernel).args(args).policy(policy).run(memory).unwrap()
}

/// What each lane of one warp stores, if `build` makes it of the lane's number.
fn of_lanes(build: fn(&mut Builder, V<B32>) -> V<B32>) -> Vec<u32> {
    let mut b = Builder::new("lanes", Launch::threads(32));
    let y = b.param_pointer("y", Elem::U32);
    let lane = b.lane_id();
    let result = build(&mut b, lane);
    let at = own_word(&mut b, y);
    b.store(at, result);
    let kernel = b.finish();
    let mut memory = Memory::new();
    let y = memory.alloc("y", 128);
    assert_clean(&run(&kernel, vec![ArgValue::Pointer(y.address())], Policy::Random(5), &mut memory));
    words(&memory, y)
}

#[test]
fn lanes_exchange() {
    let lanes = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(of_lanes(|b, lane| b.shfl_bfly(lane, 5)), lanes(|lane| lane ^ 5));
    assert_eq!(of_lanes(|b, lane| b.shfl_idx(lane, 9)), lanes(|_| 9));
    assert_eq!(of_lanes(|b, lane| b.shfl_up(lane, 3)), lanes(|lane| if lane < 3 { lane } else { lane - 3 }));
    assert_eq!(
        of_lanes(|b, lane| b.shfl_down(lane, 3)),
        lanes(|lane| if lane > 28 { lane } else { lane + 3 })
    );
    assert_eq!(
        of_lanes(|b, lane| {
            let bit = b.and(lane, 1);
            let odd = b.eq_b32(bit, 1);
            b.ballot(odd)
        }),
        lanes(|_| 0xAAAA_AAAA)
    );
    assert_eq!(
        of_lanes(|b, _| {
            let elected = b.elect();
            let again = b.elect();
            let same = b.xor(elected, again);
            let count = b.ballot(elected);
            let count = b.popc_b32(count);
            b.select(same, 0, count)
        }),
        lanes(|_| 1),
        "one lane, always the same"
    );
}

#[test]
fn branches_and_loops_run_lane_by_lane() {
    let results = of_lanes(|b, lane| {
        let result = b.var("result", 1000);
        let bit = b.and(lane, 1);
        let even = b.eq_b32(bit, 0);
        b.if_else_lanes(
            even,
            |b| {
                let twice = b.add(lane, lane);
                b.set(result, twice);
                let large = b.gt_u32(lane, 15);
                b.if_lanes(large, |b| b.set(result, 7));
            },
            |b| {
                let more = b.add(result, lane);
                b.set(result, more);
            },
        );
        b.get(result)
    });
    let expected = (0..32).map(|lane: u32| match lane {
        lane if lane % 2 == 1 => 1000 + lane,
        lane if lane > 15 => 7,
        lane => 2 * lane,
    });
    assert_eq!(results, expected.collect::<Vec<u32>>());
}

/// Lane l gets elements (l / 4, 2 (l mod 4)) and the next of matrix i; transposed, (2 (l mod 4), l / 4) and the next row.
#[test]
fn matrices_are_loaded_and_stored() {
    for trans in [false, true] {
        let mut b = Builder::new("matrices", Launch::threads(32));
        let y = b.param_pointer("y", Elem::U32);
        let (tile, copy) = (b.region("tile", 512, 128), b.region("copy", 512, 128));
        let lane = b.lane_id();
        let [start, copy] = [tile, copy].map(|region| {
            let start = b.address(region);
            b.mad_u32(lane, 16, start)
        });
        // Element e of row r is 8 r + e, two in a word.
        for pair in 0..4u32 {
            let low = b.mul(lane, 8);
            let low = b.add(low, 2 * pair);
            let word = b.mad_u32(low, 0x1_0001, 0x1_0000);
            b.store(start.at(4 * pair as i32), word);
        }
        b.warp_sync();
        let registers = b.ldmatrix::<4>(start, trans);
        b.stmatrix(copy, registers, trans);
        b.warp_sync();
        let out = b.mad_wide_u32(lane, 32, y);
        for (i, register) in registers.into_iter().enumerate() {
            b.store(out.at(4 * i as i32), register);
        }
        let back = b.load_vector::<B32, 4>(copy);
        b.store_vector(out.at(16), back);
        let kernel = b.finish();
        let mut memory = Memory::new();
        let y = memory.alloc("y", 1024);
        memory.expect_written_once(y);
        assert_clean(&run(&kernel, vec![ArgValue::Pointer(y.address())], Policy::Lazy, &mut memory));
        for (lane, got) in words(&memory, y).chunks(8).enumerate() {
            let lane = lane as u32;
            for i in 0..4 {
                let element = |row: u32, column: u32| 8 * (8 * i + row) + column;
                let (outer, inner) = (lane / 4, 2 * (lane % 4));
                let pair = if trans {
                    [element(inner, outer), element(inner + 1, outer)]
                } else {
                    [element(outer, inner), element(outer, inner + 1)]
                };
                assert_eq!(got[i as usize], pair[0] | pair[1] << 16);
                // stmatrix put it back where it was.
                let first = 8 * lane + 2 * i;
                assert_eq!(got[4 + i as usize], first | (first + 1) << 16);
            }
        }
    }
}

/// A tensor goes through shared memory box by box. Boxes stand out on all sides: what is outside is zero, and not
/// stored. Additions add.
#[test]
fn boxes_are_loaded_stored_and_added() {
    let (rows, columns) = (37usize, 40usize);
    for swizzle in Swizzle::ALL {
        let width = swizzle.row_bytes() / 4;
        for add in [false, true] {
            let mut b = Builder::new("boxes", Launch::threads(32));
            let shape = BoxShape::new(Elem::F32, &[width, 16], swizzle);
            let (from, to) = (b.param_tensor_map("from", shape), b.param_tensor_map("to", shape));
            let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 2048, 1024));
            init(&mut b, full, 1);
            let elected = b.elect();
            b.if_lanes(elected, |b| {
                let parity = b.var("parity", 0);
                b.for_each((0, 48), 16, |b, row| {
                    b.for_each((0, 48), width, |b, column| {
                        b.mbarrier_arrive_expect(full, shape.bytes());
                        b.tma_load(tile, from, (column, row), full, LoadOptions::default());
                        b.mbarrier_wait(full, parity);
                        let flipped = b.xor(parity, 1);
                        b.set(parity, flipped);
                        if add {
                            b.tma_reduce_add(to, (column, row), tile);
                        } else {
                            b.tma_store(to, (column, row), tile);
                        }
                        b.bulk_commit();
                        b.bulk_wait_read(0);
                    });
                });
            });
            let kernel = b.finish();
            let x: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
            for policy in [Policy::Eager, Policy::Lazy, Policy::Random(1)] {
                let mut memory = Memory::new();
                let bx = memory.alloc_from("x", &bytes_of(&x));
                let y =
                    if add { memory.alloc_from("y", &bytes_of(&x)) } else { memory.alloc("y", 4 * x.len()) };
                memory.expect_written_once(y);
                let view = |buffer: Buffer| {
                    let dims = [columns as u64, rows as u64];
                    ArgValue::Tensor(TensorView::contiguous(buffer.address(), &dims, Elem::F32))
                };
                assert_clean(&run(&kernel, vec![view(bx), view(y)], policy, &mut memory));
                let expected: Vec<f32> = x.iter().map(|x| if add { 2.0 * x } else { *x }).collect();
                assert_eq!(floats(&memory, y), expected, "{swizzle}, add {add}, {policy}");
            }
        }
    }
}

/// Coordinates may be negative in loads: what is before the tensor is zero.
#[test]
fn what_is_outside_of_a_tensor_is_zero() {
    let mut b = Builder::new("outside", Launch::threads(32));
    let from = b.param_tensor_map("from", BoxShape::new(Elem::F32, &[8, 4], Swizzle::None));
    let y = b.param_pointer("y", Elem::F32);
    let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 128, 128));
    init(&mut b, full, 1);
    let first = thread(&mut b, 0);
    b.if_lanes(first, |b| {
        b.mbarrier_arrive_expect(full, 128);
        b.tma_load(tile, from, (-4, -2), full, LoadOptions::default());
    });
    b.mbarrier_wait(full, 0);
    let (lane, start) = (b.lane_id(), b.address(tile));
    let at = b.mad_u32(lane, 4, start);
    let value = b.load::<F32>(at);
    let to = own_word(&mut b, y);
    b.store(to, value);
    let kernel = b.finish();
    let mut memory = Memory::new();
    let x = memory.alloc_from("x", &bytes_of(&[1.0; 64]));
    let y = memory.alloc("y", 128);
    let view = ArgValue::Tensor(TensorView::contiguous(x.address(), &[16, 4], Elem::F32));
    assert_clean(&run(&kernel, vec![view, ArgValue::Pointer(y.address())], Policy::Lazy, &mut memory));
    let inside = |i: usize| i % 8 >= 4 && i / 8 >= 2;
    let expected: Vec<f32> = (0..32).map(|i| f32::from(u8::from(inside(i)))).collect();
    assert_eq!(floats(&memory, y), expected);
}

/// D = A · Bᵀ with 8-bit elements, A in registers: byte b of register i is row l / 4 + 8 (i mod 2), column
/// 4 (l mod 4) + b + 16 (i / 2), as the builder documents it.
#[test]
fn bytes_are_multiplied() {
    let codes: [(u8, f32); 6] =
        [(0x00, 0.0), (0x38, 1.0), (0xB8, -1.0), (0x40, 2.0), (0x30, 0.5), (0x44, 3.0)];
    let a: Vec<(u8, f32)> = (0..64 * 32).map(|i| codes[(i * 7 + i / 32) % 6]).collect();
    let bt: Vec<(u8, f32)> = (0..16 * 32).map(|i| codes[(i * 5 + i / 32 * 3) % 6]).collect();

    let mut b = Builder::new("bytes", Launch::threads(128));
    let map = b.param_tensor_map("b", BoxShape::new(Elem::E4m3, &[32, 16], Swizzle::B32));
    let (factor, y) = (b.param_pointer("a", Elem::E4m3), b.param_pointer("y", Elem::F32));
    let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 512, 1024));
    init(&mut b, full, 1);
    let first = thread(&mut b, 0);
    b.if_lanes(first, |b| {
        b.mbarrier_arrive_expect(full, 512);
        b.tma_load(tile, map, (0, 0), full, LoadOptions::default());
    });
    b.mbarrier_wait(full, 0);
    let (tid, lane) = (b.tid(), b.lane_id());
    let warp = b.shr_u32(tid, 5);
    let (quad, row) = (b.and(lane, 3), b.shr_u32(lane, 2));
    let row = b.mad_u32(warp, 16, row);
    let at = b.mul(quad, 4);
    let at = b.mad_u32(row, 32, at);
    let at = b.mad_wide_u32(at, 1, factor);
    let registers = [0, 1, 2, 3].map(|i| b.load::<B32>(at.at(8 * 32 * (i % 2) + 16 * (i / 2))));
    let layout = Layout { swizzle: Swizzle::B32, leading: 16, stride: 256 };
    let desc = descriptor(&mut b, tile);
    let desc = b.and(desc, 0x3FFFu64);
    let desc = b.or(desc, layout.descriptor());
    let acc = b.accumulator("acc", 8);
    b.wgmma_fence();
    b.wgmma(Mma::with_registers(WgmmaType::E4m3, &acc, registers, desc));
    b.wgmma_commit();
    b.wgmma_wait(0);
    let to = b.mad_wide_u32(tid, 32, y);
    for (v, &value) in acc.iter().enumerate() {
        b.store(to.at(4 * v as i32), value);
    }
    let kernel = b.finish();
    for policy in policies().take(4) {
        let mut memory = Memory::new();
        let bytes = |x: &[(u8, f32)]| x.iter().map(|x| x.0).collect::<Vec<u8>>();
        let (ba, bb) = (memory.alloc_from("a", &bytes(&a)), memory.alloc_from("b", &bytes(&bt)));
        let y = memory.alloc("y", 128 * 32);
        let view = ArgValue::Tensor(TensorView::contiguous(bb.address(), &[32, 16], Elem::E4m3));
        let args = vec![view, ArgValue::Pointer(ba.address()), ArgValue::Pointer(y.address())];
        assert_clean(&run(&kernel, args, policy, &mut memory));
        for (index, got) in floats(&memory, y).into_iter().enumerate() {
            let (thread, v) = (index / 8, index % 8);
            let row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (v / 2 % 2);
            let column = 8 * (v / 4) + 2 * (thread % 4) + v % 2;
            let dot: f32 = (0..32).map(|k| a[32 * row + k].1 * bt[32 * column + k].1).sum();
            assert_eq!(got, dot, "({row}, {column})");
        }
    }
}

/// Atomics, and 16-bit additions of the tensor memory accelerator.
#[test]
fn additions_add() {
    let mut b = Builder::new("additions", Launch::threads(64));
    let sum = b.param_pointer("sum", Elem::F32);
    let map = b.param_tensor_map("half", BoxShape::new(Elem::F16, &[64, 1], Swizzle::None));
    let tile = b.region("tile", 128, 128);
    let (tid, start) = (b.tid(), b.address(tile));
    let value = b.f32_of_u32(tid);
    b.reduce_add_f32(sum, value);
    let at = b.mad_u32(tid, 2, start);
    let code = b.f16_of_f32(value);
    b.store(at, code);
    b.fence(FenceInst::ProxyAsyncShared);
    b.sync_cta();
    let first = thread(&mut b, 0);
    b.if_lanes(first, |b| {
        b.tma_reduce_add(map, (0, 0), tile);
        b.tma_reduce_add(map, (0, 0), tile);
        b.bulk_commit();
        b.bulk_wait_read(0);
    });
    let kernel = b.finish();
    let mut memory = Memory::new();
    let sum = memory.alloc_from("sum", &1.5f32.to_le_bytes());
    let half = memory.alloc_from("half", &f16::from_f32(0.25).to_le_bytes().repeat(64));
    let view = ArgValue::Tensor(TensorView::contiguous(half.address(), &[64, 1], Elem::F16));
    assert_clean(&run(&kernel, vec![ArgValue::Pointer(sum.address()), view], Policy::Lazy, &mut memory));
    assert_eq!(floats(&memory, sum), [2016.0 + 1.5]);
    for (i, code) in memory.read(half).chunks(2).enumerate() {
        assert_eq!(f16::from_le_bytes([code[0], code[1]]).to_f32(), 0.25 + 2.0 * i as f32);
    }
}

/// Each line's accesses and their bank conflicts: a column of a 32 x 32 tile takes 32 wavefronts, a padded one 1.
#[test]
fn bank_conflicts_are_counted() {
    for (pitch, conflicts) in [(128, 32), (132, 1)] {
        let mut b = Builder::new("banks", Launch::threads(32));
        let tile = b.region("tile", 32 * 132, 128);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let at = b.mad_u32(lane, pitch, start);
        b.store(at, 0.0);
        let outcome = run(&b.finish(), Vec::new(), Policy::Eager, &mut Memory::new());
        assert_clean(&outcome);
        let wavefronts: Vec<_> = outcome.counters.shared.values().collect();
        assert_eq!(wavefronts.len(), 1);
        assert_eq!((wavefronts[0].accesses, wavefronts[0].ideal, wavefronts[0].actual), (1, 1, conflicts));
    }
}

#[test]
fn launches_that_do_not_fit_are_errors() {
    let mut b = Builder::new("endless", Launch::threads(32));
    let n = b.param_u32("n");
    b.repeat(|b| {
        let never = b.eq_b32(n, 0);
        b.break_if(never);
    });
    let kernel = b.finish();
    let error = Simulation::new(&kernel).run(&mut Memory::new()).unwrap_err();
    assert_eq!(error.to_string(), "0 arguments for 1 parameters");
    let endless = Simulation::new(&kernel).args(vec![ArgValue::U32(1)]).max_steps(10_000);
    assert_eq!(endless.run(&mut Memory::new()).unwrap_err().to_string(), "no end after 10000 steps");
    assert!(
        Simulation::new(&kernel).args(vec![ArgValue::U32(0)]).run(&mut Memory::new()).unwrap().is_clean()
    );
    let huge = Simulation::new(&kernel).args(vec![ArgValue::U32(0)]).grid([1 << 20, 1 << 10, 1]);
    assert_eq!(
        huge.run(&mut Memory::new()).unwrap_err().to_string(),
        "a grid of 1073741824 ctas, more than 2^24"
    );
    let mut broken = kernel.clone();
    broken.launch.threads = 33;
    let error = Simulation::new(&broken).run(&mut Memory::new()).unwrap_err().to_string();
    assert!(error.starts_with("kernel endless breaks"), "{error}");
}

/// Ids are unique, and the rules of the specification are all there.
#[test]
fn rules_have_ids() {
    let mut ids: Vec<&str> = Rule::ALL.iter().map(|rule| rule.id()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), Rule::ALL.len());
    for id in ["W1", "W8", "M1", "M6", "T1", "T5", "B1", "B2", "R1", "L1", "I1", "G1"] {
        assert!(ids.contains(&id));
    }
}
