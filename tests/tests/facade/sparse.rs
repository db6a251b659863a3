//! Attention over listed rows of a cache, on the CPU.

use fa3::{Attention, Device, ListedCache, Output, Scalar, SparseAttention};
use fa3_ref::KeyLists;
use half::bf16;
use ndarray::{Array1, Array2, Array4, Axis, concatenate, s};

use crate::wave;

/// Lists of 5 tokens: of the first `rows` rows, with entries that are no row; of one row many times; and of no row.
fn lists(entries: usize, rows: usize) -> Array2<i32> {
    Array2::from_shape_fn((5, entries), |(token, at)| match (token, at % 5) {
        (0, 2) => -1,
        (0, 3) => rows as i32 + 1,
        (1, 4) => i32::MIN,
        (2, _) => 3,
        (3, _) => -1,
        _ => ((31 * at + 7 * token) % rows) as i32,
    })
}

/// A cache with its lists.
struct Cache<T> {
    k: Array4<T>,
    v: Array4<T>,
    indices: Array2<i32>,
    lengths: Option<Vec<i32>>,
}

impl<T: Scalar> Cache<T> {
    fn new(pages: usize, page_rows: usize, entries: usize, lengths: Option<Vec<i32>>) -> Cache<T> {
        let (mut k, mut v) = (wave((pages, page_rows, 2, 16), 0.5), wave((pages, page_rows, 2, 24), 0.7));
        // The last row is listed nowhere, and nothing of it reaches a result.
        for x in [&mut k, &mut v] {
            x.slice_mut(s![-1, -1, .., ..]).fill(T::from_f32(f32::NAN));
        }
        Cache { k, v, indices: lists(entries, pages * page_rows - 1), lengths }
    }

    fn view(&self) -> ListedCache<'_, T> {
        let (k, v, indices) = (self.k.view(), self.v.view(), self.indices.view());
        ListedCache { k, v, indices, lengths: self.lengths.as_deref() }
    }

    fn lists(&self) -> KeyLists<'_> {
        KeyLists { indices: self.indices.view(), lengths: self.lengths.as_deref().unwrap_or_default() }
    }
}

fn cases<T: Scalar>() -> Vec<Vec<Cache<T>>> {
    let lengths = Some(vec![70, 9, i32::MAX, 100, -5]);
    vec![
        vec![Cache::new(40, 1, 100, None)],
        vec![Cache::new(3, 16, 700, lengths.clone())],
        vec![Cache::new(3, 16, 100, None), Cache::new(9, 2, 33, lengths)],
        vec![Cache::new(3, 16, 0, None), Cache::new(9, 2, 33, None)],
    ]
}

fn sparse<'a, T: Scalar>(q: &'a Array4<T>, caches: &'a [Cache<T>]) -> SparseAttention<'a, T> {
    let attention = SparseAttention::new(q, caches[0].view()).softmax_scale(0.3);
    caches[1..].iter().fold(attention, |attention, extra| attention.extra(extra.view()))
}

fn sparse_is_attention_of_gathered_keys<T: Scalar<Output = T> + PartialEq + std::fmt::Debug>() {
    let sink = Array1::from_shape_fn(4, |head| head as f32 - 1.0);
    for caches in cases::<T>() {
        let q = wave((5, 2, 4, 16), 0.3);
        let gather = |of: fn(&Cache<T>) -> &Array4<T>| {
            let all: Vec<_> = caches.iter().map(|cache| (of(cache).view(), cache.lists())).collect();
            KeyLists::gather(&all, T::from_f32(f32::NAN)).unwrap()
        };
        let ((k, rows), (v, _)) = (gather(|cache| &cache.k), gather(|cache| &cache.v));
        let used = rows.seqused();
        let expected = Attention::new(&q, &k, &v).seqused_k(&used).softmax_scale(0.3);
        let output = sparse(&q, &caches).forward(&Device::Cpu).unwrap();
        assert_eq!(output, expected.forward(&Device::Cpu).unwrap());
        let (same, largest) = sparse(&q, &caches).forward_with_max_logits(&Device::Cpu).unwrap();
        assert_eq!(same, output);
        for ([token, head, row], &found) in largest.indexed_iter().map(|(at, x)| (<[usize; 3]>::from(at), x))
        {
            let score = |key| {
                let of_row = q.slice(s![token, row, head, ..]).mapv(T::to_f32);
                0.3 * of_row.dot(&k.slice(s![token, key, head / 2, ..]).mapv(T::to_f32))
            };
            let expected = (0..used[token] as usize).map(score).fold(f32::NEG_INFINITY, f32::max);
            assert!(found == expected || (found - expected).abs() < 1e-5, "{found}, expected {expected}");
        }
        assert!(output.o.slice(s![3, .., .., ..]).iter().all(|x| x.to_f32() == 0.0), "a token without keys");
        let qv = wave((5, 2, 4, 24), 0.2);
        let latent = sparse(&q, &caches).qv(&qv).sink(&sink).forward(&Device::Cpu).unwrap();
        assert_eq!(latent, expected.qv(&qv).sink(&sink).forward(&Device::Cpu).unwrap());
    }
}

#[test]
fn sparse_attention_is_attention_of_gathered_keys() {
    sparse_is_attention_of_gathered_keys::<f32>();
    sparse_is_attention_of_gathered_keys::<bf16>();
}

/// Its bits do not depend on the tokens beside it.
#[test]
fn a_token_has_the_bits_that_it_has_alone() {
    let q = wave::<f32>((5, 1, 4, 16), 0.3);
    for caches in cases() {
        let all = sparse(&q, &caches).forward(&Device::Cpu).unwrap();
        let alone = (0..5).map(|token| {
            let tokens = token..token + 1;
            let one = |cache: &Cache<f32>| Cache {
                k: cache.k.clone(),
                v: cache.v.clone(),
                indices: cache.indices.slice(s![tokens.clone(), ..]).to_owned(),
                lengths: cache.lengths.as_ref().map(|lengths| lengths[tokens.clone()].to_vec()),
            };
            let caches: Vec<_> = caches.iter().map(one).collect();
            let q = q.slice(s![tokens.clone(), .., .., ..]).to_owned();
            sparse(&q, &caches).forward(&Device::Cpu).unwrap()
        });
        let alone: Vec<Output<f32>> = alone.collect();
        let o: Vec<_> = alone.iter().map(|output| output.o.view()).collect();
        let lse: Vec<_> = alone.iter().map(|output| output.lse.view()).collect();
        assert_eq!(concatenate(Axis(0), &o).unwrap(), all.o);
        assert_eq!(concatenate(Axis(0), &lse).unwrap(), all.lse);
    }
}

#[test]
fn bad_lists_are_refused() {
    let caches = cases::<f32>().swap_remove(2);
    let q = wave((5, 1, 4, 16), 0.3);
    let refused =
        |attention: SparseAttention<'_, f32>| attention.forward(&Device::Cpu).unwrap_err().to_string();
    assert_eq!(
        refused(sparse(&q, &caches).causal()),
        "lists of keys exclude masks, and the mask causal is given"
    );
    let short = ListedCache { lengths: Some(&[1, 2]), ..caches[0].view() };
    assert_eq!(refused(SparseAttention::new(&q, short)), "lengths has 2 entries for 5 sequences");
    let other = wave((4, 1, 4, 16), 0.3);
    assert_eq!(refused(sparse(&other, &caches)), "the number of sequences is 4 in q and 5 in k");
    let three = caches[1].indices.slice(s![..3, ..]);
    let extra = ListedCache { indices: three, lengths: None, ..caches[1].view() };
    let sentence = "two caches take lists for each sequence, of 3 sequences in the second and 5 in the first";
    assert_eq!(refused(SparseAttention::new(&q, caches[0].view()).extra(extra)), sentence);
}
