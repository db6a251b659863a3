//! Wide problems over caches.

use fa3_types::{Dtype, Intervals, IntervalsOfRow, LseForm, Mask, ProblemSpec, Sequences, Shape};

use super::forward::with_qv;

/// Wide problems over caches: decoding and chunked prefill, in pages that are copied in blocks of rows or row by row,
/// and in e4m3. Then such problems in 16 bits under masks of intervals.
pub(super) fn wide_cache() -> impl Iterator<Item = ProblemSpec> {
    let over_pages = |rows, heads, dims: (usize, usize), page| {
        let q = Shape { batch: 2, seqlen: rows, heads, head_dim: dims.0 };
        let kv = Shape { batch: 8192 / page, seqlen: page, heads: 2, ..q };
        let spec = ProblemSpec::dense(Dtype::Bf16, q, kv).head_dim_v(dims.1).causal();
        spec.seqs_k(Sequences::paged(2, 4096 / page).used())
    };
    let of_flash_mla = LseForm { base_two: false, without_sink: true, empty_is_infinite: true };
    let latent = |rows, heads, cols_v, page| with_qv(over_pages(rows, heads, (64, cols_v), page));
    let of_16_bits = [
        over_pages(1, 8, (512, 512), 64),
        over_pages(1, 8, (320, 320), 16).sink(),
        over_pages(1, 32, (576, 512), 1),
        over_pages(2048, 8, (512, 512), 64),
        latent(1, 256, 512, 64),
        latent(2, 32, 512, 1),
        latent(1, 32, 256, 64),
        latent(2048, 32, 512, 64),
    ];
    let of_e4m3 = of_16_bits.clone().into_iter().filter(|spec| spec.k.shape.head_dim <= 512).enumerate();
    let of_e4m3 = of_e4m3.map(|(number, mut spec)| {
        for x in [&mut spec.q, &mut spec.o].into_iter().chain(&mut spec.qv) {
            x.dtype = [Dtype::Bf16, Dtype::F16][number % 2];
        }
        spec.e4m3_keys()
    });
    // FlashMLA's LSE.
    let with_its_lse = [latent(1, 128, 512, 64), latent(1, 128, 512, 64).sink()];
    let with_its_lse = with_its_lse.map(|spec| spec.lse_form(of_flash_mla));
    let [two, causal, tree] =
        [IntervalsOfRow::Two, IntervalsOfRow::Causal { sequences: 2 }, IntervalsOfRow::Tree { words: 2 }];
    let intervals =
        [(16, two, 64), (16, two, 1), (2048, two, 64), (2048, two, 1), (16, causal, 64), (16, tree, 64)];
    let intervals = intervals.map(|(rows, of_row, page)| {
        let form = Intervals { of_row, per_sequence: true, per_head: false };
        over_pages(rows, 8, (512, 512), page).mask(Mask::of_intervals(form))
    });
    of_16_bits.into_iter().chain(of_e4m3).chain(with_its_lse).chain(intervals)
}
