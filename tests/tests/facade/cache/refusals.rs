//! Calls with invalid caches, new rows or scales are refused.

use fa3::{CachedAttention, Device, E4m3, Error, KvCache, NewRows, Rope, RopeStyle};
use fa3_types::{Dtype, ProblemError, TensorName};
use half::f16;
use ndarray::{Array2, Array3, array, s};

use crate::wave;

/// A cache of two sequences with 5 and 30 valid rows. Each sequence has 4 pages of 8 rows.
fn small() -> KvCache<f16> {
    let (k, v) = (wave((9, 8, 1, 16), 0.5), wave((9, 8, 1, 16), 0.7));
    let table = array![[0, 1, 2, 3], [4, 5, 6, 7]];
    let mut cache = KvCache::paged(k, v, table);
    cache.cache_seqlens = vec![5, 30];
    cache
}

fn refused(change: impl Fn(&mut KvCache<f16>)) -> String {
    let (q, mut cache) = (wave::<f16>((2, 1, 1, 16), 0.3), small());
    change(&mut cache);
    CachedAttention::new(&q).forward(&Device::Cpu, &cache).unwrap_err().to_string()
}

#[test]
fn invalid_lists_are_refused() {
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
    for row in [2, -1] {
        let sentence = format!("cache_batch_idx is {row} for sequence 1, and page_table has 2 rows");
        assert_eq!(refused(|cache| cache.cache_batch_idx = Some(vec![0, row])), sentence);
    }
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
fn invalid_new_rows_are_refused() {
    let (q, kv) = (wave((2, 3, 1, 16), 0.3), wave((2, 3, 1, 16), 0.5));
    let table = Rope::new(RopeStyle::HalfSplit, 16, 100.0).unwrap().table(20);
    let refused = |cache: &mut KvCache<f16>, new: &NewRows<'_, f16>| {
        let before = cache.clone();
        let error =
            CachedAttention::new(&q).causal().append_forward(&Device::Cpu, &mut *cache, new).unwrap_err();
        assert_eq!(*cache, before);
        error.to_string()
    };
    let new = NewRows::new(&kv, &kv);
    let sentence = "3 rows do not fit behind the 30 of sequence 1, whose capacity is 32";
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
    // Both sequences would append to page 1.
    cache.page_table.as_mut().unwrap()[[1, 1]] = 0;
    cache.cache_seqlens = vec![5, 14];
    let new = NewRows::new(&kv, &kv);
    let sentence = "new rows of sequences 0 and 1 go to one place: row 6 of entry 0";
    assert_eq!(refused(&mut cache, &new), sentence);

    let x = wave::<f32>((1, 1, 1, 16), 0.3);
    let codes = || wave::<E4m3>((1, 8, 1, 16), 0.5);
    let mut cache = KvCache::dense(codes(), codes());
    let error = CachedAttention::new(&x).append_forward(&Device::Cpu, &mut cache, &NewRows::new(&x, &x));
    let (tensor, given, expected) = (TensorName::K, Dtype::E4m3, Dtype::F32);
    let mismatch = ProblemError::DtypeMismatch { tensor, given, expected };
    assert_eq!(error.unwrap_err(), Error::Problem(mismatch));
    let cache = KvCache::dense(wave::<f32>((1, 8, 1, 16), 0.5), wave((1, 8, 1, 16), 0.5));
    let q = wave::<f32>((1, 4, 1, 16), 0.3);
    let error = CachedAttention::new(&q).cu_seqlens_q(&[0, 5]).forward(&Device::Cpu, &cache).unwrap_err();
    let past = ProblemError::CuSeqlensEnd { tensor: TensorName::Q, given: 5, rows: 4 };
    assert_eq!(error, Error::Problem(past));
}

#[test]
fn invalid_scales_are_refused() {
    let (q, scales) = (wave::<f16>((2, 1, 1, 16), 0.3), array![[1.0]]);
    let call = CachedAttention::new(&q).k_descale(&scales);
    let sentence = "scales were given for a cache of f16; only e4m3 has some";
    assert_eq!(call.forward(&Device::Cpu, &small()).unwrap_err().to_string(), sentence);
    let cache = KvCache::dense(wave::<E4m3>((2, 8, 1, 16), 0.5), wave((2, 8, 1, 16), 0.5));
    let sentence = "k_descale has shape [1, 1], expected [2, 1]: (sequences, heads_kv)";
    assert_eq!(call.forward(&Device::Cpu, &cache).unwrap_err().to_string(), sentence);
    let of_tokens = Array3::ones((2, 8, 1));
    let call = call.token_scales([of_tokens.view(), of_tokens.view()]);
    let sentence = "k_descale or v_descale is given beside scales of tokens and heads";
    assert_eq!(call.forward(&Device::Cpu, &cache).unwrap_err().to_string(), sentence);
    let call = CachedAttention::new(&q).token_scales([of_tokens.view(), of_tokens.slice(s![.., 1.., ..])]);
    let sentence = "v_scales has seqlen 7, expected 8";
    assert_eq!(call.forward(&Device::Cpu, &cache).unwrap_err().to_string(), sentence);
    let (call, mut cache) = (CachedAttention::new(&q).token_scales([of_tokens.view(); 2]), cache);
    let sentence = "no rows are appended to a cache with scales of tokens and heads: write the rows and their scales before";
    let error = call.append_forward(&Device::Cpu, &mut cache, &NewRows::new(&q, &q));
    assert_eq!(error.unwrap_err().to_string(), sentence);
    let of_int8 = KvCache::dense(wave::<i8>((2, 8, 1, 16), 0.5), wave((2, 8, 1, 16), 0.5));
    let sentence = "only k and v may be int8, both of them beside q of 16 bits and with scales of tokens and heads: q is \
                    f16, k int8 and v int8, without such scales";
    assert_eq!(CachedAttention::new(&q).forward(&Device::Cpu, &of_int8).unwrap_err().to_string(), sentence);
}
