//! Tiles, rings and fragments: what is derived, and what the builder finds wrong.

use fa3_ir::*;

use crate::ptxas::{assemble, body};

fn faults(build: impl FnOnce(&mut Builder)) -> Vec<Fault> {
    let mut b = Builder::new("k", Launch::threads(128));
    build(&mut b);
    match verify(&b.finish()) {
        Ok(()) => Vec::new(),
        Err(errors) => errors.into_iter().map(|error| error.fault).collect(),
    }
}

fn shape(rows: u32) -> TileShape {
    TileShape::new(Elem::Bf16, rows, 64)
}

#[test]
fn tiles_take_the_widest_swizzle_that_fits() {
    let swizzle = |cols| TileShape::new(Elem::F16, 8, cols).swizzle;
    assert_eq!([8, 16, 32, 64, 96, 128].map(swizzle), {
        use Swizzle::*;
        [None, B32, B64, B128, B64, B128]
    });
    let tile = TileShape::new(Elem::E4m3, 100, 256);
    assert_eq!((tile.panels(), tile.panel_cols(), tile.panel_bytes(), tile.bytes()), (2, 128, 12800, 25600));
}

/// V-25: a slot that is not given back, or in another block.
#[test]
fn v25_slots() {
    let due = |what: &str| what.to_owned();
    let forgotten = faults(|b| {
        let ring = b.ring("kv", 2, 4, [("k", shape(64))]);
        let _slot = ring.producer(b).acquire(b);
    });
    assert_eq!(forgotten, [Fault::NotDone { what: due("a slot of ring kv is committed") }]);
    let elsewhere = faults(|b| {
        let ring = b.ring("kv", 2, 4, [("k", shape(64))]);
        let slot = ring.consumer(b).wait(b);
        b.for_each((0, 4), 1, |b, _| slot.release(b));
    });
    assert_eq!(elsewhere, [Fault::DoneElsewhere { what: due("a slot of ring kv is released") }]);
    let held = faults(|b| {
        let ring = b.ring("kv", 2, 4, [("k", shape(64))]);
        let slot = ring.consumer(b).wait(b);
        let _held = slot.hold(b);
    });
    assert_eq!(held, [Fault::NotDone { what: due("the held slot of ring kv is taken") }]);
    let unsent = faults(|b| {
        let outbox = b.outboxes("out", shape(64), 1).of(b, 0);
        let _draft = outbox.acquire(b);
    });
    assert_eq!(unsent, [Fault::NotDone { what: due("a draft of outbox out is sent") }]);
}

#[test]
fn v26_products_are_waited_for() {
    let build = |wait: bool| {
        faults(move |b| {
            let (q, k) = (b.tile("q", shape(64)), b.tile("k", shape(64)));
            let s = gemm_ss(b, q, k.t(), Fresh);
            if wait {
                s.wait(b);
            }
        })
    };
    assert_eq!(build(true), []);
    assert_eq!(build(false), [Fault::NeverWaited]);
}

/// V-27: 64 x 64 times 128 x 64 needs a transpose; an accumulator has the width of the product; a map copies its tile.
#[test]
fn v27_shapes() {
    let what = |faults: Vec<Fault>| -> Vec<&'static str> {
        faults
            .into_iter()
            .filter_map(|fault| if let Fault::Shapes { what, .. } = fault { Some(what) } else { None })
            .collect()
    };
    let product = |transposed: bool, cols: u32| {
        what(faults(|b| {
            let (q, k) = (b.tile("q", shape(64)), b.tile("k", shape(128)));
            let k = if transposed { k.t() } else { k.into() };
            let mut acc = Frag::zeros(b, cols);
            gemm_ss(b, q, k, &mut acc).wait(b);
        }))
    };
    assert_eq!(product(true, 128), [""; 0]);
    assert_eq!(product(false, 128), ["a product"]);
    assert_eq!(product(true, 64), ["a product"]);
    let copy = faults(|b| {
        let (tile, map) = (b.tile("q", shape(64)), b.tile_map("q", shape(32)));
        b.once_per_role(|b| b.store_tile(tile, &map, (0, 0)));
    });
    assert_eq!(what(copy), ["a tile and its tensor map"]);
    let store = faults(|b| {
        let tile = b.tile("o", shape(64));
        Frag::zeros(b, 128).store(b, &tile);
    });
    assert_eq!(what(store), ["a fragment and its tile"]);
}

/// V-25: what a branch may leave out or a loop repeat, and nobody behind it could rely on.
#[test]
fn v25_products_and_loads_keep_their_block() {
    let elsewhere = |what: &str| Fault::DoneElsewhere { what: what.to_owned() };
    let chain = faults(|b| {
        let k = b.tile("k", shape(64));
        let mut chain = Chain::new(b, 64);
        b.for_each((0, 4), 1, |b, _| chain.gemm_ss(b, k, k.t()));
        chain.wait(b);
    });
    assert_eq!(
        chain,
        [elsewhere("the first product of a chain is begun")],
        "it would overwrite in every round"
    );
    let never = faults(|b| _ = Chain::new(b, 64).wait(b));
    assert_eq!(never, [Fault::NotDone { what: "the first product of a chain is begun".to_owned() }]);
    let branch = faults(|b| {
        let k = b.tile("k", shape(64));
        let mut o = Frag::zeros(b, 64);
        let product = gemm_ss(b, k, k.t(), &mut o);
        let cta = b.cta_x();
        let first = b.eq_b32(cta, 0);
        b.if_uniform(first, |b| _ = product.wait(b));
        o.row_max(b);
    });
    assert_eq!(branch, [elsewhere("a product is waited for")]);
    let load = faults(|b| {
        let (ring, map) = (b.ring("kv", 2, 4, [("k", shape(64))]), b.tile_map("k", shape(64)));
        let mut slot = ring.producer(b).acquire(b);
        b.for_each((0, 4), 1, |b, row| slot.load(b, 0, &map, (0, row)));
        slot.commit(b);
    });
    assert_eq!(load, [elsewhere("a tile of ring kv is loaded")], "its bytes are counted once");
}

/// V-27 and others: misuse that would be silent, or a panic, is a fault on the kernel's line.
#[test]
fn misuse_of_tiles_is_noted() {
    type Build = fn(&mut Builder);
    let rules = |build: Build| {
        let mut b = Builder::new("k", Launch::threads(128));
        build(&mut b);
        let errors = verify(&b.finish()).err().unwrap_or_default();
        let here =
            |error: &VerifyError| error.source.is_none_or(|source| source.file().ends_with("tiles.rs"));
        assert!(errors.iter().all(here), "{errors:?}");
        errors.iter().map(|error| error.fault.rule()).collect::<Vec<_>>()
    };
    let cases: [(&str, &str, Build); 16] = [
        ("narrower than its swizzle", "V-27", |b| {
            b.tile("t", TileShape::new(Elem::Bf16, 64, 32).swizzled(Swizzle::B128));
        }),
        ("rows of no whole pattern", "V-27", |b| _ = b.tile("t", shape(60))),
        ("block of rows", "V-27", |b| _ = b.tile("t", shape(64)).row_block(b, 1, 4)),
        ("block of rows beyond", "V-27", |b| _ = b.tile("t", shape(64)).row_block(b, 1, 64)),
        ("block of no rows", "V-27", |b| _ = b.tile("t", shape(64)).row_block(b, 0, 0)),
        ("block of columns", "V-27", |b| _ = b.tile("t", shape(64)).col_block(b, 32, 32)),
        ("block of columns beyond", "V-27", |b| _ = b.tile("t", shape(64)).col_block(b, 64, 64)),
        ("rows in no dimension", "V-27", |b| _ = b.tile_map_of("m", shape(64), 2, 2)),
        ("24 columns stored by 16", "V-27", |b| {
            let tile = b.tile("t", TileShape::new(Elem::Bf16, 64, 24));
            Frag::zeros(b, 24).store(b, &tile);
        }),
        ("columns from a multiple of 4", "V-27", |b| {
            let tile = b.tile("t", shape(64));
            Frag::zeros(b, 128).store_cols(b, 4, &tile);
        }),
        ("24 columns of an operand", "V-27", |b| _ = Frag::zeros(b, 24).to_a(b, WgmmaType::Bf16)),
        ("another operand's shape", "V-27", |b| {
            let [mut p, wide] = [32, 64].map(|cols| Frag::zeros(b, cols).to_a(b, WgmmaType::Bf16));
            p.set(b, &wide);
        }),
        ("a slot has no such tile", "V-5", |b| {
            let (ring, map) = (b.ring("kv", 2, 4, [("k", shape(64))]), b.tile_map("k", shape(64)));
            let mut slot = ring.producer(b).acquire(b);
            slot.load(b, 1, &map, (0, 0));
            slot.commit(b);
        }),
        ("no such outbox", "V-5", |b| _ = b.outboxes("out", shape(64), 1).of(b, 1)),
        ("no stages", "V-6", |b| _ = b.ring("kv", 0, 4, [("k", shape(64))])),
        ("an endless loop", "V-6", |b| b.for_each((0, 4), 0, |_, _| ())),
    ];
    for (what, rule, build) in cases {
        assert_eq!(rules(build), [rule], "{what}");
    }
    let half = faults(|b| {
        b.role(Role::new("one", 0..2), |_| ());
        b.role(Role::new("two", 2..4), |b| _ = b.warpgroup());
    });
    assert_eq!(half, [Fault::Warpgroup { start: 2, end: 4 }]);
    let rings = faults(|b| {
        let [k, v] = ["k", "v"].map(|name| b.ring(name, 2, 4, [("tile", shape(64))]));
        let (mut k, mut v) = (k.consumer(b), v.consumer(b));
        let slot = k.wait(b);
        let mut held = slot.hold(b);
        let slot = v.wait(b);
        held.replace(b, slot).release(b);
        held.take(b).release(b);
    });
    assert!(matches!(rings[..], [Fault::Shapes { what: "a held slot", .. }]), "{rings:?}");
}

#[test]
fn v28_roles_are_not_nested() {
    let nested = faults(|b| b.role(Role::new("one", 0..4), |b| b.role(Role::new("two", 0..4), |_| ())));
    assert!(nested.contains(&Fault::RoleInside { role: "two".to_owned() }));
}

/// Two products in flight: the first wait leaves the second, an operand's fences and groups are there once.
#[test]
fn waits_are_derived() {
    let mut b = Builder::new("k", Launch::threads(128));
    let (q, k, v) = (b.tile("q", shape(64)), b.tile("k", shape(64)), b.tile("v", shape(64)));
    let p = Frag::zeros(&mut b, 64).to_a(&mut b, WgmmaType::Bf16);
    let mut o = Frag::zeros(&mut b, 64);
    let s = gemm_ss(&mut b, q, k.t(), Fresh);
    let pv = gemm_rs(&mut b, &p, v, &mut o);
    s.wait(&mut b);
    pv.wait(&mut b);
    let lines = body(b);
    let wgmma: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("wgmma.")).collect();
    let kinds: Vec<&str> = wgmma.iter().map(|line| line.split('.').next().unwrap_or_default()).collect();
    let product = ["fence", "mma_async", "mma_async", "mma_async", "mma_async", "commit_group"];
    let [first, second] = [product; 2];
    assert_eq!(kinds, [&first[..], &second, &["wait_group"; 2]].concat());
    let waits: Vec<&str> = wgmma.iter().filter(|line| line.starts_with("wait")).copied().collect();
    assert_eq!(waits, ["wait_group.sync.aligned 1;", "wait_group.sync.aligned 0;"]);
}

/// A statement belongs to the line of the kernel that it serves, also where the floor above builds many.
#[test]
fn sources_are_the_kernels_lines() {
    let mut b = Builder::new("k", Launch::threads(128));
    let ring = b.ring("kv", 2, 4, [("k", shape(64))]);
    b.init_mbarriers();
    let mut consumer = ring.consumer(&mut b);
    let q = b.tile("q", shape(64));
    b.for_each((0, 4), 1, |b, _| {
        let slot = consumer.wait(b);
        let [k] = slot.tiles();
        let mut s = gemm_ss(b, q, k.t(), Fresh).wait(b);
        slot.release(b);
        let max = s.row_max(b);
        s.scale_rows(b, max);
        let kept = b.rows_var("max", 0.0);
        kept.set(b, max);
        kept.get(b);
    });
    fn files(block: &Block, found: &mut Vec<&'static str>) {
        for stmt in block {
            found.push(stmt.source.file());
            match &stmt.node {
                Node::If { then, otherwise, .. } => {
                    [then, otherwise].into_iter().for_each(|b| files(b, found))
                }
                Node::Loop { body } => files(body, found),
                Node::Inst { .. } | Node::Break { .. } => {}
            }
        }
    }
    let mut found = Vec::new();
    files(&b.finish().prologue, &mut found);
    assert!(found.len() > 100);
    let elsewhere: Vec<&&str> = found.iter().filter(|file| !file.ends_with("tiles.rs")).collect();
    assert_eq!(elsewhere, [&""; 0]);
}

/// Two products with a softmax between them, in every type and width that A and B may have, without spills or
/// serialised products.
#[test]
fn fragments_become_operands() {
    for (elem, ty) in
        [(Elem::F16, WgmmaType::F16), (Elem::Bf16, WgmmaType::Bf16), (Elem::E4m3, WgmmaType::E4m3)]
    {
        let mut b = Builder::new("k", Launch::threads(128));
        let d = 128 / elem.bytes();
        let (q, k) = (b.tile("q", TileShape::new(elem, 64, d)), b.tile("k", TileShape::new(elem, 128, d)));
        let v = b.tile("v", TileShape::new(elem, 64, 128));
        let out = b.tile("o", TileShape::new(Elem::F32, 64, 64));
        let mut s = gemm_ss(&mut b, q, k.t(), Fresh).wait(&mut b);
        let max = s.row_max(&mut b);
        s.map(&mut b, |b, x, at| {
            let shifted = b.sub(x, max.0[at.half as usize]);
            b.ex2(shifted)
        });
        let p = s.to_a(&mut b, ty);
        assert_eq!(p.cols(), 128);
        let o = gemm_rs(&mut b, &p, v.t(), Fresh).wait(&mut b);
        o.store(&mut b, &out);
        if let Some(report) = assemble(&b.finish()) {
            assert!(report.spills_nothing());
        }
    }
}
