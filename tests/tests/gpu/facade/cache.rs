//! Attention and latent attention over a KV cache, with and without new rows.

use fa3::half::bf16;
use fa3::ndarray::{Array2, Array4, Axis};
use fa3::{Attention, CachedAttention, Device, Error, KvCache, NewRows, Output, Rope, RopeStyle, Scalar};
use fa3_ref::CachedRows;
use fa3_tests::{Arithmetic, Case, Judge, Values};

use super::{in_f32, wave};
use crate::{Fallible, ensure};

/// How a cache locates its sequences.
#[derive(Clone, Copy)]
pub(super) enum Layout {
    Dense,
    Indexed,
    LeftPadded,
    Pages(usize),
}

/// Number of valid rows of each sequence.
const SEQLENS: [i32; 3] = [300, 0, 77];

/// Heads and head dimensions of a call over a cache.
#[derive(Clone, Copy)]
struct Sizes {
    heads: (usize, usize),
    head_dim: usize,
    head_dim_v: usize,
    /// Whether there is `qv`.
    qv: bool,
}

impl Sizes {
    fn of(head_dim: usize) -> Sizes {
        Sizes { heads: (8, 2), head_dim, head_dim_v: head_dim, qv: false }
    }
}

fn cache<T: Scalar + Copy>(layout: Layout, sizes: Sizes) -> KvCache<T> {
    let tensors = |entries, rows| {
        let tensor = |(head_dim, step)| wave((entries, rows, sizes.heads.1, head_dim), step);
        [(sizes.head_dim, 0.9), (sizes.head_dim_v, 1.1)].map(tensor)
    };
    let mut cache = match layout {
        Layout::Dense | Layout::LeftPadded => {
            let [k, v] = tensors(3, 320);
            KvCache::dense(k, v)
        }
        Layout::Indexed => {
            let [k, v] = tensors(5, 320);
            let mut cache = KvCache::dense(k, v);
            cache.cache_batch_idx = Some(vec![3, 0, 4]);
            cache
        }
        Layout::Pages(rows) => {
            let pages = 320 / rows;
            let [k, v] = tensors(4 * pages, rows);
            let page = |(i, page)| ((3 * page + i) * 7 % (4 * pages)) as i32;
            KvCache::paged(k, v, Array2::from_shape_fn((3, pages), page))
        }
    };
    cache.cache_seqlens = SEQLENS.to_vec();
    cache.cache_leftpad = matches!(layout, Layout::LeftPadded).then(|| vec![5, 0, 77]);
    cache
}

/// Checks attention over a cache against the error law, with few and with many rows of Q.
pub(super) fn law<T: Scalar<Output = T> + Copy + PartialEq>(
    layout: Layout,
    head_dim: usize,
) -> Fallible<String> {
    of_rows::<T>(layout, Sizes::of(head_dim), &[1, 4, 150])
}

/// Checks latent attention over pages of `page_rows` rows against the error law.
pub(super) fn latent<T: Scalar<Output = T> + Copy + PartialEq>(page_rows: usize) -> Fallible<String> {
    let sizes = Sizes { heads: (16, 1), head_dim: 64, head_dim_v: 512, qv: true };
    of_rows::<T>(Layout::Pages(page_rows), sizes, &[1])
}

/// Attention before and after appends. The appends leave the same bits in the cache as on the CPU.
fn of_rows<T: Scalar<Output = T> + Copy + PartialEq>(
    layout: Layout,
    sizes: Sizes,
    rows: &[usize],
) -> Fallible<String> {
    let device = &Device::gpu()?;
    let Sizes { heads, head_dim, head_dim_v, qv } = sizes;
    let table = Rope::new(RopeStyle::Interleaved, 32, 10_000.0)?.table(512);
    let mut worst = 0.0_f64;
    for &rows_q in rows {
        let q = wave::<T>((3, rows_q, heads.0, head_dim), 0.7);
        let qv = qv.then(|| wave::<T>((3, rows_q, heads.0, head_dim_v), 1.9));
        let (mut on_gpu, mut on_cpu) = (cache::<T>(layout, sizes), cache(layout, sizes));
        let call = CachedAttention::new(&q).causal();
        let call = qv.iter().fold(call, |call, qv| call.qv(qv));
        let judge = |cache: &KvCache<T>, output| judge((&q, qv.as_ref()), cache, output);
        worst = worst.max(judge(&on_gpu, call.forward(device, &on_gpu)?)?);

        let [k, v] = [(head_dim, 1.3), (head_dim_v, 1.7)].map(|(dim, step)| wave((3, 3, heads.1, dim), step));
        call.append_forward(device, &mut on_gpu, &NewRows::new(&k, &v).rotary(&table))?;
        call.append_forward(&Device::Cpu, &mut on_cpu, &NewRows::new(&k, &v).rotary(&table))?;
        ensure(on_gpu == on_cpu, "the caches differ")?;
        let output = call.append_forward(device, &mut on_gpu, &NewRows::new(&k, &v))?;
        worst = worst.max(judge(&on_gpu, output)?);
    }
    Ok(format!("the law holds, with {:.0} % of its bound", 100.0 * worst))
}

/// Largest ratio of an error to its bound, for a call on Q and an optional `qv`, under a causal mask.
fn judge<T: Scalar<Output = T> + Copy>(
    (q, qv): (&Array4<T>, Option<&Array4<T>>),
    cache: &KvCache<T>,
    output: Output<T>,
) -> Fallible<f64> {
    let own =
        Array2::from_shape_fn((3, 1), |(i, _)| cache.cache_batch_idx.as_ref().map_or(i as i32, |at| at[i]));
    let rows = CachedRows {
        page_table: cache.page_table.as_ref().unwrap_or(&own).view().into(),
        leftpad: cache.cache_leftpad.as_deref().unwrap_or_default(),
        seqused: &cache.cache_seqlens,
    };
    let [k, v] = [&cache.k, &cache.v].map(|x| rows.gather(x.view(), T::default()));
    let seqused = rows.rows(cache.k.len_of(Axis(1)))?.seqused();
    let call = Attention::new(q, &k, &v).seqused_k(&seqused).causal();
    let problem = qv.iter().fold(call, |call, qv| call.qv(*qv)).problem()?;
    let [q, k, v] = [q, &k, &v].map(|x| x.mapv(T::to_f32));
    let qv = qv.map(|qv| qv.mapv(T::to_f32));
    let forward = in_f32(output);
    let values = Values { q, k, v, dout: forward.o.clone(), qv, sink: None };
    let replay = "cargo test --release -p fa3-tests --test gpu facade::cache";
    let case = Case::normal("cache", problem, 0);
    let satisfied = Judge::new(&case, &values).forward(Arithmetic::OfInputs, &forward, replay)?;
    Ok(satisfied.iter().map(|part| part.ratio).fold(0.0, f64::max))
}

/// Attention over a cache where Q and the new rows are packed.
pub(super) fn packed() -> Fallible<String> {
    let device = &Device::gpu()?;
    let (q, kv) = (wave::<bf16>((3, 4, 8, 64), 0.7), wave::<bf16>((3, 3, 2, 64), 1.3));
    let [mut on_gpu, mut on_cpu] = [(); 2].map(|()| cache(Layout::Pages(16), Sizes::of(64)));
    let [of_q, of_kv] = [(&q, 12), (&kv, 9)].map(|(x, rows)| x.to_shape((1, rows, x.len_of(Axis(2)), 64)));
    let (of_q, of_kv) = (of_q?.into_owned(), of_kv?.into_owned());
    let new = NewRows::new(&of_kv, &of_kv).cu_seqlens_k_new(&[0, 3, 6, 9]);
    let call = CachedAttention::new(&of_q).cu_seqlens_q(&[0, 4, 8, 12]).causal();
    let packed = call.append_forward(device, &mut on_gpu, &new)?;
    call.append_forward(&Device::Cpu, &mut on_cpu, &new)?;
    ensure(on_gpu == on_cpu, "the caches differ")?;
    let o = packed.o.to_shape((3, 4, 8, 64))?.into_owned();
    let lse = packed.lse.to_shape((8, 3, 4))?.permuted_axes([1, 0, 2]).into_owned();
    let worst = judge((&q, None), &on_gpu, Output::new(o, lse))?;
    Ok(format!("the law holds, with {:.0} % of its bound", 100.0 * worst))
}

/// The error of attention over an f32 cache.
pub(super) fn of_f32() -> Option<Error> {
    let (q, cache) = (wave::<f32>((3, 1, 8, 64), 0.7), cache::<f32>(Layout::Pages(16), Sizes::of(64)));
    Device::gpu().and_then(|device| CachedAttention::new(&q).forward(&device, &cache)).err()
}
