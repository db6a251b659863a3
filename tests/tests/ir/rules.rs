//! Violates every rule of the verifier once.

use fa3_ir::lang::*;
use fa3_ir::*;

/// The faults of a kernel.
pub(crate) fn faults_in(kernel: &Kernel) -> Vec<Fault> {
    verify(kernel).err().map_or_else(Vec::new, |errors| errors.into_iter().map(|error| error.fault).collect())
}

/// The faults of a kernel. A kernel without faults must print PTX.
fn judged(kernel: &Kernel) -> Vec<Fault> {
    let found = faults_in(kernel);
    assert_eq!(ptx::emit(kernel).is_ok(), found.is_empty());
    found
}

/// The faults of a kernel of 128 threads that `build` builds.
pub(crate) fn faults(build: impl FnOnce(&Builder)) -> Vec<Fault> {
    judged(&Kernel::build("k", Launch::threads(128), build))
}

/// The faults of a kernel of `threads` threads that `build` builds and `damage` changes.
fn faults_of(threads: u32, build: impl FnOnce(&Builder), damage: impl FnOnce(&mut Kernel)) -> Vec<Fault> {
    let mut kernel = Kernel::build("k", Launch::threads(threads), build);
    damage(&mut kernel);
    judged(&kernel)
}

/// The faults of a kernel that calls `place` under a condition that differs between lanes.
fn under(place: fn(&Builder, V<Pred>)) -> Vec<Fault> {
    faults(|b| place(b, b.tid().eq(0)))
}

/// Changes the instruction of statement `index` of the prologue.
fn replace(index: usize, inst: Inst) -> impl FnOnce(&mut Kernel) {
    move |kernel| kernel.prologue[index].node = Node::Inst { guard: None, inst }
}

fn add(dst: u32, a: u32, b: u32) -> Inst {
    let src = [a, b].map(|value| Operand::Value(Value(value))).to_vec();
    Inst::Lane(LaneInst { op: LaneOp::AddU32, dst: vec![Value(dst)], src })
}

#[test]
fn v1_classes() {
    let build = |b: &Builder| _ = (b.tid(), b.clock(), b.tid());
    let fault = |operand: &str, given| Fault::Type { operand: operand.to_owned(), given, expected: Ty::B32 };
    assert_eq!(faults_of(128, build, replace(2, add(2, 0, 1))), [fault("v1", Ty::B64)]);
    let constant = Operand::Imm(Imm::F32(0));
    let set = Inst::Set { var: Value(2), ty: Ty::B32, src: constant };
    assert_eq!(faults_of(128, build, replace(2, set)), [fault("constant F32(0)", Ty::F32)]);
    let load = Inst::Mem(MemInst::LoadParam { dst: Value(1), param: Param(0), ty: Ty::B64 });
    let map = |b: &Builder| {
        b.param_tensor_map("q", BoxShape::new(Elem::F16, &[8, 8], Swizzle::None));
        _ = (b.tid(), b.clock());
    };
    let fault = Fault::ParamKind { param: "q".to_owned(), expected: "number" };
    assert_eq!(faults_of(128, map, replace(1, load)), [fault]);
}

#[test]
fn v2_definition_before_use() {
    let fault = || Fault::NotVisible { value: Value(2) };
    assert_eq!(faults_of(128, |b| _ = (b.tid(), b.tid(), b.tid()), replace(1, add(1, 0, 2))), [fault()]);
    let outside_of_loop = |b: &Builder| {
        let mut inner = None;
        let p = b.tid().eq(0);
        b.repeat(|| {
            inner = Some(b.tid());
            b.break_if(p);
        });
        _ = inner.unwrap() + 1;
    };
    assert_eq!(faults(outside_of_loop), [fault()]);
    let outside_of_branch = |b: &Builder| {
        let mut inner = None;
        let p = b.tid().eq(0);
        b.if_lanes(p, || inner = Some(b.tid()));
        b.if_lanes(!p, || _ = inner.unwrap() + 1);
    };
    assert_eq!(faults(outside_of_branch), [fault()]);
    let in_another_role = |b: &Builder| {
        let mut inner = None;
        let (tid, _) = (b.tid(), b.tid());
        b.role(Role::new("one", 0..2), || inner = Some(tid + 1));
        b.role(Role::new("two", 2..4), || _ = inner.unwrap() + tid);
    };
    assert_eq!(faults(in_another_role), [fault()]);
}

#[test]
fn v3_one_assignment() {
    let twice = faults_of(128, |b| _ = (b.tid(), b.tid()), replace(1, add(0, 0, 0)));
    assert_eq!(twice, [Fault::AssignedTwice { value: Value(0) }]);
}

#[test]
fn v4_variables_are_assigned() {
    let fault = || Fault::Unassigned { value: Value(0) };
    let some_way = |assign: fn(&Builder, V<Pred>, Var<B32>)| {
        faults(move |b| {
            let var = b.uninitialised::<B32>("x");
            assign(b, b.tid().eq(0), var);
            _ = var + 1;
        })
    };
    assert_eq!(some_way(|_, _, _| ()), [fault()]);
    assert_eq!(some_way(|b, p, x| b.guarded(p, || x.set(1))), [fault()]);
    assert_eq!(some_way(|b, p, x| b.if_lanes(p, || x.set(1))), [fault()]);
    assert_eq!(some_way(|b, p, x| b.if_else_lanes(p, || x.set(1), || x.set(2))), []);
    let after_break = |b: &Builder, p: V<Pred>, x: Var<B32>| {
        b.repeat(|| {
            b.break_if(p);
            x.set(1);
        })
    };
    assert_eq!(some_way(after_break), [fault()]);
    let before_break = |b: &Builder, p: V<Pred>, x: Var<B32>| {
        b.repeat(|| {
            x.set(1);
            b.break_if(p);
        })
    };
    assert_eq!(some_way(before_break), []);
    let product = |accumulate: bool| {
        faults(move |b| {
            let d = b.accumulator("d", 4);
            let mma = Mma::new(WgmmaType::F16, &d, 0u64, 0u64);
            b.wgmma(if accumulate { mma.accumulate() } else { mma });
        })
    };
    assert_eq!(product(false), []);
    assert_eq!(product(true), (0..4).map(|v| Fault::Unassigned { value: Value(v) }).collect::<Vec<_>>());
}

#[test]
fn v5_handles_exist() {
    let unknown = |what, index, count| vec![Fault::Unknown { what, index, count }];
    assert_eq!(faults_of(128, |b| _ = b.tid(), replace(0, add(0, 7, 7)))[0], unknown("value", 7, 1)[0]);
    assert_eq!(faults(|b| b.store(Region(3), 0)), unknown("region", 3, 0));
    assert_eq!(faults(|b| b.sync(Barrier(2))), unknown("barrier", 2, 0));
    assert_eq!(faults(|b| b.once_in_warp(4, || {})), unknown("warp of a role", 4, 4));
    assert_eq!(faults(|b| b.once_in_warp(3, || {})), []);
    let store = |b: &Builder| b.tma_store(TensorMap(Param(1)), (0, 0), b.value(0));
    assert_eq!(faults(store)[0], unknown("parameter", 1, 0)[0]);
}

#[test]
fn v6_constants_in_range() {
    let limit = |what, given, min, max, multiple| vec![Fault::Limit { what, given, min, max, multiple }];
    assert_eq!(faults(|b| b.wgmma_wait(8)), limit("wgmma groups", 8, 0, 7, 1));
    assert_eq!(faults(|b| b.sync_computed(1, 33)), limit("barrier threads", 33, 32, 1024, 32));
    assert_eq!(faults(|b| b.sync_computed(16, 64)), limit("barrier number", 16, 1, 15, 1));
    assert_eq!(faults(|b| b.arrive_computed(0, 64)), limit("barrier number", 0, 1, 15, 1));
    let huge = 1 << 28;
    assert_eq!(faults(|b| b.set_max_registers_up(huge))[1..], limit("setmaxnreg", huge, 24, 256, 8));
    assert_eq!(faults(|b| b.set_max_registers_down(20)), limit("setmaxnreg", 20, 24, 256, 8));
    assert_eq!(faults(|b| b.set_max_registers_down(28)), limit("setmaxnreg", 28, 24, 256, 8));
    let product = |registers| {
        faults(move |b| {
            let d = b.accumulator("d", registers);
            b.wgmma(Mma::new(WgmmaType::F16, &d, 0u64, 0u64));
        })
    };
    assert_eq!(product(66), limit("wgmma n", 132, 8, 256, 8));
    assert_eq!(product(132), limit("wgmma n", 264, 8, 256, 8));
    let copy = |bytes: u32| {
        faults(move |b| {
            let (tile, x) = (b.region("tile", 1024, 16), b.param_pointer("x", Elem::U8));
            b.bulk_store(x, tile, bytes);
        })
    };
    assert_eq!(copy(24), limit("bulk copy bytes", 24, 16, (1 << 20) - 16, 16));
    let mbarrier = |use_it: fn(&Builder, Region)| {
        faults(move |b| {
            let region = b.mbarriers("full", 1, 0);
            use_it(b, region);
        })
    };
    let most = (1 << 20) - 1;
    assert_eq!(mbarrier(|b, full| b.mbarrier_init(full, 0)), limit("mbarrier arrivals", 0, 1, most, 1));
    assert_eq!(mbarrier(|b, full| b.mbarrier_wait(full, 2)), limit("parity", 2, 0, 1, 1));
    let expected = mbarrier(|b, full| b.mbarrier_expect(full, 1 << 20));
    assert_eq!(expected, limit("expected bytes", 1 << 20, 0, most, 1));
    assert_eq!(faults(|b| _ = b.tid().shfl_idx(32)), limit("shuffle lane", 32, 0, 31, 1));
    let pair = Inst::Lane(LaneInst {
        op: LaneOp::NegF16x2,
        dst: vec![Value(0)],
        src: vec![Operand::Imm(Imm::B32(0))],
    });
    assert_eq!(faults_of(128, |b| _ = b.tid(), replace(0, pair)), [Fault::Constant { op: "NegF16x2" }]);
}

#[test]
fn v7_vectors() {
    let fault = |width, ty| vec![Fault::Vector { width, ty }];
    let three = faults(|b| _ = b.load_vector::<F32, 3>(b.param_pointer("x", Elem::F32)));
    assert_eq!(three, fault(3, Ty::F32));
    let long = faults(|b| _ = b.load_vector::<B64, 4>(b.param_pointer("x", Elem::U64)));
    assert_eq!(long, fault(4, Ty::B64));
}

#[test]
fn v8_as_many_registers_as_the_shape_says() {
    let product = faults(|b| {
        let d = b.accumulator("d", 4);
        b.wgmma(Mma { n: 16, ..Mma::new(WgmmaType::F16, &d, 0u64, 0u64) });
    });
    assert_eq!(product, [Fault::Count { what: "accumulator registers", given: 4, expected: 8 }]);
    let one_twice = faults(|b| {
        let d = b.accumulator("d", 3);
        b.wgmma(Mma::new(WgmmaType::F16, &[d[0], d[1], d[2], d[1]], 0u64, 0u64));
    });
    assert_eq!(one_twice, [Fault::Count { what: "different accumulator registers", given: 3, expected: 4 }]);
}

#[test]
fn v9_eight_bit_operands_are_k_major() {
    let product = faults(|b| {
        let d = b.accumulator("d", 4);
        b.wgmma(Mma::new(WgmmaType::E4m3, &d, 0u64, 0u64).b_mn_major());
    });
    assert_eq!(product, [Fault::MajorOf8Bit]);
}

#[test]
fn v10_coordinates() {
    let store = faults(|b| {
        let map = b.param_tensor_map("q", BoxShape::new(Elem::F16, &[8, 8, 8], Swizzle::None));
        b.tma_store(map, (0, 0), b.region("tile", 1024, 128));
    });
    assert_eq!(store, [Fault::Rank { param: "q".to_owned(), coords: 2, rank: 3 }]);
}

#[test]
fn v11_whole_warps() {
    assert_eq!(under(|b, p| b.if_lanes(p, || b.sync_cta())), [Fault::CollectiveDiverged]);
    assert_eq!(under(|b, p| b.guarded(p, || b.warp_sync())), [Fault::CollectiveDiverged]);
    let nested = |b: &Builder, p: V<Pred>| b.if_lanes(p, || b.if_uniform(p, || b.wgmma_commit()));
    assert_eq!(under(nested), [Fault::CollectiveDiverged]);
    assert_eq!(under(|b, p| b.if_uniform(p, || b.sync_cta())), []);
    let wait = |b: &Builder, p: V<Pred>| {
        let full = b.mbarriers("full", 1, 1);
        b.guarded(p, || b.mbarrier_wait(full, 0));
    };
    assert_eq!(under(wait), [Fault::GuardedWait]);
}

#[test]
fn v12_breaks() {
    assert_eq!(under(|b, p| b.break_if(p)), [Fault::BreakOutsideLoop]);
    assert_eq!(under(|b, p| b.repeat(|| b.if_lanes(p, || b.break_if(p)))), [Fault::BreakDiverged]);
    assert_eq!(under(|b, p| b.if_lanes(p, || b.repeat(|| b.break_if(p)))), []);
    let lanes_of_lanes =
        |b: &Builder, p: V<Pred>| b.if_lanes(p, || b.repeat(|| b.if_lanes(!p, || b.break_if(p))));
    assert_eq!(under(lanes_of_lanes), [Fault::BreakDiverged]);
    let uniform_of_lanes =
        |b: &Builder, p: V<Pred>| b.repeat(|| b.if_lanes(p, || b.if_uniform(p, || b.break_if(p))));
    assert_eq!(under(uniform_of_lanes), [Fault::BreakDiverged]);
}

#[test]
fn v12_loops_end() {
    assert_eq!(faults(|b| b.repeat(|| _ = b.tid())), [Fault::EndlessLoop]);
}

#[test]
fn v13_roles_cover_the_warps() {
    let cover = |warp, given| Fault::RoleCover { warp, given };
    let roles = |ranges: &[std::ops::Range<u32>]| {
        faults(|b| {
            for (index, range) in ranges.iter().enumerate() {
                b.role(Role::new(&format!("r{index}"), range.clone()), || ());
            }
        })
    };
    assert_eq!(roles(&[0..2, 2..4]), []);
    assert_eq!(roles(&[0..2, 3..4]), [cover(2, 0)]);
    assert_eq!(roles(&[0..3, 2..4]), [cover(2, 2)]);
    let outside = Fault::RoleWarps { role: "r1".to_owned(), start: 2, end: 5, warps: 4 };
    assert_eq!(roles(&[0..2, 2..5]), [outside]);
}

#[test]
fn v14_whole_warpgroups() {
    let roles = |b: &Builder| {
        b.role(Role::new("one", 0..2), || ());
        b.role(Role::new("two", 2..8), || b.wgmma_commit());
    };
    assert_eq!(faults_of(256, roles, |_| ()), [Fault::Warpgroup { start: 2, end: 8 }]);
    let no_roles = faults_of(64, |b| b.set_max_registers_down(24), |_| ());
    assert_eq!(no_roles, [Fault::Warpgroup { start: 0, end: 2 }]);
}

/// The faults of roles with these register counts. Each of 384 threads has 168 registers at entry.
fn registers(given: &'static [(bool, u32)]) -> Vec<Fault> {
    let build = |b: &Builder| {
        for (index, &(increase, registers)) in (0..).zip(given) {
            b.role(Role::new(&format!("r{index}"), 4 * index..4 * index + 4), || {
                if increase { b.set_max_registers_up(registers) } else { b.set_max_registers_down(registers) }
            });
        }
    };
    faults_of(128 * given.len() as u32, build, |_| ())
}

#[test]
fn v15_registers_go_the_way_that_is_said() {
    assert_eq!(registers(&[(false, 24), (true, 240), (true, 240)]), []);
    let fault = |given| Fault::SetMaxRegisters { given, before: 168 };
    assert_eq!(registers(&[(false, 24), (true, 160), (true, 240)]), [fault(160)]);
    assert_eq!(registers(&[(false, 24), (false, 200), (true, 240)]), [fault(200)]);
}

/// A change of the register count is compared with the previous change, and every warp must execute it.
#[test]
fn v15_every_change_counts() {
    let twice = faults(|b| {
        b.set_max_registers_down(96);
        b.set_max_registers_down(160);
    });
    assert_eq!(twice, [Fault::SetMaxRegisters { given: 160, before: 96 }]);
    let nested = faults(|b| {
        let p = b.param_u32("p");
        b.if_uniform(p.eq(0), || b.set_max_registers_down(24));
    });
    assert_eq!(nested, [Fault::SetMaxRegistersNested]);
}

/// 24 + 2 · 240 registers equal 3 · 168. An H100 with four warpgroups of 128 registers each hangs with 24 + 3 · 240.
#[test]
fn v16_the_register_pool() {
    assert_eq!(registers(&[(false, 32), (true, 160), (true, 160), (true, 160)]), []);
    let fault = |given, pool| vec![Fault::RegisterPool { given, pool }];
    let four = registers(&[(false, 24), (true, 240), (true, 240), (true, 240)]);
    assert_eq!(four, fault(128 * (24 + 3 * 240), 65536));
    let no_roles = faults_of(384, |b| b.set_max_registers_up(240), |_| ());
    assert_eq!(no_roles, fault(384 * 240, 64512));
    let three = registers(&[(false, 32), (true, 240), (true, 240)]);
    assert_eq!(three, fault(65536, 64512));
}

#[test]
fn v17_launches() {
    assert_eq!(faults_of(100, |_| (), |_| ()), [Fault::Threads { threads: 100 }]);
    assert_eq!(faults_of(1056, |_| (), |_| ()), [Fault::Threads { threads: 1056 }]);
    assert_eq!(faults_of(32, |_| (), |k| k.launch.cluster = 17), [Fault::Cluster { cluster: 17 }]);
    for (threads, per_sm) in [(32, 0), (32, 33), (1024, 3)] {
        let faults = faults_of(threads, |_| (), |k| k.launch.per_sm = per_sm);
        assert_eq!(faults, [Fault::PerSm { per_sm, threads }]);
    }
}

#[test]
fn v18_named_barriers() {
    let sixteen = |b: &Builder| (0..16).for_each(|index| _ = b.barrier(&format!("b{index}"), 64));
    assert_eq!(faults(sixteen), [Fault::BarrierId { name: "b15".to_owned(), id: 16 }]);
    let two = |b: &Builder| _ = (b.barrier("x", 64), b.barrier("y", 64));
    let same = faults_of(128, two, |kernel| kernel.barriers[1].id = 1);
    assert_eq!(same, [Fault::BarrierId { name: "y".to_owned(), id: 1 }]);
    let fault = |threads| vec![Fault::BarrierThreads { name: "x".to_owned(), threads, limit: 128 }];
    assert_eq!(faults(|b| _ = b.barrier("x", 48)), fault(48));
    assert_eq!(faults(|b| _ = b.barrier("x", 160)), fault(160));
}

#[test]
fn v19_regions() {
    let two = |b: &Builder| _ = (b.region("x", 64, 16), b.region("y", 64, 16));
    let moved = faults_of(128, two, |kernel| kernel.smem.regions[1].offset = 48);
    assert_eq!(moved, [Fault::RegionOverlap { first: "x".to_owned(), second: "y".to_owned() }]);
    let declared = |b: &Builder| {
        let x = b.region("x", 64, 16);
        b.overlay("y", &[x], 64, 16);
    };
    assert_eq!(faults(declared), []);
    let fault = |offset, align| vec![Fault::RegionAlign { name: "x".to_owned(), offset, align }];
    assert_eq!(faults(|b| _ = b.region("x", 64, 48)), fault(0, 48));
    assert_eq!(faults(|b| _ = b.region("x", 64, 2048)), fault(0, 2048));
    assert_eq!(faults_of(128, |b| _ = b.region("x", 64, 16), |k| k.smem.regions[0].offset = 8), fault(8, 16));
}

#[test]
fn v20_shared_memory() {
    assert_eq!(faults(|b| _ = b.region("x", 227 * 1024, 16)), []);
    let fault = Fault::SmemTotal { given: 227 * 1024 + 1, limit: 227 * 1024 };
    assert_eq!(faults(|b| _ = b.region("x", 227 * 1024 + 1, 16)), [fault]);
}

#[test]
fn v21_constant_addresses() {
    let store = |offset: i32| {
        faults(move |b| {
            let x = b.region("x", 64, 16);
            b.store_vector(x.at(offset), [0.0, 0.0]);
        })
    };
    let outside = |start, end| Fault::OutsideRegion { region: "x".to_owned(), start, end, size: 64 };
    let misaligned = |offset, align| Fault::Misaligned { region: "x".to_owned(), offset, align };
    assert_eq!(store(56), []);
    assert_eq!(store(64), [outside(64, 72)]);
    assert_eq!(store(-8), [outside(-8, 0)]);
    assert_eq!(store(4), [misaligned(4, 8)]);
    let tensor = |offset: i32| {
        faults(move |b| {
            let map = b.param_tensor_map("q", BoxShape::new(Elem::F16, &[8, 4], Swizzle::None));
            let x = b.region("x", 64, 128);
            b.tma_store(map, (0, 0), x.at(offset));
        })
    };
    assert_eq!(tensor(0), []);
    assert_eq!(tensor(16), [outside(16, 80), misaligned(16, 128)]);
}

#[test]
fn v22_mbarriers() {
    let bytes = faults(|b| {
        let x = b.region("x", 8, 8);
        b.mbarrier_arrive(x);
    });
    assert_eq!(bytes, [Fault::NoMbarrier { region: "x".to_owned() }]);
    let arrivals = faults(|b| {
        let x = b.mbarriers("x", 1, 2);
        b.mbarrier_init(x, 1);
    });
    assert_eq!(arrivals, [Fault::Arrivals { region: "x".to_owned(), given: 1, declared: 2 }]);
    let data = faults(|b| {
        let x = b.mbarriers("x", 1, 2);
        b.store(x, 7);
        _ = b.address(x);
    });
    assert_eq!(data, [Fault::DataOnMbarrier { region: "x".to_owned() }]);
    let beyond = faults(|b| {
        let x = b.mbarriers("x", 2, 2);
        b.mbarrier_arrive(x.at(16));
    });
    assert_eq!(beyond, [Fault::OutsideRegion { region: "x".to_owned(), start: 16, end: 24, size: 16 }]);
}

#[test]
fn v23_names() {
    let identifier = |name: &str| vec![Fault::Identifier { what: "parameter", name: name.to_owned() }];
    assert_eq!(faults(|b| _ = b.param_u32("größe")), identifier("größe"));
    assert_eq!(faults(|b| _ = b.param_u32("")), identifier(""));
    assert_eq!(faults(|b| _ = b.param_u32("2x")), identifier("2x"));
    for taken in ["smem", "WARP_SZ"] {
        let kernel = faults_of(32, |_| (), |kernel| kernel.name = taken.to_owned());
        assert_eq!(kernel, [Fault::Identifier { what: "kernel", name: taken.to_owned() }]);
    }
    let same = Fault::SameName { what: "parameter", name: "x".to_owned() };
    assert_eq!(faults(|b| _ = (b.param_u32("x"), b.param_f32("x"))), [same]);
}

#[test]
fn v24_tensor_maps() {
    let shape = BoxShape::new(Elem::F16, &[128, 8], Swizzle::B128);
    let error = TensorMapError::SwizzleSpan { given: 256, span: 128 };
    let fault = Fault::TensorMap { param: "q".to_owned(), error };
    assert_eq!(faults(|b| _ = b.param_tensor_map("q", shape)), [fault]);
}

/// An error states the location, the fault and the rule, with a line for each fault.
#[test]
fn an_error_reads_well() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        b.wgmma_wait(9);
        b.wgmma_wait(8);
    });
    let (file, line) = (file!(), line!() - 3);
    let fault =
        |line: u32, given: u32| format!("{file}:{line}: wgmma groups: {given} is not one of 0 to 7 (V-6)");
    let error: Box<dyn std::error::Error> = verify(&kernel).unwrap_err().into();
    assert_eq!(error.to_string(), format!("{}\n{}", fault(line, 9), fault(line + 1, 8)));
}
