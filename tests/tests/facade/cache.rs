//! Attention over a cache, and appends to it, on the CPU.

use fa3::{
    Attention, CachedAttention, Device, Error, KvCache, NewRows, Output, Rope, RopeStyle, RopeTable, Scalar,
};
use fa3_ref::{AppendedTo, CachedRows, RotatedRows};
use fa3_types::{AppendProblemError, Dtype, ProblemError, QueryPositions, SequenceRows, TensorName};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Array4, Axis, array, concatenate};

fn wave<T: Scalar>(dims: (usize, usize, usize, usize), step: f32) -> Array4<T> {
    Array4::from_shape_fn(dims, |(b, s, h, d)| {
        T::from_f32((step * (11 * b + 7 * s + 3 * h + 5 * d) as f32).sin())
    })
}

/// Three sequences, the second of them empty, in all ways in which a cache has them; pages are in no order, and what is
/// behind those in use makes no sense.
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
            // Room for the rows that tests append.
            table.row_mut(i).iter_mut().skip((used + 3_usize).div_ceil(rows)).for_each(|page| *page = -7);
        }
        KvCache::paged(k, v, table)
    });
    let all = [dense, indexed].into_iter().chain(paged);
    all.flat_map(|mut cache| {
        cache.cache_seqlens = vec![40, 0, 17];
        let mut padded = cache.clone();
        padded.cache_leftpad = Some(vec![5, 0, 17]);
        [padded, cache]
    })
    .collect()
}

/// The entries of each of three sequences (sequences, pages).
fn entries<T>(cache: &KvCache<T>) -> Array2<i32> {
    match (&cache.page_table, &cache.cache_batch_idx) {
        (Some(table), _) => table.clone(),
        (None, Some(entries)) => Array1::from(entries.clone()).insert_axis(Axis(1)),
        (None, None) => array![[0], [1], [2]],
    }
}

/// The reference's view of a cache.
fn gathered<T: Scalar + Copy>(cache: &KvCache<T>) -> ([Array4<T>; 2], SequenceRows) {
    let table = entries(cache);
    let page_table = table.view().into();
    let leftpad = cache.cache_leftpad.as_deref().unwrap_or_default();
    let rows = CachedRows { page_table, leftpad, seqused: &cache.cache_seqlens };
    let tensors = [&cache.k, &cache.v].map(|x| rows.gather(x.view(), T::default()));
    (tensors, rows.rows(cache.k.len_of(Axis(1))).unwrap())
}

/// A call with everything that is said of scores.
fn with_scores<'a, T: Scalar>(q: &'a Array4<T>, sink: &'a Array1<f32>) -> CachedAttention<'a, T> {
    CachedAttention::new(q).causal().window(Some(30), None).softmax_scale(0.4).softcap(9.0).sink(sink)
}

/// The same scores of another call.
fn of_gathered<'a, T: Scalar>(attention: Attention<'a, T>, sink: &'a Array1<f32>) -> Output<T::Output> {
    let attention = attention.causal().window(Some(30), None).softmax_scale(0.4).softcap(9.0).sink(sink);
    attention.forward(&Device::Cpu).unwrap()
}

fn keys_are_found_in_all_ways<T: Scalar + Copy>()
where
    T::Output: PartialEq + std::fmt::Debug,
{
    let (q, sink) = (wave::<T>((3, 4, 4, 16), 0.3), array![1.0, -2.0, 0.5, f32::NEG_INFINITY]);
    for cache in caches::<T>() {
        let ([k, v], rows) = gathered(&cache);
        let seqused = rows.seqused();
        let expected = of_gathered(Attention::new(&q, &k, &v).seqused_k(&seqused), &sink);
        let given = with_scores(&q, &sink).forward(&Device::Cpu, &cache).unwrap();
        assert_eq!(given, expected);

        // The same keys one after the other, and other rows of Q.
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
        assert_eq!(call.forward(&Device::Cpu, &cache).unwrap(), of_gathered(packed, &sink));
    }
}

#[test]
fn keys_are_found_in_all_ways_of_all_types() {
    keys_are_found_in_all_ways::<f32>();
    keys_are_found_in_all_ways::<bf16>();
    keys_are_found_in_all_ways::<fa3_quant::E4m3>();
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
    let error = CachedAttention::new(&q).qv(&narrow).forward(&Device::Cpu, &caches()[0]).unwrap_err();
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

/// Appends 3, 0 and 2 rows by the reference. Gives the cache afterwards and Q, rotated.
fn appended_by_the_reference(
    cache: &KvCache<bf16>,
    [q, k, v]: [&Array4<bf16>; 3],
    table: &RopeTable,
    base: &[i32],
    positions: QueryPositions,
) -> (KvCache<bf16>, Array4<bf16>) {
    let rows = SequenceRows::packed(&[0, 3, 3, 5]).unwrap();
    let (mut q, mut k) = (q.clone(), k.clone());
    let rotation = |positions| RotatedRows {
        style: table.style(),
        cos: table.cos().view(),
        sin: table.sin().view(),
        base,
        positions,
    };
    let each = rotation(QueryPositions::Each);
    each.rotate(&mut k.view_mut(), &rows, bf16::to_f32, bf16::from_f32);
    let (rows_q, of_q) = (SequenceRows::dense(3, 4), rotation(positions));
    of_q.rotate(&mut q.view_mut(), &rows_q, bf16::to_f32, bf16::from_f32);
    let (mut after, page_rows) = (cache.clone(), cache.k.len_of(Axis(1)));
    let table = entries(cache);
    let to = AppendedTo { seqused: &cache.cache_seqlens, page_table: Some(table.view().into()) };
    to.append(k.view(), &rows, &mut after.k.view_mut());
    to.append(v.view(), &rows, &mut after.v.view_mut());
    after.cache_seqlens = to.seqused_after(&rows, page_rows);
    (after, q)
}

#[test]
fn new_rows_are_appended_and_rotated() {
    let (q, k, v) = (wave((3, 4, 4, 16), 0.3), wave((1, 5, 2, 16), 0.9), wave((1, 5, 2, 8), 1.1));
    // It does not rotate.
    let qv = wave((3, 4, 4, 8), 1.3);
    for (index, cache) in caches::<bf16>().into_iter().enumerate() {
        let style = [RopeStyle::Interleaved, RopeStyle::HalfSplit][index / 2 % 2];
        let table = Rope::new(style, 16, 100.0).unwrap().table(60);
        let listed = (index % 4 == 0).then_some([50, 3, 0]);
        let new = NewRows::new(&k, &v).cu_seqlens_k_new(&[0, 3, 3, 5]).rotary(&table);
        let new = listed.as_ref().map_or(new.clone(), |listed| new.clone().rotary_seqlens(listed));
        let base = listed.map_or(cache.cache_seqlens.clone(), |listed| listed.to_vec());
        for (is_causal, positions) in [(true, QueryPositions::Each), (false, QueryPositions::First)] {
            let call = |q| {
                let call = CachedAttention::new(q);
                let call = if index % 3 == 1 { call.qv(&qv) } else { call };
                if is_causal { call.causal() } else { call }
            };
            let (expected, rotated) =
                appended_by_the_reference(&cache, [&q, &k, &v], &table, &base, positions);
            let mut given = cache.clone();
            let output = call(&q).append_forward(&Device::Cpu, &mut given, &new).unwrap();
            assert_eq!(given, expected);
            assert_ne!(given.k, cache.k);
            assert_eq!(output, call(&rotated).forward(&Device::Cpu, &expected).unwrap());
        }
    }
}

/// A cache of two sequences of 4 pages of 8 rows, with 5 and 30 rows in use.
fn small() -> KvCache<f16> {
    let (k, v) = (wave((9, 8, 1, 16), 0.5), wave((9, 8, 1, 16), 0.7));
    let table = array![[0, 1, 2, 3], [4, 5, 6, 7]];
    let mut cache = KvCache::paged(k, v, table);
    cache.cache_seqlens = vec![5, 30];
    cache
}

fn refused(change: impl Fn(&mut KvCache<f16>)) -> String {
    let (q, mut cache) = (wave((2, 1, 1, 16), 0.3), small());
    change(&mut cache);
    CachedAttention::new(&q).forward(&Device::Cpu, &cache).unwrap_err().to_string()
}

#[test]
fn lists_that_make_no_sense_are_refused() {
    assert_eq!(refused(|cache| cache.cache_seqlens = vec![5]), "cache_seqlens has 1 entries for 2 sequences");
    let sentence = "cache_seqlens is 33 for sequence 1, outside 0 to 32";
    assert_eq!(refused(|cache| cache.cache_seqlens[1] = 33), sentence);
    let sentence = "cache_seqlens is -1 for sequence 0, outside 0 to 32";
    assert_eq!(refused(|cache| cache.cache_seqlens[0] = -1), sentence);
    let sentence = "cache_leftpad is 6 for sequence 0, outside 0 to cache_seqlens, 5";
    assert_eq!(refused(|cache| cache.cache_leftpad = Some(vec![6, 0])), sentence);
    let sentence = "cache_leftpad has 3 entries for 2 sequences";
    assert_eq!(refused(|cache| cache.cache_leftpad = Some(vec![0; 3])), sentence);
    for page in [9, -1] {
        let sentence = format!("page_table has {page} as entry 2 of sequence 1, and k has 9 entries");
        assert_eq!(refused(|cache| cache.page_table.as_mut().unwrap()[[1, 2]] = page), sentence);
    }
    let sentence = "there are both page_table and cache_batch_idx, of which each says where sequences are";
    assert_eq!(refused(|cache| cache.cache_batch_idx = Some(vec![0, 1])), sentence);
    let sentence = "cache_batch_idx has 9 as entry 0 of sequence 0, and k has 9 entries";
    let indexed = |cache: &mut KvCache<f16>| {
        (cache.page_table, cache.cache_batch_idx) = (None, Some(vec![9, 1]));
        cache.cache_seqlens = vec![1, 1];
    };
    assert_eq!(refused(indexed), sentence);
    let three = |cache: &mut KvCache<f16>| {
        (cache.page_table, cache.cache_seqlens) = (Some(Array2::zeros((3, 4))), vec![0; 3]);
    };
    assert_eq!(refused(three), "k has batch 3, expected 2");
    assert_eq!(refused(|cache| cache.v = wave((9, 7, 1, 16), 0.7)), "v has seqlen 7, expected 8");
}

#[test]
fn new_rows_that_make_no_sense_are_refused() {
    let (q, kv) = (wave((2, 3, 1, 16), 0.3), wave((2, 3, 1, 16), 0.5));
    let table = Rope::new(RopeStyle::HalfSplit, 16, 100.0).unwrap().table(20);
    let refused = |cache: &mut KvCache<f16>, new: &NewRows<'_, f16>| {
        let before = cache.clone();
        let error = CachedAttention::new(&q).causal().append_forward(&Device::Cpu, cache, new).unwrap_err();
        assert_eq!(*cache, before);
        error.to_string()
    };
    let new = NewRows::new(&kv, &kv);
    let sentence = "3 rows do not fit behind 30 of sequence 1, which may have 32";
    assert_eq!(refused(&mut small(), &new), sentence);
    let mut cache = small();
    cache.cache_seqlens[1] = 15;
    let sentence = "sequence 1 has rows up to position 17, and the tables have 17 positions";
    let short = Rope::new(RopeStyle::HalfSplit, 16, 100.0).unwrap().table(17);
    assert_eq!(refused(&mut cache, &new.clone().rotary(&short)), sentence);
    let sentence = "rotary_seqlens is -2 for sequence 0, less than 0";
    assert_eq!(refused(&mut cache, &new.clone().rotary(&table).rotary_seqlens(&[-2, 0])), sentence);
    let sentence = "rotary_seqlens has 1 entries for 2 sequences";
    assert_eq!(refused(&mut cache, &new.clone().rotary(&table).rotary_seqlens(&[0])), sentence);
    let sentence = "positions were given without a rotation";
    assert_eq!(refused(&mut cache, &new.clone().rotary_seqlens(&[0, 0])), sentence);
    let packed = kv.to_shape((1, 6, 1, 16)).unwrap();
    let new = NewRows::new(packed.view(), packed.view());
    let sentence = "new rows: cu_seqlens ends at 7, past the 6 rows of k_new";
    assert_eq!(refused(&mut cache, &new.clone().cu_seqlens_k_new(&[0, 3, 7])), sentence);
    assert_eq!(
        refused(&mut cache, &new.clone().cu_seqlens_k_new(&[0, 6])),
        "k_new has 1 sequences, the cache has 2"
    );
    let sentence = "new rows: cu_seqlens falls from 4 to 3 at entry 2";
    assert_eq!(refused(&mut cache, &new.clone().cu_seqlens_k_new(&[0, 4, 3])), sentence);
    // Both sequences go on in page 1.
    cache.page_table.as_mut().unwrap()[[1, 1]] = 0;
    cache.cache_seqlens = vec![5, 14];
    let new = NewRows::new(&kv, &kv);
    let sentence = "new rows of sequences 0 and 1 go to one place: row 6 of entry 0";
    assert_eq!(refused(&mut cache, &new), sentence);

    let x = wave::<f32>((1, 1, 1, 16), 0.3);
    let mut cache = KvCache::dense(wave((1, 8, 1, 16), 0.5), wave((1, 8, 1, 16), 0.5));
    let error = CachedAttention::new(&x).append_forward(&Device::Cpu, &mut cache, &NewRows::new(&x, &x));
    let error_of_type = AppendProblemError::Dtype { tensor: TensorName::KNew, given: Dtype::F32 };
    assert_eq!(error.unwrap_err(), Error::Append(error_of_type));
    let q = wave::<f32>((1, 4, 1, 16), 0.3);
    let error = CachedAttention::new(&q).cu_seqlens_q(&[0, 5]).forward(&Device::Cpu, &cache).unwrap_err();
    let past = ProblemError::CuSeqlensEnd { tensor: TensorName::Q, given: 5, rows: 4 };
    assert_eq!(error, Error::Problem(past));
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
