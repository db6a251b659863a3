//! The buffers of a forward program.

use fa3_ir::BufferId;
use fa3_types::Problem;

/// (batch, seqlen_q, heads, head_dim), with strides.
pub const Q: BufferId = BufferId(0);
/// (batch, seqlen_k, heads_kv, head_dim), with strides.
pub const K: BufferId = BufferId(1);
/// (batch, seqlen_k, heads_kv, head_dim_v), with strides; or transposed, see [`fa3_types::ValueLayout`].
pub const V: BufferId = BufferId(2);
/// (batch, seqlen_q, heads, head_dim_v), with strides.
pub const O: BufferId = BufferId(3);
/// (batch, heads, seqlen_q); optional.
pub const LSE: BufferId = BufferId(4);
/// Scales of Q, K and V, see [`fa3_types::Problem::descale_shapes`], optional; of e4m3 only.
pub const DESCALES: [BufferId; 3] = [BufferId(5), BufferId(6), BufferId(7)];
/// Scales of K and V beside Q of 16 bits.
const KEY_DESCALES: [BufferId; 2] = [BufferId(5), BufferId(6)];

/// The scales of a problem's tensors that have some.
pub fn descales(problem: &Problem) -> [Option<BufferId>; 3] {
    let [k, v] = KEY_DESCALES;
    match (problem.has_scales(), problem.converts_keys()) {
        (false, _) => [None; 3],
        (true, false) => DESCALES.map(Some),
        (true, true) => [None, Some(k), Some(v)],
    }
}
/// Means of V's channels, see [`fa3_types::Problem::v_mean_shape`]; of e4m3 whose channels of V have scales only.
pub const V_MEAN: BufferId = BufferId(8);
/// The part of the queries that is multiplied by V (batch, seqlen_q, heads, head_dim_v), with strides; of problems
/// with [`fa3_types::Problem::qv`] only.
pub const QV: &str = "qv";
/// Logits of query heads in the softmax's denominator, (heads); of problems with sinks only.
pub const SINK: &str = "sink";
/// V transposed, where a kernel does that before.
pub const V_TRANSPOSED: &str = "v_transposed";
/// The pages of each sequence of K and V (sequences, pages of each); of keys in pages only.
pub const PAGE_TABLE: &str = "page_table";
/// Which row of the page table is each sequence's (sequences); of tables with other rows only.
pub const BATCH_IDX: &str = "cache_batch_idx";
/// Results of parts of units: O in f32 (slot, row of a tile, head_dim_v); where CTAs share keys. Of pieces it is
/// (piece, row of LSE, head_dim_v).
pub const O_SLOTS: &str = "o_slots";
/// Their LSE.
pub const LSE_SLOTS: &str = "lse_slots";
/// The parts to be merged of each unit, or of the one that begins in each CTA and goes on.
pub const BEGUN: &str = "begun";
/// The table of sequences; a tensor of the caller's where the plan says so.
pub const TABLE: &str = "table";
/// 32 bits from which CTAs fetch their tiles; of plans with the dynamic persistent scheduler only.
pub const TICKET: &str = "ticket";
