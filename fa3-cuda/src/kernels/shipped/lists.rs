//! Problems whose kernels find keys by lists.

use fa3_types::{Dtype, ExtraCache, ProblemSpec, Sequences, Shape};

use super::forward::with_qv;

/// Latent attention over listed rows: many tokens with whole lists, lists of two caches with lengths, and lists of rows
/// with their own scales.
pub(super) fn listed() -> impl Iterator<Item = ProblemSpec> {
    let latent = |dtype, tokens, heads, lists: Sequences| {
        let q = Shape { batch: tokens, seqlen: 1, heads, head_dim: 64 };
        let kv = Shape { batch: 4000, seqlen: 64, heads: 1, ..q };
        with_qv(ProblemSpec::dense(dtype, q, kv).head_dim_v(512)).seqs_k(lists)
    };
    let two = latent(Dtype::Bf16, 2, 16, Sequences::listed(2, 2048).used()).sink();
    let mut scaled = latent(Dtype::Bf16, 128, 128, Sequences::listed(128, 2048).used());
    scaled.v.dtype = Dtype::E4m3;
    let extra = ExtraCache { k: two.k, v: two.v, sequences: Sequences::listed(2, 512).used() };
    [
        latent(Dtype::Bf16, 4096, 128, Sequences::listed(4096, 2048)),
        latent(Dtype::Bf16, 4096, 128, Sequences::listed(4096, 2048)).max_logits(),
        latent(Dtype::F16, 128, 128, Sequences::listed(128, 2048).used()),
        two.extra(extra),
        scaled,
    ]
    .into_iter()
}
