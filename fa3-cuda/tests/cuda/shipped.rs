//! The list of shipped kernels.

use std::collections::{HashMap, HashSet};

use fa3_cuda::kernels::shipped::shipped;
use fa3_sched::forward::{CtaTile, TileRow};

#[test]
fn names_are_unique() {
    let mut names = HashMap::new();
    for shipped in shipped() {
        let twin = names.insert(shipped.name.clone(), shipped.clone());
        assert!(twin.is_none(), "{twin:?} and {shipped:?}");
    }
    let has = |name: &str| assert!(names.contains_key(name), "{name} is not among {:?}", names.keys());
    has("ladder/gemm/f16");
    has("bwd/dkv/bf16/d128/128x64x2x1/left/dynamic/adds-dq");
    has("packed/packed/dense-used/window/128");
    has("combine/f32-bf16/d128/8x8");
    has("append/bf16/d128/packed/pages/half-split/q");
    has("fwd/bf16/d128/128x128x3/causal/dynamic");
    has("fwd/bf16/d128/192x80x3/none/static/two-stage/no-producer");
    has("fwd/e4m3/d128/128x128x2/causal/static");
    has("fwd/e4m3/d256/128x128x2/none/static/serial");
}

#[test]
fn every_row_of_the_tile_table_is_shipped() {
    let shipped: HashSet<CtaTile> =
        shipped().filter_map(|shipped| shipped.forward().map(|spec| spec.tile)).collect();
    for row in TileRow::table() {
        assert!(shipped.contains(&row.tile), "{}", row.tile);
    }
}
