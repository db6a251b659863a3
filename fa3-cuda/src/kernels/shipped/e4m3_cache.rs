//! Problems over caches of e4m3 and int8.

use fa3_types::{Dtype, ProblemSpec, Sequences, Shape, TokenScales};

use super::forward::{CACHE_DIMS, MASKS, SOFTCAP};

/// Decoding with every head dimension, with 16-bit Q and e4m3 Q, and chunked prefill; with scales of heads and of
/// tokens, which int8 needs.
pub(super) fn e4m3_cache() -> impl Iterator<Item = ProblemSpec> {
    let paged = |q: Shape, rows, heads| {
        let kv = Shape { batch: 1000, seqlen: rows, heads, head_dim: q.head_dim };
        (q, kv, Sequences::paged(q.batch, 8192 / rows).used())
    };
    let decoding = CACHE_DIMS.into_iter().enumerate().map(move |(number, (head_dim, head_dim_v))| {
        let (group, rows) = [(4, 16), (8, 64), (4, 16), (16, 128), (1, 8), (3, 256)][number];
        let (q, kv, sequences) = paged(Shape { batch: 2, seqlen: 1, heads: 2 * group, head_dim }, rows, 2);
        let dtype = if number == 1 { Dtype::F16 } else { Dtype::Bf16 };
        let spec = ProblemSpec::dense(dtype, q, kv).head_dim_v(head_dim_v).e4m3_keys();
        let mut spec = spec.mask(MASKS[(number + 4) % 5]).seqs_k(sequences);
        spec.sink = number % 2 == 1;
        spec.softcap = (number % 3 == 1).then_some(SOFTCAP);
        spec
    });
    let chunk = |head_dim| Shape { batch: 2, seqlen: 4096, heads: 32, head_dim };
    let prefill = CACHE_DIMS.into_iter().zip([64, 16].into_iter().cycle()).map(
        move |((head_dim, head_dim_v), rows)| {
            let (q, kv, sequences) = paged(chunk(head_dim), rows, 8);
            let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).head_dim_v(head_dim_v).e4m3_keys();
            spec.causal().seqs_k(sequences)
        },
    );
    let dense = [(64, 256), (128, 128)].into_iter().map(move |(head_dim, head_dim_v)| {
        let q = chunk(head_dim);
        let spec = ProblemSpec::dense(Dtype::Bf16, q, Shape { heads: 8, ..q });
        spec.head_dim_v(head_dim_v).e4m3_keys().causal()
    });
    let of_e4m3 = [(64, 16), (128, 64), (256, 16), (128, 1)].into_iter().map(move |(head_dim, rows)| {
        let (q, kv, sequences) = paged(chunk(head_dim), rows, 8);
        ProblemSpec::dense(Dtype::E4m3, q, kv).causal().seqs_k(sequences)
    });
    let decoding_of_e4m3 =
        CACHE_DIMS.into_iter().zip([16, 64, 64, 1, 16, 16]).map(move |((head_dim, cols_v), rows)| {
            let (q, kv, sequences) = paged(Shape { batch: 2, seqlen: 1, heads: 8, head_dim }, rows, 2);
            ProblemSpec::dense(Dtype::E4m3, q, kv).head_dim_v(cols_v).causal().seqs_k(sequences)
        });
    let one_by_one =
        [(64, 1, 1), (128, 4096, 1), (256, 1, 12), (256, 4096, 4)].map(|(head_dim, seqlen, rows)| {
            let (q, kv, sequences) = paged(Shape { batch: 2, seqlen, heads: 32, head_dim }, rows, 8);
            ProblemSpec::dense(Dtype::Bf16, q, kv).e4m3_keys().causal().seqs_k(sequences)
        });
    let of_tokens =
        [(64, 1, 1), (128, 1, 16), (256, 1, 64), (128, 4096, 16)].map(|(head_dim, seqlen, rows)| {
            let (q, kv, sequences) = paged(Shape { batch: 2, seqlen, heads: 32, head_dim }, rows, 8);
            let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).e4m3_keys().causal().seqs_k(sequences);
            spec.token_scales(TokenScales::contiguous(kv))
        });
    let of_int8 = [(128, 1, 16), (128, 4096, 16)].map(|(head_dim, seqlen, rows)| {
        let (q, kv, sequences) = paged(Shape { batch: 2, seqlen, heads: 32, head_dim }, rows, 8);
        ProblemSpec::dense(Dtype::Bf16, q, kv).int8_keys().causal().seqs_k(sequences)
    });
    let of_16_bits = decoding.chain(prefill).chain(dense).chain(one_by_one).chain(of_tokens).chain(of_int8);
    of_16_bits.chain(of_e4m3).chain(decoding_of_e4m3)
}
