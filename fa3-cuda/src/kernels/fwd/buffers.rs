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
/// Scales of Q, K and V (see [`fa3_types::Problem::descale_shapes`]): optional inputs, only in e4m3 problems.
pub const DESCALES: [BufferId; 3] = [BufferId(5), BufferId(6), BufferId(7)];
/// Scales of e4m3 K and V, where Q has 16 bits.
const KEY_DESCALES: [BufferId; 2] = [BufferId(5), BufferId(6)];

/// The buffers of the scales of Q, K and V; `None` for a tensor without scales.
pub fn descales(problem: &Problem) -> [Option<BufferId>; 3] {
    let [k, v] = KEY_DESCALES;
    match (problem.has_scales(), problem.converts_keys()) {
        (false, _) => [None; 3],
        (true, false) => DESCALES.map(Some),
        (true, true) => [None, Some(k), Some(v)],
    }
}
/// Means of V's channels (see [`fa3_types::Problem::v_mean_shape`]), only if the channels of e4m3 V have scales.
pub const V_MEAN: BufferId = BufferId(8);
/// The part of the queries that is multiplied by V (batch, seqlen_q, heads, head_dim_v), with strides; only with
/// [`fa3_types::Problem::qv`].
pub const QV: &str = "qv";
/// Sink logits of query heads (heads), which count in the softmax's denominator; only in problems with sinks.
pub const SINK: &str = "sink";
/// The largest score of each row, in the shape of LSE; only in problems with max_logits.
pub const MAX_LOGITS: &str = "max_logits";
/// V transposed, where a step before the attention kernel transposes it.
pub const V_TRANSPOSED: &str = "v_transposed";
/// The page table of K and V (sequences, pages of each sequence); only for a paged cache.
pub const PAGE_TABLE: &str = "page_table";
/// cache_batch_idx: the page-table row of each sequence (sequences); only with an indirect page table.
pub const BATCH_IDX: &str = "cache_batch_idx";
/// Lists of keys (sequences, keys), with a stride between lists; only if keys are listed.
pub const INDICES: &str = "indices";
/// The scales of K's rows ([`Problem::token_scales`]), with strides; only if tokens have scales.
pub const K_SCALES: &str = "k_scales";
/// The scales of V's rows ([`Problem::v_scales`] or [`Problem::token_scales`]), with strides; only if rows have their
/// own ones.
pub const V_SCALES: &str = "v_scales";
/// The second cache, with its lists and their lengths; only if there is one.
pub const EXTRA_K: &str = "extra_k";
/// V of the second cache.
pub const EXTRA_V: &str = "extra_v";
/// Lists of rows of the second cache (sequences, keys), with a stride between lists.
pub const EXTRA_INDICES: &str = "extra_indices";
/// Numbers of entries that count of each list of the second cache (sequences); only if they are given.
pub const EXTRA_SEQUSED: &str = "extra_seqused_k";
/// O of splits in f32, before the split-KV reduction: (split, row of a tile, head_dim_v). For splits of fixed size:
/// (split, row of LSE, head_dim_v).
pub const O_PARTIAL: &str = "o_partial";
/// LSE of splits, in the shape of their O without its columns.
pub const LSE_PARTIAL: &str = "lse_partial";
/// Largest scores of splits, in the shape of their LSE; only in problems with max_logits.
pub const MAX_LOGITS_PARTIAL: &str = "max_logits_partial";
/// O in f32 of the pieces of a tile so far, for each CTA, where consumers merge pieces and keep it in memory.
pub const RUNNING_O: &str = "running_o";
/// Reduction messages: one for each split work unit, or one for each CTA, about the unit that begins in the CTA and
/// that other CTAs continue.
pub const BEGUN: &str = "begun";
/// The table of sequences: scratch, or an input if the plan says that the caller gives it.
pub const TABLE: &str = "table";
/// The tile counter, from which CTAs fetch work tiles; only with the dynamic persistent scheduler.
pub const TILE_COUNTER: &str = "tile_counter";
