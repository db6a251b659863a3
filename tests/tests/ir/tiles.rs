//! Tiles, pipelines and fragments: the instructions that they derive, and the faults that the builder finds.

use fa3_ir::lang::*;
use fa3_ir::*;

use crate::ptxas::{assemble, body};
use crate::rules::{faults, faults_in};

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

/// V-25 finds a stage that is not released, and a stage that is released in another block.
#[test]
fn v25_slots() {
    let due = |what: &str| what.to_owned();
    let forgotten = faults(|b| {
        let pipeline = b.pipeline("kv", 2, 4, [("k", shape(64))]);
        let _stage = pipeline.producer().acquire();
    });
    assert_eq!(forgotten, [Fault::NotDone { what: due("a stage of pipeline kv is committed") }]);
    let elsewhere = faults(|b| {
        let pipeline = b.pipeline("kv", 2, 4, [("k", shape(64))]);
        let stage = pipeline.consumer().wait();
        b.for_each((0, 4), 1, |_| stage.release());
    });
    assert_eq!(elsewhere, [Fault::DoneElsewhere { what: due("a stage of pipeline kv is released") }]);
    let held = faults(|b| {
        let pipeline = b.pipeline("kv", 2, 4, [("k", shape(64))]);
        let stage = pipeline.consumer().wait();
        let _held = stage.hold();
    });
    assert_eq!(held, [Fault::NotDone { what: due("a stage of pipeline kv is released") }]);
    let unstored = faults(|b| {
        let staging_buffer = b.staging_buffers("out", shape(64), 1).of(0);
        let _staged = staging_buffer.acquire();
    });
    assert_eq!(unstored, [Fault::NotDone { what: due("a staged tile of staging buffer out is stored") }]);
}

/// V-25 has two messages, and both occur.
#[test]
fn v25_says_what_is_never_done() {
    let what = "a stage of pipeline kv is committed".to_owned();
    let never = Fault::NotDone { what: what.clone() }.to_string();
    assert_eq!(never, "a stage of pipeline kv is never committed");
    let elsewhere = Fault::DoneElsewhere { what }.to_string();
    assert_eq!(
        elsewhere,
        "a stage of pipeline kv is committed, but in another block than where it became due"
    );
}

/// V-29 counts the warps that release a pipeline's stages over all roles.
#[test]
fn v29_rings_are_released_by_the_warps_they_are_declared_for() {
    let build = |declared: u32, consumers: u32, branch: bool| {
        let launch = Launch::threads(32 * (1 + consumers));
        let kernel = Kernel::build("pipeline", launch, |b| {
            let map = b.tile_map("k", shape(64));
            let pipeline = b.pipeline("kv", 2, declared, [("k", shape(64))]);
            b.init_mbarriers();
            b.role(Role::new("producer", 0..1), || {
                b.once_per_role(|| {
                    let mut producer = pipeline.producer();
                    let mut stage = producer.acquire();
                    stage.load(0, &map, (0, 0));
                    stage.commit();
                });
            });
            for warp in 1..=consumers {
                b.role(Role::new(&format!("consumer{warp}"), warp..warp + 1), || {
                    let mut consumer = pipeline.consumer();
                    let mut read = || consumer.wait().release();
                    if branch { b.if_uniform(b.tid().ge(64), read) } else { read() }
                });
            }
        });
        faults_in(&kernel)
    };
    let wrong = |declared, given| [Fault::PipelineWarps { pipeline: "kv".to_owned(), declared, given }];
    assert_eq!(build(3, 3, false), []);
    assert_eq!(build(3, 4, false), wrong(3, 4));
    assert_eq!(build(4, 3, false), wrong(4, 3));
    assert_eq!(build(1, 2, true), [], "only the simulator can tell which warps take a branch");
}

#[test]
fn v26_products_are_waited_for() {
    let build = |wait: bool| {
        faults(move |b| {
            let (q, k) = (b.tile("q", shape(64)), b.tile("k", shape(64)));
            let s = gemm(q, k.t(), Fresh);
            if wait {
                s.wait();
            }
        })
    };
    assert_eq!(build(true), []);
    assert_eq!(build(false), [Fault::NeverWaited]);
}

/// V-27: 64 x 64 times 128 x 64 needs a transpose, an accumulator needs the product's width, and a tensor map copies
/// only tiles of its own shape.
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
            gemm(q, k, &mut acc).wait();
        }))
    };
    assert_eq!(product(true, 128), [""; 0]);
    assert_eq!(product(false, 128), ["a product"]);
    assert_eq!(product(true, 64), ["a product"]);
    let copy = faults(|b| {
        let (tile, map) = (b.tile("q", shape(64)), b.tile_map("q", shape(32)));
        b.once_per_role(|| b.store_tile(tile, &map, (0, 0)));
    });
    assert_eq!(what(copy), ["a tile and its tensor map"]);
    let store = faults(|b| {
        let tile = b.tile("o", shape(64));
        Frag::zeros(b, 128).store(tile);
    });
    assert_eq!(what(store), ["a fragment and its tile"]);
}

/// V-25: a branch may skip an operation and a loop may repeat it, so no operation outside of the block may rely on it.
#[test]
fn v25_products_and_loads_keep_their_block() {
    let elsewhere = |what: &str| Fault::DoneElsewhere { what: what.to_owned() };
    let chain = faults(|b| {
        let k = b.tile("k", shape(64));
        let mut chain = Chain::new(b, 64);
        b.for_each((0, 4), 1, |_| chain.gemm(k, k.t()));
        chain.wait();
    });
    assert_eq!(
        chain,
        [elsewhere("the first product of a chain is begun")],
        "it would overwrite in every round"
    );
    let never = faults(|b| _ = Chain::new(b, 64).wait());
    assert_eq!(never, [Fault::NotDone { what: "the first product of a chain is begun".to_owned() }]);
    let branch = faults(|b| {
        let k = b.tile("k", shape(64));
        let mut o = Frag::zeros(b, 64);
        let product = gemm(k, k.t(), &mut o);
        b.if_uniform(b.cta_x().eq(0), || _ = product.wait());
        o.row_max();
    });
    assert_eq!(branch, [elsewhere("a product is waited for")]);
    let load = faults(|b| {
        let (pipeline, map) = (b.pipeline("kv", 2, 4, [("k", shape(64))]), b.tile_map("k", shape(64)));
        let mut stage = pipeline.producer().acquire();
        b.for_each((0, 4), 1, |row| stage.load(0, &map, (0, row)));
        stage.commit();
    });
    assert_eq!(load, [elsewhere("a tile of pipeline kv is loaded")], "its bytes are counted once");
}

/// Misuse of tiles is a fault on the kernel's line (V-27 and others). Otherwise it would be silent or panic.
#[test]
fn misuse_of_tiles_is_noted() {
    type Build = fn(&Builder);
    let rules = |build: Build| {
        let errors = verify(&Kernel::build("k", Launch::threads(128), build)).err().unwrap_or_default();
        let here =
            |error: &VerifyError| error.source.is_none_or(|source| source.file().ends_with("tiles.rs"));
        assert!(errors.iter().all(here), "{errors:?}");
        errors.iter().map(|error| error.fault.rule()).collect::<Vec<_>>()
    };
    let cases: [(&str, &str, Build); 32] = [
        ("narrower than its swizzle", "V-27", |b| {
            b.tile("t", TileShape::new(Elem::Bf16, 64, 32).swizzled(Swizzle::B128));
        }),
        ("rows of no whole pattern", "V-27", |b| _ = b.tile("t", shape(60))),
        ("block of rows", "V-27", |b| _ = b.tile("t", shape(64)).row_block(1, 4)),
        ("block of rows beyond", "V-27", |b| _ = b.tile("t", shape(64)).row_block(1, 64)),
        ("block of no rows", "V-27", |b| _ = b.tile("t", shape(64)).row_block(0, 0)),
        ("block of columns", "V-27", |b| _ = b.tile("t", shape(64)).col_block(32, 32)),
        ("block of columns beyond", "V-27", |b| _ = b.tile("t", shape(64)).col_block(64, 64)),
        ("numbered blocks of half a panel", "V-27", |b| {
            _ = b.tile("t", shape(64)).nth_col_block(b.cta_x(), 32);
        }),
        ("numbered blocks of no columns", "V-27", |b| _ = b.tile("t", shape(64)).nth_col_block(b.cta_x(), 0)),
        ("numbered blocks that are too wide", "V-27", |b| {
            _ = b.tile("t", shape(64)).nth_col_block(b.cta_x(), 128);
        }),
        ("rows from a multiple of 4", "V-27", |b| _ = b.tile("t", shape(64)).rows(4, 8)),
        ("rows beyond", "V-27", |b| _ = b.tile("t", shape(64)).rows(u32::MAX - 7, 16)),
        ("an element 4 rows away", "V-27", |b| _ = b.tile("t", shape(64)).elements(0, 0).at(4, 0)),
        ("an element half a chunk away", "V-27", |b| _ = b.tile("t", shape(64)).elements(0, 0).at(0, 4)),
        ("an element beyond the rows", "V-27", |b| _ = b.tile("t", shape(64)).elements(0, 0).at(64, 0)),
        ("an element beyond the columns", "V-27", |b| {
            _ = b.tile("t", shape(64)).elements(0, 0).at(0, u32::MAX - 7);
        }),
        ("a stage beyond the stages", "V-5", |b| _ = b.pipeline("kv", 2, 4, [("k", shape(64))]).tiles_of(2)),
        ("split within 8 columns", "V-27", |b| _ = Frag::zeros(b, 16).split_at(4)),
        ("rows in no dimension", "V-27", |b| _ = b.tile_map_of("m", shape(64), 2, 2)),
        ("24 columns stored by 16", "V-27", |b| {
            let tile = b.tile("t", TileShape::new(Elem::Bf16, 64, 24));
            Frag::zeros(b, 24).store(tile);
        }),
        ("columns from a multiple of 4", "V-27", |b| {
            let tile = b.tile("t", shape(64));
            Frag::zeros(b, 128).store_cols(4, tile);
        }),
        ("24 columns of an operand", "V-27", |b| _ = Frag::zeros(b, 24).to_a(WgmmaType::Bf16)),
        ("another operand's shape", "V-27", |b| {
            let [mut p, wide] = [32, 64].map(|cols| Frag::zeros(b, cols).to_a(WgmmaType::Bf16));
            p.set(&wide);
        }),
        ("rows of an operand of 8 bits", "V-27", |b| {
            Frag::zeros(b, 64).to_a(WgmmaType::E4m3).scale_rows(Rows([b.copy(2.0); 2]));
        }),
        ("24 columns interleaved by 16", "V-27", |b| _ = Frag::zeros(b, 24).interleaved()),
        ("columns beyond", "V-27", |b| add_columns(b, 16, 24)),
        ("columns from a multiple of 4", "V-27", |b| add_columns(b, 4, 8)),
        ("columns from far beyond", "V-27", |b| add_columns(b, u32::MAX - 7, 8)),
        ("a stage has no such tile", "V-5", |b| {
            let (pipeline, map) = (b.pipeline("kv", 2, 4, [("k", shape(64))]), b.tile_map("k", shape(64)));
            let mut stage = pipeline.producer().acquire();
            stage.load(1, &map, (0, 0));
            stage.commit();
        }),
        ("no such staging buffer", "V-5", |b| _ = b.staging_buffers("out", shape(64), 1).of(1)),
        ("no stages", "V-6", |b| _ = b.pipeline("kv", 0, 4, [("k", shape(64))])),
        ("an endless loop", "V-6", |b| b.for_each((0, 4), 0, |_| ())),
    ];
    for (what, rule, build) in cases {
        assert_eq!(rules(build), [rule], "{what}");
    }
    let half = faults(|b| {
        b.role(Role::new("one", 0..2), || ());
        b.role(Role::new("two", 2..4), || _ = b.warpgroup());
    });
    assert_eq!(half, [Fault::Warpgroup { start: 2, end: 4 }]);
    let pipelines = faults(|b| {
        let [k, v] = ["k", "v"].map(|name| b.pipeline(name, 2, 4, [("tile", shape(64))]));
        let (mut k, mut v) = (k.consumer(), v.consumer());
        let stage = k.wait();
        let mut held = stage.hold();
        let stage = v.wait();
        held.replace(stage);
        held.release();
    });
    assert!(matches!(pipelines[..], [Fault::Shapes { what: "a held stage", .. }]), "{pipelines:?}");
}

#[test]
fn v28_roles_are_not_nested() {
    let nested = faults(|b| b.role(Role::new("one", 0..4), || b.role(Role::new("two", 0..4), || ())));
    assert!(nested.contains(&Fault::RoleInside { role: "two".to_owned() }));
}

/// Two products are in flight: the first wait leaves the second one pending, and each operand has one fence and one
/// group.
#[test]
fn waits_are_derived() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        let (q, k, v) = (b.tile("q", shape(64)), b.tile("k", shape(64)), b.tile("v", shape(64)));
        let p = Frag::zeros(b, 64).to_a(WgmmaType::Bf16);
        let mut o = Frag::zeros(b, 64);
        let s = gemm(q, k.t(), Fresh);
        let pv = gemm(&p, v, &mut o);
        s.wait();
        pv.wait();
    });
    let lines = body(&kernel);
    let wgmma: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("wgmma.")).collect();
    let kinds: Vec<&str> = wgmma.iter().map(|line| line.split('.').next().unwrap_or_default()).collect();
    let product = ["fence", "mma_async", "mma_async", "mma_async", "mma_async", "commit_group"];
    let [first, second] = [product; 2];
    assert_eq!(kinds, [&first[..], &second, &["wait_group"; 2]].concat());
    let waits: Vec<&str> = wgmma.iter().filter(|line| line.starts_with("wait")).copied().collect();
    assert_eq!(waits, ["wait_group.sync.aligned 1;", "wait_group.sync.aligned 0;"]);
}

/// Two products with a softmax between them have no spills or serialization, in every type and width of A and B.
#[test]
fn fragments_become_operands() {
    for (elem, ty) in
        [(Elem::F16, WgmmaType::F16), (Elem::Bf16, WgmmaType::Bf16), (Elem::E4m3, WgmmaType::E4m3)]
    {
        let kernel = Kernel::build("k", Launch::threads(128), |b| {
            let d = 128 / elem.bytes();
            let (q, k) =
                (b.tile("q", TileShape::new(elem, 64, d)), b.tile("k", TileShape::new(elem, 128, d)));
            let v = b.tile("v", TileShape::new(elem, 64, 128));
            let out = b.tile("o", TileShape::new(Elem::F32, 64, 64));
            let mut s = gemm(q, k.t(), Fresh).wait();
            let max = s.row_max();
            s.map_in_place(|x, at| (x - max[at]).ex2());
            let p = s.to_a(ty);
            assert_eq!(p.cols(), 128);
            let o = gemm(&p, v.t(), Fresh).wait();
            o.store(out);
        });
        assert!(assemble(&kernel).is_none_or(|report| report.is_clean()));
    }
}

/// Adds a fragment of `cols` columns to a fragment of 32 columns, from column `first` on.
fn add_columns(b: &Builder, first: u32, cols: u32) {
    let rows = Rows([b.copy(0.5), b.copy(2.0)]);
    Frag::zeros(b, 32).scale_rows_and_add(first, rows, &Frag::zeros(b, cols));
}

/// Each element takes one instruction, which scales the element and adds it. The factors of the upper and the lower row
/// differ.
#[test]
fn rows_are_scaled_and_added_to() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        let (mut o, pv) = (Frag::zeros(b, 32), Frag::zeros(b, 16));
        o.scale_rows_and_add(8, Rows([b.copy(0.5), b.copy(2.0)]), &pv);
    });
    let text = kernel.to_string();
    let fma = text.lines().filter_map(|line| line.trim().strip_prefix("fma.rn.f32 "));
    let sources: Vec<String> =
        fma.map(|line| line.split_whitespace().skip(2).take(2).collect::<Vec<_>>().join(" ")).collect();
    // O has the registers 0 to 15, and PV 16 to 23.
    let rows = ["f24,", "f24,", "f25,", "f25,"].into_iter().cycle();
    let expected: Vec<String> = rows.zip(16..24).map(|(row, pv)| format!("{row} acc.{pv}")).collect();
    assert_eq!(sources, expected);
    let sets = text
        .lines()
        .skip_while(|line| !line.contains("fma"))
        .filter_map(|line| line.trim().strip_prefix("mov.f32 acc.")?.split(',').next()?.parse::<u32>().ok());
    assert_eq!(sets.collect::<Vec<_>>(), (4..12).collect::<Vec<_>>());
}

/// Interleaving renames a fragment's columns: it moves no register and adds no instruction.
#[test]
fn interleaved_columns() {
    let kernel = |interleave: bool| {
        Kernel::build("k", Launch::threads(128), |b| {
            let frag = Frag::zeros(b, 32);
            let before: Vec<(At, String)> =
                frag.elements().map(|(at, register)| (at, format!("{register:?}"))).collect();
            if !interleave {
                return;
            }
            let mut order = [u32::MAX; 32];
            for (at, register) in frag.interleaved().elements() {
                let (old, _) = before.iter().find(|(_, other)| *other == format!("{register:?}")).unwrap();
                assert_eq!(old.half, at.half);
                (0..4).for_each(|thread| order[(at.col + 2 * thread) as usize] = old.col + 2 * thread);
            }
            let sixteen = [0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15];
            assert_eq!(order[..16], sixteen);
            assert_eq!(order[16..], sixteen.map(|col| 16 + col));
        })
    };
    assert_eq!(kernel(true), kernel(false));
}
