//! Moves and results of instructions, against their definitions.

use fa3_ir::lang::*;
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

/// The number that each lane of one warp stores, if `build` computes it from the lane's number.
fn of_lanes(build: for<'k> fn(&'k Builder, V<'k, B32>) -> V<'k, B32>) -> Vec<u32> {
    let kernel = Kernel::build("lanes", Launch::threads(32), |b| {
        let y = b.param_pointer("y", Elem::U32);
        let result = build(b, b.lane_id());
        let at = own_word(b, y);
        b.store(at, result);
    });
    let mut memory = Memory::new();
    let y = memory.alloc("y", 128);
    assert_clean(&run(&kernel, vec![ArgValue::Pointer(y.address())], Policy::Random(5), &mut memory));
    words(&memory, y)
}

#[test]
fn lanes_exchange() {
    let lanes = |f: fn(u32) -> u32| (0..32).map(f).collect::<Vec<u32>>();
    assert_eq!(of_lanes(|_, lane| lane.shfl_bfly(5)), lanes(|lane| lane ^ 5));
    assert_eq!(of_lanes(|_, lane| lane.shfl_idx(9)), lanes(|_| 9));
    assert_eq!(of_lanes(|_, lane| lane.shfl_up(3)), lanes(|lane| if lane < 3 { lane } else { lane - 3 }));
    assert_eq!(of_lanes(|_, lane| lane.shfl_down(3)), lanes(|lane| if lane > 28 { lane } else { lane + 3 }));
    assert_eq!(of_lanes(|_, lane| (lane & 1).eq(1).ballot()), lanes(|_| 0xAAAA_AAAA));
    assert_eq!(
        of_lanes(|b, _| {
            let elected = b.elect();
            (elected ^ b.elect()).select(0, elected.ballot().popc())
        }),
        lanes(|_| 1),
        "one lane, always the same"
    );
}

#[test]
fn branches_and_loops_run_lane_by_lane() {
    let results = of_lanes(|b, lane| {
        let result = b.var("result", 1000);
        let even = (lane & 1).eq(0);
        b.if_else_lanes(
            even,
            || {
                result.set(lane + lane);
                b.if_lanes(lane.gt(15), || result.set(7));
            },
            || result.set(result + lane),
        );
        result.get()
    });
    let expected = (0..32).map(|lane: u32| match lane {
        lane if lane % 2 == 1 => 1000 + lane,
        lane if lane > 15 => 7,
        lane => 2 * lane,
    });
    assert_eq!(results, expected.collect::<Vec<u32>>());
}

/// Lane l gets elements (l / 4, 2 (l mod 4)) and the next of matrix i; transposed, (2 (l mod 4), l / 4) and below.
#[test]
fn matrices_are_loaded_and_stored() {
    for trans in [false, true] {
        let kernel = Kernel::build("matrices", Launch::threads(32), |b| {
            let y = b.param_pointer("y", Elem::U32);
            let (tile, copy) = (b.region("tile", 512, 128), b.region("copy", 512, 128));
            let lane = b.lane_id();
            let [start, copy] = [tile, copy].map(|region| lane.mad(16, b.address(region)));
            // Element e of row r is 8 r + e, two in a word.
            for pair in 0..4u32 {
                let word = (lane * 8 + 2 * pair).mad(0x1_0001, 0x1_0000);
                b.store(start.at(4 * pair as i32), word);
            }
            b.warp_sync();
            let registers = b.ldmatrix::<4>(start, trans);
            b.stmatrix(copy, registers, trans);
            b.warp_sync();
            let out = lane.mad_wide(32, y);
            for (i, register) in registers.into_iter().enumerate() {
                b.store(out.at(4 * i as i32), register);
            }
            let back = b.load_vector::<B32, 4>(copy);
            b.store_vector(out.at(16), back);
        });
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
            let kernel = Kernel::build("boxes", Launch::threads(32), |b| {
                let shape = BoxShape::new(Elem::F32, &[width, 16], swizzle);
                let (from, to) = (b.param_tensor_map("from", shape), b.param_tensor_map("to", shape));
                let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 2048, 1024));
                init(b, full, 1);
                b.if_lanes(b.elect(), || {
                    let parity = b.var("parity", 0);
                    b.for_each((0, 48), 16, |row| {
                        b.for_each((0, 48), width, |column| {
                            b.mbarrier_arrive_expect(full, shape.bytes());
                            b.tma_load(tile, from, (column, row), full, LoadOptions::default());
                            b.mbarrier_wait(full, parity);
                            parity.set(parity ^ 1);
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
            });
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
    let kernel = Kernel::build("outside", Launch::threads(32), |b| {
        let from = b.param_tensor_map("from", BoxShape::new(Elem::F32, &[8, 4], Swizzle::None));
        let y = b.param_pointer("y", Elem::F32);
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 128, 128));
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 128);
            b.tma_load(tile, from, (-4, -2), full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
        let (lane, start) = (b.lane_id(), b.address(tile));
        let value = b.load::<F32>(lane.mad(4, start));
        let to = own_word(b, y);
        b.store(to, value);
    });
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

    let kernel = Kernel::build("bytes", Launch::threads(128), |b| {
        let map = b.param_tensor_map("b", BoxShape::new(Elem::E4m3, &[32, 16], Swizzle::B32));
        let (factor, y) = (b.param_pointer("a", Elem::E4m3), b.param_pointer("y", Elem::F32));
        let (full, tile) = (b.mbarriers("full", 1, 1), b.region("tile", 512, 1024));
        init(b, full, 1);
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.mbarrier_arrive_expect(full, 512);
            b.tma_load(tile, map, (0, 0), full, LoadOptions::default());
        });
        b.mbarrier_wait(full, 0);
        let (tid, lane) = (b.tid(), b.lane_id());
        let warp = tid >> 5;
        let (quad, row) = (lane & 3, lane >> 2);
        let row = warp.mad(16, row);
        let at = row.mad(32, quad * 4).mad_wide(1, factor);
        let registers = [0, 1, 2, 3].map(|i| b.load::<B32>(at.at(8 * 32 * (i % 2) + 16 * (i / 2))));
        let layout = Layout { swizzle: Swizzle::B32, leading: 16, stride: 256 };
        let desc = descriptor(b, tile);
        let desc = (desc & 0x3FFFu64) | layout.descriptor();
        let acc = b.accumulator("acc", 8);
        b.wgmma_fence();
        b.wgmma(Mma::with_registers(WgmmaType::E4m3, &acc, registers, desc));
        b.wgmma_commit();
        b.wgmma_wait(0);
        let to = tid.mad_wide(32, y);
        for (v, &value) in acc.iter().enumerate() {
            b.store(to.at(4 * v as i32), value);
        }
    });
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
    let kernel = Kernel::build("additions", Launch::threads(64), |b| {
        let sum = b.param_pointer("sum", Elem::F32);
        let map = b.param_tensor_map("half", BoxShape::new(Elem::F16, &[64, 1], Swizzle::None));
        let tile = b.region("tile", 128, 128);
        let (tid, start) = (b.tid(), b.address(tile));
        let value = tid.to_f32();
        b.reduce_add_f32(sum, value);
        let at = tid.mad(2, start);
        let code = value.to_f16();
        b.store(at, code);
        b.fence(FenceInst::ProxyAsyncShared);
        b.sync_cta();
        let first = thread(b, 0);
        b.if_lanes(first, || {
            b.tma_reduce_add(map, (0, 0), tile);
            b.tma_reduce_add(map, (0, 0), tile);
            b.bulk_commit();
            b.bulk_wait_read(0);
        });
    });
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
        let kernel = Kernel::build("banks", Launch::threads(32), |b| {
            let tile = b.region("tile", 32 * 132, 128);
            let (lane, start) = (b.lane_id(), b.address(tile));
            b.store(lane.mad(pitch, start), 0.0);
        });
        let outcome = run(&kernel, Vec::new(), Policy::Eager, &mut Memory::new());
        assert_clean(&outcome);
        let wavefronts: Vec<_> = outcome.counters.shared.values().collect();
        assert_eq!(wavefronts.len(), 1);
        assert_eq!((wavefronts[0].accesses, wavefronts[0].ideal, wavefronts[0].actual), (1, 1, conflicts));
    }
}

#[test]
fn launches_that_do_not_fit_are_errors() {
    let kernel = Kernel::build("endless", Launch::threads(32), |b| {
        let n = b.param_u32("n");
        b.repeat(|| b.break_if(n.eq(0)));
    });
    let error = Simulation::new(&kernel).run(&mut Memory::new()).unwrap_err();
    assert_eq!(error.to_string(), "0 arguments for 1 parameters");
    let endless = Simulation::new(&kernel).args(vec![ArgValue::U32(1)]).max_steps(10_000);
    assert_eq!(
        endless.run(&mut Memory::new()).unwrap_err().to_string(),
        "no end after 10000 steps, the most that are simulated: smaller sizes take fewer"
    );
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

/// An mbarrier that is initialised again is another one. With more than clocks tell apart, no finding could be trusted.
#[test]
fn more_agents_than_clocks_tell_apart_are_an_error() {
    let kernel = Kernel::build("again", Launch::threads(32), |b| {
        let (full, rounds) = (b.mbarriers("full", 1, 1), b.param_u32("rounds"));
        b.if_lanes(b.tid().eq(0), || {
            b.for_each((0, rounds), 1, |_| {
                b.mbarrier_init(full, 1);
                b.mbarrier_invalidate(full);
            });
        });
    });
    let rounds = |rounds| Simulation::new(&kernel).args(vec![ArgValue::U32(rounds)]).run(&mut Memory::new());
    assert_clean(&rounds(32_000).unwrap());
    let error = rounds(33_000).unwrap_err();
    assert_eq!(error.to_string(), "a cluster with more than 65535 warps, mbarriers and copying threads");
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
