//! A plan for programs.

use fa3_sched::Schedule;
use fa3_sched::backward::{self, DqBy};
use fa3_sched::forward::{Cost, CtaTile, Listed, Numbered, OrderComparison, Plan, Registers};
use serde_json::{Value, json};

/// The numbers of the text; makespans are in KV blocks.
pub(super) fn json(plan: &Plan, tiles: &Numbered, orders: Option<&OrderComparison>) -> Value {
    let (tile, schedule, Cost { blocks, masked_blocks, longest }) =
        (plan.tile(), tiles.schedule(), tiles.cost());
    let Registers { entry, producer, consumer } = tile.registers();
    json!({
        "problem": plan.problem().to_string(),
        "tile": json_tile(&tile),
        "order": schedule.order().to_string(),
        "scheduler": schedule.scheduler().to_string(),
        "grid": schedule.grid(),
        "cluster": plan.cluster(),
        "threads": tile.threads(),
        "tiles": schedule.num_tiles(),
        "kv_blocks": blocks,
        "masked_kv_blocks": masked_blocks,
        "most_kv_blocks_of_a_tile": longest,
        "registers": { "entry": entry, "producer": producer, "consumer": consumer },
        "smem_bytes": tile.smem().total(),
        "counter_bytes": schedule.counter_bytes(),
        "transposed_v_bytes": tiles.transposed_v_bytes(),
        "makespan": orders.map(|orders| json!({
            "bound": orders.bound, "in_turn": orders.linear_in_turn, "linear": orders.linear,
            "planned": orders.planned, "longest": orders.longest_first,
        })),
    })
}

/// The numbers of a plan whose sequences a kernel lists.
pub(super) fn listed(plan: &Plan, listed: &Listed) -> Value {
    let (tile, table) = (plan.tile(), listed.table());
    let Registers { entry, producer, consumer } = tile.registers();
    json!({
        "problem": plan.problem().to_string(),
        "tile": json_tile(&tile),
        "order": plan.order().to_string(),
        "scheduler": plan.scheduler().to_string(),
        "grid": listed.grid(),
        "threads": tile.threads(),
        "sequences": table.count(),
        "most_row_blocks": table.capacity(),
        "table_bytes": 4 * table.words(),
        "registers": { "entry": entry, "producer": producer, "consumer": consumer },
        "smem_bytes": tile.smem().total(),
    })
}

fn json_tile(tile: &CtaTile) -> Value {
    json!({
        "name": tile.to_string(), "m": tile.tile_m, "n": tile.tile_n, "stages": tile.stages,
        "consumers": tile.consumers,
        "head_dim": tile.head_dim, "head_dim_v": tile.head_dim_v, "ping_pong": tile.ping_pong,
    })
}

/// The numbers of a backward plan.
pub(super) fn backward(plan: &backward::Plan) -> Value {
    let dkv = plan.dkv();
    json!({
        "problem": plan.problem().to_string(),
        "statistics": { "grid": plan.stats().grid() },
        "dkv": part(&dkv.tile, dkv.tile.threads(), dkv.tile.smem_bytes(), &dkv.schedule),
        "dq": match plan.dq() {
            DqBy::Kernel(dq) => part(&dq.tile, dq.tile.threads(), dq.tile.smem_bytes(), &dq.schedule),
            DqBy::Additions(rounded) => json!({ "added": "in any order", "grid": rounded.grid() }),
            DqBy::AdditionsInOrder => json!({ "added": "in order" }),
        },
    })
}

/// A kernel with products.
fn part(tile: &impl ToString, threads: u32, smem_bytes: u32, schedule: &Schedule) -> Value {
    json!({
        "tile": tile.to_string(),
        "order": schedule.order().to_string(),
        "scheduler": schedule.scheduler().to_string(),
        "grid": schedule.grid(),
        "threads": threads,
        "tiles": schedule.num_tiles(),
        "smem_bytes": smem_bytes,
    })
}
