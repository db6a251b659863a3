//! Plans as JSON.

use fa3_sched::backward::{self, DqBy};
use fa3_sched::forward::{
    Cost, DensePlan, OrderComparison, Plan, PlanKind, Registers, SplitKvPlan, VarlenPlan,
};
use fa3_sched::packed::Tiles;
use fa3_sched::{Schedule, Scheduler, append, cached};
use serde_json::{Value, json};

/// The numbers in a plan's text. Makespans are in KV blocks.
pub(super) fn json(plan: &Plan, tiles: &DensePlan, orders: Option<&OrderComparison>) -> Value {
    let (schedule, Cost { blocks, masked_blocks, longest }) = (tiles.schedule(), tiles.cost());
    with_cta(
        plan,
        json!({
            "order": schedule.order().to_string(),
            "grid": schedule.grid(),
            "cluster": plan.cluster(),
            "tiles": schedule.num_tiles(),
            "kv_blocks": blocks,
            "masked_kv_blocks": masked_blocks,
            "most_kv_blocks_of_a_tile": longest,
            "counter_bytes": schedule.counter_bytes(),
            "transposed_v_bytes": tiles.transposed_v_bytes(),
            "makespan": orders.map(|orders| json!({
                "bound": orders.bound, "in_turn": orders.linear_in_turn, "linear": orders.linear,
                "planned": orders.planned, "longest": orders.longest_first,
            })),
        }),
    )
}

/// Adds the numbers that every forward plan has to `numbers`.
fn with_cta(plan: &Plan, mut numbers: Value) -> Value {
    let (tile, Registers { entry, producer, consumer, .. }) = (plan.tile(), plan.registers());
    numbers["problem"] = plan.problem().to_string().into();
    numbers["tile"] = json!({
        "name": tile.to_string(), "m": tile.tile_m, "n": tile.tile_n, "stages": tile.stages,
        "consumers": tile.consumers,
        "head_dim": tile.head_dim, "head_dim_v": tile.head_dim_v, "ping_pong": tile.ping_pong,
    });
    numbers["scheduler"] = plan.scheduler().to_string().into();
    numbers["threads"] = tile.threads().into();
    numbers["registers"] = json!({ "entry": entry, "producer": producer, "consumer": consumer });
    numbers["smem_bytes"] = tile.smem().total().into();
    numbers
}

/// The numbers of a plan whose sequence lengths are data.
///
/// # Panics
/// If the plan has dense tiles.
pub(super) fn of_lengths(plan: &Plan) -> Value {
    match plan.kind() {
        PlanKind::Varlen(tiles) => varlen(plan, tiles),
        PlanKind::SplitKv(tiles) => split_kv(plan, tiles),
        PlanKind::Dense(_) => unreachable!("lengths are data"),
    }
}

/// The numbers of a plan that appends to a cache before attention.
pub(super) fn cached(plan: &cached::Plan) -> Value {
    let append = plan.append();
    let rows =
        |rows: Option<append::Rows>| rows.map(|rows| json!({ "rows": rows.rows, "ctas": rows.ctas() }));
    json!({
        "append": {
            "problem": append.problem().to_string(),
            "keys": rows(append.keys()), "values": rows(append.values()), "queries": rows(append.queries()),
            "grid": append.grid(), "threads": append::THREADS,
        },
        "attention": of_lengths(plan.forward()),
    })
}

/// The numbers of a plan whose tiles a kernel lists on the device.
fn varlen(plan: &Plan, varlen: &VarlenPlan) -> Value {
    let table = varlen.tiles().table();
    with_cta(
        plan,
        json!({
            "order": plan.order().to_string(),
            "grid": varlen.tiles().grid(),
            "sequences": table.count(),
            "most_row_blocks": table.capacity(),
            "table_bytes": 4 * table.words(),
        }),
    )
}

/// The numbers of a split-KV plan.
fn split_kv(plan: &Plan, split_kv: &SplitKvPlan) -> Value {
    with_cta(
        plan,
        json!({
            "grid": split_kv.ctas(),
            "sequences": split_kv.sequences().count(),
            "heads_of_a_tile": split_kv.pack(),
            "positions_of_a_tile": split_kv.positions(),
            "slots": split_kv.partial_dims(plan.problem())[0],
        }),
    )
}

/// The numbers of a backward plan.
pub(super) fn backward(plan: &backward::Plan) -> Value {
    let dkv = plan.dkv();
    let (stats, of_dkv, of_dq) = match plan.kind() {
        backward::PlanKind::Dense(tiles) => {
            (tiles.stats().grid(), dense_tiles(tiles.dkv()), tiles.dq().map(dense_tiles))
        }
        backward::PlanKind::Varlen(tiles) => {
            (tiles.stats_grid(), varlen_tiles(tiles.dkv()), tiles.dq().map(varlen_tiles))
        }
    };
    json!({
        "problem": plan.problem().to_string(),
        "statistics": { "grid": stats },
        "dkv": part(of_dkv, &dkv.tile, dkv.tile.threads(), dkv.tile.smem_bytes()),
        "dq": match plan.dq() {
            DqBy::Kernel(dq) => {
                of_dq.map(|of_dq| part(of_dq, &dq.tile, dq.tile.threads(), dq.tile.smem_bytes()))
            }
            DqBy::Additions => {
                let grid = plan.dense().and_then(|tiles| tiles.dq()).map_or(stats, Schedule::grid);
                Some(json!({ "added": "in any order", "grid": grid }))
            }
            DqBy::AdditionsInOrder => Some(json!({ "added": "in order" })),
        },
    })
}

/// The tiles of a kernel with matrix products, addressed by number.
fn dense_tiles(schedule: &Schedule) -> Value {
    json!({
        "order": schedule.order().to_string(),
        "scheduler": schedule.scheduler().to_string(),
        "grid": schedule.grid(),
        "tiles": schedule.num_tiles(),
    })
}

/// The tiles of a kernel with matrix products, looked up in a table.
fn varlen_tiles(tiles: &Tiles) -> Value {
    json!({
        "order": tiles.order().to_string(),
        "scheduler": Scheduler::DynamicPersistent.to_string(),
        "grid": tiles.grid(),
        "most_tiles": tiles.most(),
        "sequences": tiles.table().count(),
        "table_bytes": 4 * tiles.table().words(),
    })
}

/// Adds the tile and the CTA of a kernel with matrix products to its `tiles`.
fn part(mut tiles: Value, tile: &impl ToString, threads: u32, smem_bytes: u32) -> Value {
    tiles["tile"] = tile.to_string().into();
    tiles["threads"] = threads.into();
    tiles["smem_bytes"] = smem_bytes.into();
    tiles
}
