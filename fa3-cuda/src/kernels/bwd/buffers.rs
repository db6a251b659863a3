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
/// (batch, seqlen_q, heads, head_dim_v), with strides.
pub const DOUT: BufferId = BufferId(5);
/// (batch, heads, seqlen_q); optional.
pub const DLSE: BufferId = BufferId(6);
/// (batch, seqlen_q, heads, head_dim), with strides. Rows of the three gradients may interleave in memory.
pub const DQ: BufferId = BufferId(7);
/// (batch, seqlen_k, heads_kv, head_dim), with strides.
pub const DK: BufferId = BufferId(8);
/// (batch, seqlen_k, heads_kv, head_dim_v), with strides.
pub const DV: BufferId = BufferId(9);
/// Number of the caller's tensors.
pub const OF_CALLER: usize = 10;
