//! Problems whose queries see keys of their own chunk.

use fa3_types::{Dtype, Mask, ProblemSpec, Sequences, Shape};

use super::forward::{MANY_HEADS, problem};

/// Problems with chunked attention, as in Llama 4: training, prefill, decoding, and e4m3.
pub(super) fn chunks() -> impl Iterator<Item = ProblemSpec> {
    let (packed, pages) = (Sequences::packed(2).longest(4096), Sequences::paged(2, 512).used());
    let shape = |batch, seqlen, heads| Shape { batch, seqlen, heads, head_dim: 128 };
    let over_pages =
        |rows| ProblemSpec::dense(Dtype::Bf16, shape(2, rows, 40), shape(1000, 64, 8)).seqs_k(pages);
    let dense = |dtype, head_dim| problem(dtype, (8192, 8192), MANY_HEADS, head_dim);
    let specs = [
        dense(Dtype::Bf16, 64),
        dense(Dtype::Bf16, 128),
        dense(Dtype::F16, 256),
        dense(Dtype::E4m3, 128),
        dense(Dtype::Bf16, 128).seqs_q(packed).seqs_k(packed),
        over_pages(1),
        over_pages(512),
    ];
    let chunks = Mask::from_chunk(4096).expect("it is a size");
    specs.into_iter().map(move |spec| spec.causal().mask(chunks))
}
