//! Wrong calls return an error with the numbers, and never panic.

use candle_core::{DType, Device, Result, Shape, Tensor};
use fa3_candle::*;

fn zeros(dims: impl Into<Shape>) -> Tensor {
    Tensor::zeros(dims, DType::F32, &Device::Cpu).expect("there is memory")
}

/// The error's sentence, without the backtrace that candle adds with `RUST_BACKTRACE=1`.
fn said<T>(result: Result<T>) -> String {
    let message = result.err().expect("it is refused").to_string();
    message.lines().next().unwrap_or_default().to_owned()
}

fn refused(q: &Tensor, k: &Tensor, v: &Tensor) -> String {
    said(Attention::new(1.).forward(q, k, v))
}

#[test]
fn shapes() {
    let of = |heads, head_dim| zeros((2, 5, heads, head_dim));
    let (x, wide) = (of(4, 8), zeros((1, 1, 1, 577)));
    for (q, k, v, message) in [
        (&x, &of(3, 8), &of(3, 8), "heads_q 4 is not a multiple of heads_kv 3"),
        (&x, &zeros((3, 5, 4, 8)), &zeros((3, 5, 4, 8)), "k has batch 3, expected 2"),
        (&x, &of(4, 7), &x, "k has head_dim 7, expected 8"),
        (&x, &x, &zeros((2, 6, 4, 8)), "v has seqlen 6, expected 5"),
        (&of(4, 0), &of(4, 0), &x, "q has head_dim 0"),
        (&wide, &wide, &zeros((1, 1, 1, 8)), "q has head_dim 577, more than 576"),
        (&zeros((5, 4, 8)), &x, &x, "q has shape [5, 4, 8], expected (batch, seqlen, heads, head_dim)"),
    ] {
        assert_eq!(refused(q, k, v), message);
    }
    let list = Tensor::new(&[0u32, 5], &Device::Cpu).unwrap();
    let packed = Packed::new(&list, &list, 5, 5).unwrap();
    let message = said(Attention::new(1.).forward_varlen(&x, &x, &x, &packed));
    assert_eq!(message, "q has shape [2, 5, 4, 8], expected (total, heads, head_dim) of packed sequences");
}

#[test]
fn types() {
    let x = zeros((2, 5, 4, 8));
    let half = x.to_dtype(DType::F16).unwrap();
    assert_eq!(refused(&x, &half, &half), "k is f16, expected f32 like q");
    let double = x.to_dtype(DType::F64).unwrap();
    assert_eq!(refused(&double, &double, &double), "q is F64, expected one of F16, BF16 and F32");
}

#[test]
fn numbers() {
    let x = zeros((1, 3, 1, 8));
    let scaled = |scale| said(Attention::new(scale).forward(&x, &x, &x));
    assert_eq!(scaled(0.), "softmax scale 0 is outside 1e-18 to 1e18");
    assert_eq!(scaled(f32::NAN), "softmax scale NaN is outside 1e-18 to 1e18");
    let capped = |cap| said(Attention::new(1.).softcap(cap).forward(&x, &x, &x));
    assert_eq!(capped(0.), "soft cap 0 is outside 1e-18 to 1e18");
    assert_eq!(capped(-3.), "soft cap -3 is outside 1e-18 to 1e18");
}

#[test]
fn slopes() {
    let (x, slopes) = (zeros((1, 3, 2, 8)), zeros(2));
    let message = "alibi_slopes of shape [2] are given, and there is no attention with alibi slopes";
    let dense = flash_attn_alibi_windowed_softcap(&x, &x, &x, Some(&slopes), 1., None, None, 0.);
    assert_eq!(said(dense), message);
    let (x, list) = (zeros((3, 2, 8)), Tensor::new(&[0u32, 3], &Device::Cpu).unwrap());
    let (x4, l, s, some) = (zeros((1, 3, 2, 8)), &list, &slopes, Some(&slopes));
    let packed = flash_attn_varlen_alibi_windowed_softcap(&x, &x, &x, some, l, l, 3, 3, 1., None, None, 0.);
    assert_eq!(said(packed), message);
    assert_eq!(said(flash_attn_alibi(&x4, &x4, &x4, s, 1., true)), message);
    assert_eq!(said(flash_attn_alibi_windowed(&x4, &x4, &x4, s, 1., None, None)), message);
    assert_eq!(said(flash_attn_varlen_alibi(&x, &x, &x, s, l, l, 3, 3, 1., true)), message);
    let windowed = flash_attn_varlen_alibi_windowed(&x, &x, &x, s, l, l, 3, 3, 1., None, Some(0));
    assert_eq!(said(windowed), message);
}

#[test]
fn pages() {
    let (q, pool) = (zeros((2, 2, 8)), zeros((3, 4, 2, 8)));
    let list = |entries: &[u32]| Tensor::new(entries, &Device::Cpu).unwrap();
    let (of_q, of_k) = (list(&[0, 1, 2]), list(&[0, 5, 7]));
    let refused = |pool: &Tensor, of_k: &Tensor, table: &Tensor, ranges: Option<&Tensor>| {
        said(flash_attn_varlen_paged_windowed(
            &q, pool, pool, &of_q, of_k, table, ranges, 1, 9, 1., None, None, 4, None,
        ))
    };
    let table = Tensor::new(&[[0_u32, 1], [2, 9]], &Device::Cpu).unwrap();
    let message = refused(&pool, &of_k, &table, Some(&zeros((2, 1, 2))));
    assert!(message.starts_with("mm_prefix_ranges of shape [2, 1, 2] are given"));
    let (other_rows, floats, flat) = (zeros((3, 5, 2, 8)), zeros((2, 2)), list(&[0, 1]));
    for (pool, of_k, table, message) in [
        (&other_rows, &[0, 5, 7], &table, "k has shape [3, 5, 2, 8], expected (blocks, 4, heads, head_dim)"),
        (&pool, &[0, 5, 10], &table, "page_table has 9 as entry 1 of sequence 1, and k has 3 entries"),
        (&pool, &[0, 9, 10], &table, "cache_seqlens is 9 for sequence 0, outside 0 to 8"),
        (&pool, &[0, 5, 3], &table, "cache_seqlens is -2 for sequence 1, outside 0 to 8"),
        (&pool, &[0, 10, 11], &table, "sequence 0 of k has 10 rows, more than max_seqlen 9"),
        (&pool, &[0, 5, 7], &floats, "page_table is F32, expected U32 or I32"),
        (&pool, &[0, 5, 7], &flat, "page_table has shape [2], expected (2 sequences, pages)"),
    ] {
        assert_eq!(refused(pool, &list(of_k), table, None), message);
    }
}

#[test]
fn caches() {
    let (q, cache) = (zeros((2, 1, 2, 8)), zeros((2, 4, 2, 8)));
    let refused = |used: &[u32], max_seqlen| {
        let used = Tensor::new(used, &Device::Cpu).unwrap();
        let cached = Cached::new(&used, max_seqlen).unwrap();
        said(Attention::new(1.).forward_cached(&q, &cache, &cache, &cached))
    };
    assert_eq!(refused(&[4, 5], 9), "cache_seqlens is 5 for sequence 1, outside 0 to 4");
    assert_eq!(refused(&[4, 3], 3), "sequence 0 of k has 4 rows, more than max_seqlen 3");
    assert_eq!(refused(&[4, 3, 3], 9), "k has batch 2, expected 3");
    let q = candle_core::Var::from_tensor(&q).unwrap();
    let used = Tensor::new(&[4_u32, 3], &Device::Cpu).unwrap();
    let o = Attention::new(1.).forward_cached(&q, &cache, &cache, &Cached::new(&used, 4).unwrap()).unwrap();
    assert_eq!(said(o.sum_all().unwrap().backward()), "attention over a cache has no gradients");
}

#[test]
fn sinks() {
    let x = zeros((1, 3, 2, 8));
    let refused = |sink: &Tensor| said(Attention::new(1.).sink(sink).forward(&x, &x, &x));
    let message = "sink has shape [3], expected (2), one number for each head of q";
    assert_eq!(refused(&zeros(3)), message);
    assert!(refused(&zeros((1, 2))).starts_with("sink has shape [1, 2]"));
}

#[test]
fn lists() {
    let x = zeros((6, 2, 8));
    let refused = |of_q: &[u32], of_k: &[u32], max: [usize; 2]| {
        let [of_q, of_k] = [of_q, of_k].map(|list| Tensor::new(list, &Device::Cpu).unwrap());
        let packed = Packed::new(&of_q, &of_k, max[0], max[1]).unwrap();
        said(Attention::new(1.).forward_varlen(&x, &x, &x, &packed))
    };
    let fits = [0, 4, 6];
    for (of_q, of_k, max, message) in [
        (&fits[..], &[0, 6][..], [6, 6], "the number of sequences is 2 in q and 1 in k"),
        (&[1, 4, 6], &fits, [6, 6], "q: cu_seqlens starts at 1, not at 0"),
        (&fits, &[0, 4, 3], [6, 6], "k and v: cu_seqlens falls from 4 to 3 at entry 2"),
        (&[], &[], [6, 6], "q: cu_seqlens is empty; it needs batch + 1 entries"),
        (&[0, 4, 7], &fits, [6, 6], "cu_seqlens ends at 7, past the 6 rows of q"),
        (&fits, &[0, 4, 1 << 31], [6, 6], "cu_seqlens_k has 2147483648 at entry 2, more than 2147483647"),
        (&fits, &fits, [3, 6], "sequence 0 of q has 4 rows, more than max_seqlen 3"),
        (&fits, &[0, 1, 6], [6, 4], "sequence 1 of k has 5 rows, more than max_seqlen 4"),
    ] {
        assert_eq!(refused(of_q, of_k, max), message);
    }
}

#[test]
fn lists_of_other_shapes_and_types() {
    let list = Tensor::new(&[0u32, 3], &Device::Cpu).unwrap();
    let refused = |of_q: &Tensor, of_k: &Tensor| said(Packed::new(of_q, of_k, 3, 3));
    let wide = list.reshape((1, 2)).unwrap();
    assert_eq!(refused(&wide, &list), "cu_seqlens_q has shape [1, 2], expected (sequences + 1)");
    let long = list.to_dtype(DType::I64).unwrap();
    assert_eq!(refused(&list, &long), "cu_seqlens_k is I64, expected U32 or I32");
    assert_eq!(said(Cached::new(&wide, 3)), "cache_seqlens has shape [1, 2], expected (sequences)");
}
