//! The buffers of a backward program: the caller's tensors, then its workspace.

use fa3_ir::BufferId;

/// (batch, seqlen_q, heads, head_dim), with strides.
pub const Q: BufferId = BufferId(0);
/// (batch, seqlen_k, heads_kv, head_dim), with strides.
pub const K: BufferId = BufferId(1);
/// (batch, seqlen_k, heads_kv, head_dim_v), with strides.
pub const V: BufferId = BufferId(2);
/// (batch, seqlen_q, heads, head_dim_v), with strides.
pub const O: BufferId = BufferId(3);
/// (batch, heads, seqlen_q).
pub const LSE: BufferId = BufferId(4);
/// Like O, with strides of its own.
pub const DOUT: BufferId = BufferId(5);
/// Like LSE; optional.
pub const DLSE: BufferId = BufferId(6);
/// Like Q, with strides of its own. Rows of gradients may interleave in memory.
pub const DQ: BufferId = BufferId(7);
/// Like K, with strides of its own.
pub const DK: BufferId = BufferId(8);
/// Like V, with strides of its own.
pub const DV: BufferId = BufferId(9);
/// Number of the caller's tensors.
pub const OF_CALLER: usize = 10;
