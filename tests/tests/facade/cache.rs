//! Attention over a KV cache, and appends to it, on the CPU.

mod refusals;

use std::fmt::Debug;

use fa3::{
    Attention, CacheView, CacheViewMut, CachedAttention, Device, E4m3, KvCache, NewRows, Output, Rope,
    RopeStyle, RopeTable, Scalar,
};
use fa3_ref::{AppendedTo, CachedRows, RotatedRows, with_scales};
use fa3_types::{QueryPositions, SequenceRows};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Array3, Array4, Axis, array, concatenate, s};

use crate::wave;

/// Caches of three sequences, of which the second is empty, in every form. Pages are in random order, and page table
/// entries after the valid rows are invalid.
fn caches<T: Scalar + Copy>() -> Vec<KvCache<T>> {
    let tensors = |entries, rows| (wave((entries, rows, 2, 16), 0.5), wave((entries, rows, 2, 8), 0.7));
    let (k, v) = tensors(3, 48);
    let dense = KvCache::dense(k, v);
    let (k, v) = tensors(5, 48);
    let mut indexed = KvCache::dense(k, v);
    indexed.cache_batch_idx = Some(vec![4, 0, 2]);
    let paged = [1, 3, 16].map(|rows| {
        let ((k, v), pages) = (tensors(97, rows), 48 / rows);
        let mut table = Array2::from_shape_fn((3, pages), |(i, page)| ((i * pages + page) * 31 % 97) as i32);
        for (i, &used) in [40, 0, 17].iter().enumerate() {
            // The table keeps valid entries for the rows that tests append.
            table.row_mut(i).iter_mut().skip((used + 3_usize).div_ceil(rows)).for_each(|page| *page = -7);
        }
        KvCache::paged(k, v, table)
    });
    let mut indexed_pages = paged[2].clone();
    let table = indexed_pages.page_table.take().unwrap();
    indexed_pages.page_table = Some(table.select(Axis(0), &[2, 1, 0, 0]));
    indexed_pages.cache_batch_idx = Some(vec![3, 1, 0]);
    let all = [dense, indexed, indexed_pages].into_iter().chain(paged);
    all.flat_map(|mut cache| {
        cache.cache_seqlens = vec![40, 0, 17];
        let mut padded = cache.clone();
        padded.cache_leftpad = Some(vec![5, 0, 17]);
        // Pages that hold only padding may have any index.
        let rows = cache.k.len_of(Axis(1));
        if let (Some(table), None) = (&mut padded.page_table, &padded.cache_batch_idx) {
            table.row_mut(0).iter_mut().take(5 / rows).for_each(|page| *page = -1);
        }
        [padded, cache]
    })
    .collect()
}

/// Each sequence's entries: (sequences, pages).
fn entries<T>(cache: &KvCache<T>) -> Array2<i32> {
    match (&cache.page_table, &cache.cache_batch_idx) {
        (Some(table), Some(rows)) => {
            table.select(Axis(0), &rows.iter().map(|&row| row as usize).collect::<Vec<_>>())
        }
        (Some(table), None) => table.clone(),
        (None, Some(entries)) => Array1::from(entries.clone()).insert_axis(Axis(1)),
        (None, None) => array![[0], [1], [2]],
    }
}

/// Contiguous K and V, gathered from a cache, for the reference.
fn gathered<T: Scalar + Copy>(cache: &KvCache<T>) -> ([Array4<T>; 2], SequenceRows) {
    let table = entries(cache);
    let page_table = table.view().into();
    let leftpad = cache.cache_leftpad.as_deref().unwrap_or_default();
    let rows = CachedRows { page_table, leftpad, seqused: &cache.cache_seqlens };
    let tensors = [&cache.k, &cache.v].map(|x| rows.gather(x.view(), T::default()));
    (tensors, rows.rows(cache.k.len_of(Axis(1))).unwrap())
}

/// A call with every option that affects scores.
fn with_scores<'a, T: Scalar>(q: &'a Array4<T>, sink: &'a Array1<f32>) -> CachedAttention<'a, T> {
    CachedAttention::new(q).causal().window(Some(30), None).softmax_scale(0.4).softcap(9.0).sink(sink)
}

/// Computes a call without a cache, with the options of [`with_scores`]: O, LSE and the largest scores.
fn of_gathered<'a, T: Scalar>(
    attention: Attention<'a, T>,
    sink: &'a Array1<f32>,
) -> (Output<T::Output>, Array3<f32>) {
    let attention = attention.causal().window(Some(30), None).softmax_scale(0.4).softcap(9.0).sink(sink);
    let results = attention.forward_with_max_logits(&Device::Cpu).unwrap();
    assert!(attention.forward(&Device::Cpu).unwrap().lse == results.0.lse);
    results
}

fn keys_are_found_in_all_ways<T: Scalar + Copy>()
where
    T::Output: PartialEq + Debug,
{
    let (q, sink) = (wave::<T>((3, 4, 4, 16), 0.3), array![1.0, -2.0, 0.5, f32::NEG_INFINITY]);
    for cache in caches::<T>() {
        let ([k, v], rows) = gathered(&cache);
        let seqused = rows.seqused();
        let expected = of_gathered(Attention::new(&q, &k, &v).seqused_k(&seqused), &sink);
        let call = with_scores(&q, &sink);
        assert_eq!(call.forward_with_max_logits(&Device::Cpu, &cache).unwrap(), expected);
        assert_eq!(call.forward(&Device::Cpu, &cache).unwrap(), expected.0);

        // The same keys as packed sequences, with other rows of Q.
        let q = q.to_shape((1, 12, 4, 16)).unwrap().into_owned();
        let tight = [&k, &v].map(|x| {
            let of = |i: usize| x.index_axis(Axis(0), i).slice_axis_move(Axis(0), (..rows.len(i)).into());
            concatenate(Axis(0), &[of(0), of(1), of(2)]).unwrap().insert_axis(Axis(0))
        });
        let lens: Vec<usize> = (0..3).map(|i| rows.len(i)).collect();
        let cu_seqlens_k = SequenceRows::packed_lengths(&lens).cu_seqlens();
        let cu_seqlens_q = [0, 9, 11, 12];
        let packed = Attention::new(&q, &tight[0], &tight[1]).packed(&cu_seqlens_q, &cu_seqlens_k);
        let call = with_scores(&q, &sink).cu_seqlens_q(&cu_seqlens_q);
        assert_eq!(call.forward_with_max_logits(&Device::Cpu, &cache).unwrap(), of_gathered(packed, &sink));
    }
}

#[test]
fn keys_are_found_in_all_ways_of_all_types() {
    keys_are_found_in_all_ways::<f32>();
    keys_are_found_in_all_ways::<bf16>();
    keys_are_found_in_all_ways::<E4m3>();
}

#[test]
fn latent_vectors_are_found_in_all_ways() {
    let (q, qv) = (wave::<f16>((3, 4, 4, 16), 0.3), wave((3, 4, 4, 8), 1.3));
    for cache in caches::<f16>() {
        let ([k, v], rows) = gathered(&cache);
        let seqused = rows.seqused();
        let contiguous = Attention::new(&q, &k, &v).qv(&qv).seqused_k(&seqused).causal();
        let given = CachedAttention::new(&q).qv(&qv).causal().forward(&Device::Cpu, &cache).unwrap();
        assert_eq!(given, contiguous.forward(&Device::Cpu).unwrap());
        assert_ne!(given, CachedAttention::new(&q).causal().forward(&Device::Cpu, &cache).unwrap());
    }
    let narrow = wave((3, 4, 4, 7), 1.3);
    let error = CachedAttention::new(&q).qv(&narrow).forward(&Device::Cpu, &caches::<f16>()[0]).unwrap_err();
    assert_eq!(error.to_string(), "qv has head_dim 7, expected 8");
}

#[test]
fn rows_that_are_nobodys_reach_nothing() {
    let q = wave::<f32>((3, 4, 4, 16), 0.3);
    for cache in caches::<f32>() {
        let expected = CachedAttention::new(&q).causal().forward(&Device::Cpu, &cache).unwrap();
        let (table, leftpad) = (entries(&cache), cache.cache_leftpad.clone().unwrap_or_else(|| vec![0; 3]));
        let page_rows = cache.k.len_of(Axis(1));
        let (mut k, mut v) = [&cache.k, &cache.v].map(|x| Array4::from_elem(x.dim(), f32::NAN)).into();
        for (i, (&first, &end)) in leftpad.iter().zip(&cache.cache_seqlens).enumerate() {
            for at in first as usize..end as usize {
                let entry = table[[i, at / page_rows]] as usize;
                for (to, from) in [(&mut k, &cache.k), (&mut v, &cache.v)] {
                    let mut to = to.index_axis_mut(Axis(0), entry);
                    let from = from.index_axis(Axis(0), entry);
                    let at = at % page_rows;
                    to.index_axis_mut(Axis(0), at).assign(&from.index_axis(Axis(0), at));
                }
            }
        }
        let mut bare = cache;
        (bare.k, bare.v) = (k, v);
        assert_eq!(CachedAttention::new(&q).causal().forward(&Device::Cpu, &bare).unwrap(), expected);
    }
}

/// cu_seqlens of the new rows: 3, 0 and 2 rows.
const NEW: [i32; 4] = [0, 3, 3, 5];

/// Appends the new rows in the reference. `code` converts each row with its scale. Returns the resulting cache and the
/// rotated Q.
fn appended_by_the_reference<T: Scalar + Copy, C: Scalar + Copy>(
    cache: &KvCache<C>,
    [q, k, v]: [&Array4<T>; 3],
    (table, base, positions): (&RopeTable, &[i32], QueryPositions),
    scales: [Option<&[f32]>; 2],
    code: impl Fn(T, f32) -> C,
) -> (KvCache<C>, Array4<T>) {
    let rows = SequenceRows::packed(&NEW).unwrap();
    let (mut q, mut k) = (q.clone(), k.clone());
    let rotation = |positions| RotatedRows {
        style: table.style(),
        cos: table.cos().view(),
        sin: table.sin().view(),
        base,
        positions,
    };
    let each = rotation(QueryPositions::Each);
    each.rotate(&mut k.view_mut(), &rows, T::to_f32, T::from_f32);
    let (rows_q, of_q) = (SequenceRows::dense(3, 4), rotation(positions));
    of_q.rotate(&mut q.view_mut(), &rows_q, T::to_f32, T::from_f32);
    let (mut after, page_rows) = (cache.clone(), cache.k.len_of(Axis(1)));
    let table = entries(cache);
    let to = AppendedTo { seqused: &cache.cache_seqlens, page_table: Some(table.view().into()) };
    to.append(with_scales(k.view(), &rows, scales[0], &code).view(), &rows, &mut after.k.view_mut());
    to.append(with_scales(v.view(), &rows, scales[1], &code).view(), &rows, &mut after.v.view_mut());
    after.cache_seqlens = to.seqused_after(&rows, page_rows);
    (after, q)
}

#[test]
fn new_rows_are_appended_and_rotated() {
    appended_and_rotated::<bf16>();
    appended_and_rotated::<f32>();
}

fn appended_and_rotated<T: Scalar<Output = T> + Copy + PartialEq + Debug>() {
    let (q, k, v) = (wave((3, 4, 4, 16), 0.3), wave((1, 5, 2, 16), 0.9), wave((1, 5, 2, 8), 1.1));
    // `qv` is not rotated.
    let qv = wave((3, 4, 4, 8), 1.3);
    for (index, cache) in caches::<T>().into_iter().enumerate() {
        let style = [RopeStyle::Interleaved, RopeStyle::HalfSplit][index / 2 % 2];
        let table = Rope::new(style, 16, 100.0).unwrap().table(60);
        let listed = (index % 4 == 0).then_some([50, 3, 0]);
        let new = NewRows::new(&k, &v).cu_seqlens_k_new(&NEW).rotary(&table);
        let new = listed.as_ref().map_or(new.clone(), |listed| new.clone().rotary_seqlens(listed));
        let base = listed.map_or(cache.cache_seqlens.clone(), |listed| listed.to_vec());
        for (is_causal, positions) in [(true, QueryPositions::Each), (false, QueryPositions::First)] {
            let call = |q| {
                let call = CachedAttention::new(q);
                let call = if index % 3 == 1 { call.qv(&qv) } else { call };
                if is_causal { call.causal() } else { call }
            };
            let (rotation, number) = ((&table, &base[..], positions), |x: T, _: f32| x);
            let (expected, rotated) =
                appended_by_the_reference(&cache, [&q, &k, &v], rotation, [None; 2], number);
            let mut given = cache.clone();
            let output = call(&q).append_forward(&Device::Cpu, &mut given, &new).unwrap();
            assert_eq!(given, expected);
            assert_ne!(given.k, cache.k);
            assert_eq!(output, call(&rotated).forward(&Device::Cpu, &expected).unwrap());
            let mut given = cache.clone();
            let results = call(&q).append_forward_with_max_logits(&Device::Cpu, &mut given, &new).unwrap();
            assert_eq!(results, call(&rotated).forward_with_max_logits(&Device::Cpu, &expected).unwrap());

            // Checks the append alone, in a borrowed cache.
            let mut given = cache.clone();
            CacheViewMut::from(&mut given).append(&new).unwrap();
            assert_eq!(given, expected);
        }
    }
}

/// e4m3 caches, with and without scales. New rows are quantized after their rotation.
#[test]
fn caches_of_e4m3_beside_other_rows() {
    let q = wave::<f16>((3, 4, 4, 16), 0.3);
    let (k_new, v_new) = (wave::<f16>((1, 5, 2, 16), 40.9), wave::<f16>((1, 5, 2, 16), 1.1));
    let scales = [array![[0.5, 3.0], [1.0, 1.0], [0.01, 2.0]], array![[2.0, 0.1], [1.0, 1.0], [0.3, 1.0]]];
    let table = Rope::new(RopeStyle::HalfSplit, 16, 100.0).unwrap().table(60);
    for (index, mut cache) in caches::<E4m3>().into_iter().enumerate() {
        // Rows of V have a multiple of 16 bytes, as e4m3 requires.
        cache.v = wave((cache.v.dim().0, cache.v.dim().1, 2, 16), 0.7);
        let scaled = index % 3 > 0;
        let [of_k, of_v] = scales.each_ref().map(|scales| scales.as_slice().filter(|_| scaled));
        let call = CachedAttention::new(&q).causal();
        let call = if scaled { call.k_descale(&scales[0]).v_descale(&scales[1]) } else { call };
        let numbers = |cache: &KvCache<E4m3>| {
            let ([k, v], rows) = gathered(cache);
            let number = |code: E4m3, scale: f32| code.to_f32() * scale;
            let [k, v] =
                [(k, of_k), (v, of_v)].map(|(x, scales)| with_scales(x.view(), &rows, scales, number));
            (k, v, rows.seqused())
        };
        let expected = |cache: &KvCache<E4m3>, q: &Array4<f16>| {
            let ((k, v, seqused), q) = (numbers(cache), q.mapv(f16::to_f32));
            let attention = Attention::new(&q, &k, &v).seqused_k(&seqused).causal();
            let output = attention.forward(&Device::Cpu).unwrap();
            Output::new(output.o.mapv(f16::from_f32), output.lse)
        };
        assert_eq!(call.forward(&Device::Cpu, &cache).unwrap(), expected(&cache, &q));

        let rotation = (&table, &cache.cache_seqlens[..], QueryPositions::Each);
        let code = |x: f16, scale: f32| E4m3::from_f32(x.to_f32() / scale);
        let (after, rotated_q) =
            appended_by_the_reference(&cache, [&q, &k_new, &v_new], rotation, [of_k, of_v], code);
        let new = NewRows::new(&k_new, &v_new).cu_seqlens_k_new(&NEW).rotary(&table);
        let output = call.append_forward(&Device::Cpu, &mut cache, &new).unwrap();
        assert_eq!((&cache, &output), (&after, &expected(&after, &rotated_q)));
    }
}

/// Only page table entries of valid rows are read: a table as wide as a server's takes no more time or memory.
#[test]
fn wide_tables_take_nothing() {
    let (k, v) = (wave::<f16>((4, 16, 1, 16), 0.5), wave((4, 16, 1, 16), 0.7));
    let q = wave((64, 1, 1, 16), 0.3);
    // Each sequence has a million pages of 16 rows. Because a stride is 0, they are all the same page.
    let column = array![[3]];
    let view = CacheView {
        k: k.view(),
        v: v.view(),
        cache_seqlens: &[16; 64],
        page_table: Some(column.broadcast((64, 1_000_000)).unwrap()),
        cache_batch_idx: None,
        cache_leftpad: None,
    };
    let output = CachedAttention::new(&q).forward(&Device::Cpu, view).unwrap();
    let pages = [&k, &v].map(|x| x.slice(s![3..4, .., .., ..]));
    let [k, v] = pages.each_ref().map(|x| x.broadcast((64, 16, 1, 16)).unwrap());
    assert_eq!(output, Attention::new(&q, k, v).forward(&Device::Cpu).unwrap());
}

#[test]
fn rows_in_use_can_be_gathered() {
    for cache in caches::<f16>() {
        let (tensors, rows) = gathered(&cache);
        let (given, of_given) = CacheView::from(&cache).gathered(false).unwrap();
        assert_eq!(of_given.seqused(), rows.seqused());
        let (packed, of_packed) = CacheView::from(&cache).gathered(true).unwrap();
        for sequence in 0..3 {
            let len = rows.len(sequence);
            assert_eq!(of_packed.len(sequence), len);
            let (_, start) = of_packed.start(sequence);
            for ((expected, given), packed) in tensors.iter().zip(&given).zip(&packed) {
                let expected = expected.slice(s![sequence, ..len, .., ..]);
                assert_eq!(given.slice(s![sequence, ..len, .., ..]), expected);
                assert_eq!(packed.slice(s![0, start..start + len, .., ..]), expected);
            }
        }
    }
    // These arrays have strides of 0, and are too large for a copy in memory.
    let (page, table) = (Array4::from_elem((1, 1, 1, 8), f16::ONE), array![[0]]);
    let view = CacheView {
        k: page.view(),
        v: page.view(),
        cache_seqlens: &[1 << 10; 4],
        page_table: Some(table.broadcast((4, 1 << 10)).unwrap()),
        cache_batch_idx: None,
        cache_leftpad: None,
    };
    assert!(view.gathered(false).is_ok());
    let wide = page.broadcast((1, 1, 1 << 37, 8)).unwrap();
    let error = CacheView { k: wide, v: wide, ..view }.gathered(false).unwrap_err();
    let sentence = format!("there is no memory of {} bytes for a copy of the rows in use", 1_u64 << 53);
    assert_eq!(error.to_string(), sentence);
}

/// Results go into the caller's arrays. Their padding rows stay unchanged.
#[test]
fn results_go_into_given_arrays() {
    let q = wave::<f16>((3, 4, 4, 16), 0.3);
    let (k, v) = (wave((3, 2, 2, 16), 0.9), wave((3, 2, 2, 8), 1.1));
    for mut cache in caches::<f16>() {
        let call = CachedAttention::new(&q).seqused_q(&[4, 0, 1]).causal();
        let (mut o, mut lse) = (wave((3, 4, 4, 8), 2.0), Array3::ones((3, 4, 4)));
        let expected = call.forward(&Device::Cpu, &cache).unwrap();
        call.forward_into(&Device::Cpu, &cache, o.view_mut(), lse.view_mut()).unwrap();
        assert_eq!((&o, &lse), (&expected.o, &expected.lse));
        let ([gathered_k, gathered_v], rows) = gathered(&cache);
        let (used, attention) = (rows.seqused(), Attention::new(&q, &gathered_k, &gathered_v));
        let attention = attention.seqused_q(&[4, 0, 1]).seqused_k(&used).causal();
        assert_eq!(expected, attention.forward(&Device::Cpu).unwrap());

        let (new, mut same) = (NewRows::new(&k, &v), cache.clone());
        let expected = call.append_forward(&Device::Cpu, &mut same, &new).unwrap();
        let outputs = (o.view_mut(), lse.view_mut());
        call.append_forward_into(&Device::Cpu, &mut cache, &new, outputs.0, outputs.1).unwrap();
        assert_eq!((o, lse, cache.clone()), (expected.o, expected.lse, same));
        let short = Array4::from_elem((3, 3, 4, 8), f16::ZERO);
        let error = call.forward_into(
            &Device::Cpu,
            &cache,
            short.clone().view_mut(),
            Array3::zeros((3, 4, 4)).view_mut(),
        );
        let sentence = "the array for o has shape [3, 3, 4, 8], expected [3, 4, 4, 8]";
        assert_eq!(error.unwrap_err().to_string(), sentence);
    }
}

#[test]
fn caches_without_rows_are_legal() {
    let empty = |entries, rows| Array4::<bf16>::from_elem((entries, rows, 1, 16), bf16::ONE);
    let q = empty(2, 3);
    let none = Array2::zeros((2, 0));
    let caches = [
        KvCache::dense(empty(2, 0), empty(2, 0)),
        KvCache::dense(empty(2, 7), empty(2, 7)),
        KvCache::paged(empty(0, 8), empty(0, 8), none.clone()),
        KvCache::paged(empty(4, 0), empty(4, 0), Array2::zeros((2, 5))),
        KvCache::paged(empty(4, 8), empty(4, 8), none),
    ];
    for mut cache in caches {
        let output = CachedAttention::new(&q).causal().forward(&Device::Cpu, &cache).unwrap();
        assert!(output.o.iter().all(|&x| x == bf16::ZERO));
        assert!(output.lse.iter().all(|&lse| lse == f32::NEG_INFINITY));
        let (nothing, before) = (empty(2, 0), cache.clone());
        let new = NewRows::new(&nothing, &nothing);
        assert_eq!(CachedAttention::new(&q).append_forward(&Device::Cpu, &mut cache, &new).unwrap(), output);
        assert_eq!(cache, before);
    }
}
