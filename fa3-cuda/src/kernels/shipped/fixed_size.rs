//! Problems with splits of a fixed size, with which a row has the same bits in any batch.

use fa3_sched::forward::{PlanOptions, SplitKeys};
use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape, TensorDesc};

/// Problems whose splits leave partial results, and problems whose splits CTAs merge, with the options of their plans.
pub(super) fn fixed_size() -> impl Iterator<Item = (ProblemSpec, PlanOptions)> {
    let in_pieces = PlanOptions::default().split_keys(SplitKeys::FixedSize { keys: 1024 });
    let q = |heads, head_dim| Shape { batch: 2, seqlen: 1, heads, head_dim };
    let over_pages = |dtype, heads, head_dim| {
        let kv = Shape { batch: 1000, seqlen: 16, heads: 8, head_dim };
        ProblemSpec::dense(dtype, q(heads, head_dim), kv).seqs_k(Sequences::paged(2, 512).used())
    };
    let mut packed = over_pages(Dtype::Bf16, 32, 128).causal().seqs_q(Sequences::packed(2));
    for x in [&mut packed.q, &mut packed.o] {
        *x = TensorDesc::contiguous(x.dtype, Shape { batch: 1, seqlen: 2, ..x.shape });
    }
    let wide = Mask::window(Some(2000), Some(0));
    // Drafts over pages, and prompts and training rows, with O of the pieces before in each of its places.
    let merging = PlanOptions::default().split_keys(SplitKeys::Fixed).split_bytes(0);
    let trained = |head_dim| {
        let rows = |heads| Shape { batch: 1, seqlen: 8192, heads, head_dim };
        ProblemSpec::dense(Dtype::Bf16, rows(32), rows(8)).causal()
    };
    let in_pack = |spec: ProblemSpec| spec.seqs_q(Sequences::packed(2)).seqs_k(Sequences::packed(2));
    let prompt = ProblemSpec::dense(
        Dtype::Bf16,
        Shape { batch: 2, seqlen: 512, heads: 32, head_dim: 128 },
        Shape { batch: 1000, seqlen: 16, heads: 8, head_dim: 128 },
    );
    let prompt = prompt.mask(wide).seqs_k(Sequences::paged(2, 512).used());
    let merged = [
        packed.clone(),
        trained(64),
        in_pack(trained(128)),
        in_pack(trained(256)).sink(),
        prompt.clone().e4m3_keys(),
        prompt,
    ];
    let pieces = [
        over_pages(Dtype::Bf16, 32, 128),
        packed,
        over_pages(Dtype::F16, 64, 64).mask(wide).sink(),
        over_pages(Dtype::Bf16, 16, 512),
    ];
    let pieces = pieces.into_iter().map(move |spec| (spec, in_pieces));
    pieces.chain(merged.into_iter().map(move |spec| (spec, merging)))
}
