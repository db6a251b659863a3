//! Pipelines whose stages warps fill by ordinary stores.

use fa3_ir::lang::*;
use fa3_ir::*;

use crate::ptxas::assemble;
use crate::rules::faults_in;
use crate::snapshot;

fn shape() -> TileShape {
    TileShape::new(Elem::E4m3, 64, 64)
}

/// Four warps store 16 rows each, and a warpgroup multiplies these rows.
fn four_warps_store() -> Kernel {
    Kernel::build("stored_pipeline", Launch::threads(256), |b| {
        let (q, pipeline) = (b.tile("q", shape()), b.stored_pipeline("v", 2, [4, 4], [("v", shape())]));
        b.init_mbarriers();
        b.role(Role::new("producer", 0..4), || {
            let mut producer = pipeline.producer();
            let (lane, warp) = (b.lane_id(), b.tid() >> 5);
            b.for_each((0, 3), 1, |_| {
                let stage = producer.acquire();
                let [tile] = stage.tiles();
                b.stmatrix(tile.element(warp * 16 + (lane & 15), (lane >> 4) * 16), [lane; 4], false);
                stage.commit_stored();
            });
        });
        b.role(Role::new("consumer", 4..8), || {
            let mut consumer = pipeline.consumer();
            b.for_each((0, 3), 1, |_| {
                let stage = consumer.wait();
                gemm(q, stage.tile().t(), Fresh).wait();
                stage.release();
            });
        });
    })
}

/// Every warp fences its stores, synchronizes its lanes, and arrives once.
#[test]
fn stores_are_fenced_before_a_slot_is_full() {
    let kernel = four_warps_store();
    snapshot("stored_pipeline.ir", &kernel.to_string());
    assert!(assemble(&kernel).is_none_or(|report| report.is_clean()));
}

/// A stage's full mbarrier expects one arrival from each warp that stores. Its empty mbarrier expects one arrival from
/// each warp that reads.
#[test]
fn a_slot_counts_warps() {
    let kernel = Kernel::build("k", Launch::threads(128), |b| {
        b.stored_pipeline("v", 3, [3, 8], [("v", shape())]);
    });
    let regions = kernel.smem.regions.iter();
    let found: Vec<_> = regions.map(|region| (region.name.as_str(), region.bytes, region.kind)).collect();
    let mbarriers = |arrivals| RegionKind::Mbarriers { arrivals };
    assert_eq!(found[..2], [("v full", 24, mbarriers(3)), ("v empty", 24, mbarriers(8))]);
}

/// V-25 finds a stage that is stored but not committed, and a stage that is committed in another block.
#[test]
fn v25_stored_slots() {
    let faults = |build: fn(&Builder, EmptyStage<'_, 1>)| {
        let kernel = Kernel::build("k", Launch::threads(128), |b| {
            let pipeline = b.stored_pipeline("v", 2, [4, 4], [("v", shape())]);
            build(b, pipeline.producer().acquire());
        });
        faults_in(&kernel)
    };
    let what = || "a stage of pipeline v is committed".to_owned();
    assert_eq!(faults(|_, stage| stage.commit_stored()), []);
    assert_eq!(faults(|_, stage| _ = stage.tiles()), [Fault::NotDone { what: what() }]);
    let in_a_branch = faults(|b, stage| b.if_uniform(b.cta_x().eq(0), || stage.commit_stored()));
    assert_eq!(in_a_branch, [Fault::DoneElsewhere { what: what() }]);
    let none = Kernel::build("k", Launch::threads(128), |b| {
        b.stored_pipeline("v", 2, [0, 4], [("v", shape())]);
        b.init_mbarriers();
    });
    let rules: Vec<_> = verify(&none).unwrap_err().iter().map(|error| error.fault.rule()).collect();
    assert_eq!(rules, ["V-6"; 2], "a warp must store, for each stage");
}
