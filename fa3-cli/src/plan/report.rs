//! A plan for programs.

use fa3_sched::forward::{Cost, OrderComparison, Plan, Registers};
use serde_json::{Value, json};

/// What the text says, as numbers; makespans are in KV blocks.
pub(super) fn json(plan: &Plan, orders: Option<&OrderComparison>) -> Value {
    let (tile, schedule, Cost { blocks, masked_blocks, longest }) =
        (plan.tile(), plan.schedule(), plan.cost());
    let Registers { entry, producer, consumer } = tile.registers();
    json!({
        "problem": plan.problem().to_string(),
        "tile": {
            "name": tile.to_string(), "m": tile.tile_m, "n": tile.tile_n, "stages": tile.stages,
            "consumers": tile.consumers,
            "head_dim": tile.head_dim, "head_dim_v": tile.head_dim_v, "ping_pong": tile.ping_pong,
        },
        "order": schedule.order().to_string(),
        "scheduler": schedule.scheduler().to_string(),
        "grid": schedule.grid(),
        "threads": tile.threads(),
        "tiles": schedule.num_tiles(),
        "kv_blocks": blocks,
        "masked_kv_blocks": masked_blocks,
        "most_kv_blocks_of_a_tile": longest,
        "registers": { "entry": entry, "producer": producer, "consumer": consumer },
        "smem_bytes": tile.smem().total(),
        "workspace_bytes": schedule.workspace_bytes(),
        "makespan": orders.map(|orders| json!({
            "bound": orders.bound, "in_turn": orders.linear_in_turn, "linear": orders.linear,
            "planned": orders.planned, "longest": orders.longest_first,
        })),
    })
}
