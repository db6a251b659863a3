//! A cache of random numbers, and what attention over it must be.

use fa3_ref::rows::{RowsLaw, SatisfiedRows, telling_rows};
use fa3_ref::{Element, Inputs, Precision};
use fa3_types::{Dtype, Problem, ProblemSpec, SequenceRows, Shape, TensorDesc};
use half::slice::HalfBitsSliceExt;
use half::{bf16, f16};
use ndarray::{ArrayView3, ArrayView4};

use super::truth::{Check, NoTruth, Wrong, normal};
use crate::cache::CacheLayout;

/// Rows of K and of V that are drawn. Caches repeat them.
const DRAWN_ROWS: usize = 1 << 17;
/// A cache begins so many elements behind those that the one before begins with.
const STEP: usize = 1 << 10;
/// Rows of a tile of queries.
const TILE_ROWS: [usize; 1] = [64];

/// Q, K and V, and the error law of the first and of the last sequence.
pub(super) struct CacheTruth {
    /// The bits of Q.
    pub(super) q: Vec<u16>,
    /// The bits of `qv`, of latent attention.
    pub(super) qv: Option<Vec<u16>>,
    /// Judges O and LSE over the first cache.
    pub(super) check: Check,
    /// Rows of K and of V.
    drawn: [Vec<u16>; 2],
    /// Elements of K and of V.
    counts: [usize; 2],
    /// Columns of a row of K and of V.
    columns: [usize; 2],
}

impl CacheTruth {
    /// # Errors
    /// If the problem is not of 16-bit elements.
    pub(super) fn new(problem: &Problem, layout: &CacheLayout) -> Result<CacheTruth, NoTruth> {
        match problem.dtype() {
            Dtype::F16 => {
                let encode = |x| f16::from_f32(x).to_bits();
                Ok(CacheTruth::of(problem, layout, encode, |bits| bits.reinterpret_cast::<f16>()))
            }
            Dtype::Bf16 => {
                let encode = |x| bf16::from_f32(x).to_bits();
                Ok(CacheTruth::of(problem, layout, encode, |bits| bits.reinterpret_cast::<bf16>()))
            }
            dtype @ (Dtype::F32 | Dtype::E4m3) => Err(NoTruth { dtype }),
        }
    }

    fn of<T: Element + 'static>(
        problem: &Problem,
        layout: &CacheLayout,
        encode: fn(f32) -> u16,
        numbers: fn(&[u16]) -> &[T],
    ) -> CacheTruth {
        let count = |x: &TensorDesc| x.shape.dims().iter().product();
        let q = normal(count(problem.q()), 1, encode);
        let qv = problem.qv().map(|qv| normal(count(qv), 4, encode));
        let columns = [problem.head_dim(), problem.head_dim_v()];
        let joined_q = qv.as_ref().map(|qv| side_by_side((qv, columns[1]), (&q, columns[0])));
        let drawn = [(problem.k(), 2), (problem.v(), 3)].map(|(x, seed)| {
            let Shape { batch, seqlen, heads, head_dim } = x.shape;
            normal((batch * seqlen).clamp(1, DRAWN_ROWS) * heads * head_dim, seed, encode)
        });
        let last = layout.count() - 1;
        let laws = [0, last].map(|sequence| {
            let one = OneSequence::of(problem, layout, &drawn, sequence);
            let law = one.law(joined_q.as_ref().unwrap_or(&q), numbers);
            (sequence, law)
        });
        let counts = [problem.k(), problem.v()].map(count);
        let (o, [_, heads, rows]) = (problem.o().shape, problem.lse_shape());
        let check = move |bits: &[u16], lse: &[f32]| {
            let given = numbers(bits);
            if let Some(at) = given.iter().position(|&x| x.into().is_nan()) {
                return Err(Wrong::Nan { what: "o", at });
            }
            if let Some(at) = lse.iter().position(|x| x.is_nan()) {
                return Err(Wrong::Nan { what: "lse", at });
            }
            let mut all = SatisfiedRows::default();
            for (sequence, law) in &laws {
                let (of_o, of_lse) = (rows * heads * o.head_dim, heads * rows);
                let of_o = &given[sequence * of_o..][..of_o];
                let of_o = ArrayView4::from_shape((1, rows, heads, o.head_dim), of_o);
                let of_lse = ArrayView3::from_shape((1, heads, rows), &lse[sequence * of_lse..][..of_lse]);
                let satisfied =
                    law.check(of_o.expect("o has its elements"), of_lse.expect("lse has its elements"))?;
                all.rows += satisfied.rows;
                all.ratio = all.ratio.max(satisfied.ratio);
            }
            Ok(all)
        };
        CacheTruth { q, qv, check: Box::new(check), drawn, counts, columns }
    }

    /// The bits of K and V of a cache by its number. Those of latent attention are one: rows of V, each with the row of
    /// K behind it.
    pub(super) fn cache(&self, number: usize) -> (Vec<u16>, Option<Vec<u16>>) {
        let [k, v]: [Vec<u16>; 2] = [0, 1].map(|of| {
            let drawn = &self.drawn[of];
            let first = number * STEP % drawn.len();
            drawn[first..].iter().chain(drawn.iter().cycle()).take(self.counts[of]).copied().collect()
        });
        let [columns_k, columns_v] = self.columns;
        if self.qv.is_some() { (side_by_side((&v, columns_v), (&k, columns_k)), None) } else { (k, Some(v)) }
    }
}

/// Rows of two tensors, each of so many columns, side by side.
fn side_by_side((left, of_left): (&[u16], usize), (right, of_right): (&[u16], usize)) -> Vec<u16> {
    let rows = left.chunks_exact(of_left).zip(right.chunks_exact(of_right));
    let mut joined = Vec::with_capacity(left.len() + right.len());
    for (left, right) in rows {
        joined.extend_from_slice(left);
        joined.extend_from_slice(right);
    }
    joined
}

/// A sequence of the first cache as a problem of its own, whose columns are joined if attention is latent.
struct OneSequence {
    number: usize,
    spec: ProblemSpec,
    rows: [SequenceRows; 2],
    kv: [Vec<u16>; 2],
}

impl OneSequence {
    fn of(problem: &Problem, layout: &CacheLayout, drawn: &[Vec<u16>; 2], number: usize) -> OneSequence {
        let (len, [_, page_rows]) = (layout.seqlens[number], layout.extent());
        let table = layout.page_table(0);
        let place = |row: usize| match &table {
            Some(table) => table[[number, row / page_rows]] as usize * page_rows + row % page_rows,
            None => number * page_rows + row,
        };
        let mut kv: [Vec<u16>; 2] = [(problem.k(), 0), (problem.v(), 1)].map(|(x, of)| {
            let columns = x.shape.heads * x.shape.head_dim;
            let row = |row: usize| &drawn[of][place(row) * columns % drawn[of].len()..][..columns];
            (0..len).flat_map(row).copied().collect()
        });
        if problem.qv().is_some() {
            kv[0] = side_by_side((&kv[1], problem.head_dim_v()), (&kv[0], problem.head_dim()));
        }
        let alone =
            |x: &TensorDesc, seqlen| TensorDesc::contiguous(x.dtype, Shape { batch: 1, seqlen, ..x.shape });
        let rows = problem.q().shape.seqlen;
        let [q, o] = [problem.q(), problem.o()].map(|x| alone(x, rows));
        let [k, v] = [problem.k(), problem.v()].map(|x| alone(x, len));
        let mut spec = ProblemSpec::new(q, k, v, o).mask(problem.mask());
        spec.qv = problem.qv().map(|qv| alone(qv, rows));
        spec.softmax_scale = Some(problem.softmax_scale().natural());
        let rows = [rows, len].map(|rows| SequenceRows::dense(1, rows));
        OneSequence { number, spec, rows, kv }
    }

    /// The error law of its rows.
    fn law<T: Element>(self, q: &[u16], numbers: fn(&[u16]) -> &[T]) -> RowsLaw {
        let [rows_q, rows_k] = self.rows;
        let known = self.spec.with_rows(rows_q, rows_k).expect("it is a part of a valid problem").joined();
        let of_q = known.q().shape.dims().iter().product::<usize>();
        let q = &q[self.number * of_q..][..of_q];
        let view = |x: &TensorDesc, bits| {
            ArrayView4::from_shape(x.shape.dims(), numbers(bits)).expect("they are so many")
        };
        let (q, k, v) = (view(known.q(), q), view(known.k(), &self.kv[0]), view(known.v(), &self.kv[1]));
        let inputs = Inputs::new(&known, q, k, v).expect("the arrays have the problem's shapes");
        RowsLaw::new(&inputs, Precision::of_output(known.dtype()), &telling_rows(&known, &TILE_ROWS))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3::ndarray::{Array2, Array4, Axis};
    use fa3::{CachedAttention, Device, KvCache};

    fn problem(layout: &CacheLayout) -> Problem {
        let [batch, seqlen] = layout.extent();
        let q = Shape { batch: layout.count(), seqlen: 4, heads: 4, head_dim: 64 };
        let spec = ProblemSpec::dense(Dtype::Bf16, q, Shape { batch, seqlen, heads: 2, head_dim: 64 });
        spec.seqs_k(layout.sequences()).causal().validate().unwrap()
    }

    /// The CPU's result over the first cache is right, and others are not.
    #[test]
    fn results_are_judged() {
        for page_size in [None, Some(16)] {
            let layout = CacheLayout { seqlens: vec![200, 7, 33], room: 0, page_size };
            let problem = problem(&layout);
            let truth = CacheTruth::new(&problem, &layout).unwrap();
            let array = |bits: &[u16], shape: Shape| {
                Array4::from_shape_vec(shape.dims(), bits.reinterpret_cast::<bf16>().to_vec()).unwrap()
            };
            let (k, v) = truth.cache(0);
            let [k, v] = [k, v.unwrap()].map(|bits| array(&bits, problem.k().shape));
            let table: Option<Array2<i32>> = layout.page_table(0);
            let mut cache = match table {
                Some(table) => KvCache::paged(k, v, table),
                None => KvCache::dense(k, v),
            };
            cache.cache_seqlens = vec![200, 7, 33];
            let q = array(&truth.q, problem.q().shape);
            let output = CachedAttention::new(&q).causal().forward(&Device::Cpu, &cache).unwrap();
            let mut o: Vec<u16> = output.o.iter().map(|x| x.to_bits()).collect();
            let lse: Vec<f32> = output.lse.iter().copied().collect();
            let satisfied = (truth.check)(&o, &lse).unwrap();
            assert!(satisfied.rows == 32 && satisfied.ratio < 1.0, "{satisfied:?}");
            for (at, bits) in [(0, 0x40A0), (2 * 4 * 4 * 64, 0x40A0), (4 * 4 * 64, 0xFFFF)] {
                let right = std::mem::replace(&mut o[at], bits);
                assert!((truth.check)(&o, &lse).is_err(), "{at}");
                o[at] = right;
            }
        }
    }

    /// As above, where K and V are views of the cache.
    #[test]
    fn results_of_latent_attention_are_judged() {
        let layout = CacheLayout { seqlens: vec![90, 7, 33], room: 0, page_size: Some(16) };
        let [batch, seqlen] = layout.extent();
        let q = Shape { batch: 3, seqlen: 2, heads: 4, head_dim: 8 };
        let spec = ProblemSpec::dense(Dtype::Bf16, q, Shape { batch, seqlen, heads: 1, head_dim: 8 });
        let spec = spec.head_dim_v(24).seqs_k(layout.sequences()).causal();
        let qv = spec.o;
        let problem = spec.qv(qv).validate().unwrap();
        let truth = CacheTruth::new(&problem, &layout).unwrap();
        let array = |bits: &[u16], dims: [usize; 4]| {
            Array4::from_shape_vec(dims, bits.reinterpret_cast::<bf16>().to_vec()).unwrap()
        };
        let (both, apart) = truth.cache(0);
        assert_eq!(apart, None);
        let both = array(&both, [batch, seqlen, 1, 32]);
        let (v, k) = both.view().split_at(Axis(3), 24);
        let mut cache = KvCache::paged(k.to_owned(), v.to_owned(), layout.page_table(0).unwrap());
        cache.cache_seqlens = vec![90, 7, 33];
        let (q, qv) = (array(&truth.q, q.dims()), array(truth.qv.as_ref().unwrap(), qv.shape.dims()));
        let output = CachedAttention::new(&q).qv(&qv).causal().forward(&Device::Cpu, &cache).unwrap();
        let mut o: Vec<u16> = output.o.iter().map(|x| x.to_bits()).collect();
        let lse: Vec<f32> = output.lse.iter().copied().collect();
        let satisfied = (truth.check)(&o, &lse).unwrap();
        assert!(satisfied.rows == 16 && satisfied.ratio < 1.0, "{satisfied:?}");
        o[0] = 0x40A0;
        assert!((truth.check)(&o, &lse).is_err());
        // Without the latent columns' part of the scores.
        let output = CachedAttention::new(&q).causal().forward(&Device::Cpu, &cache).unwrap();
        let o: Vec<u16> = output.o.iter().map(|x| x.to_bits()).collect();
        assert!((truth.check)(&o, &lse).is_err());
    }

    #[test]
    fn caches_differ() {
        let layout = CacheLayout { seqlens: vec![200, 7, 33], room: 0, page_size: Some(16) };
        let truth = CacheTruth::new(&problem(&layout), &layout).unwrap();
        let [first, second] = [0, 1].map(|number| truth.cache(number));
        assert!(first != second && first.1.as_ref() != Some(&first.0) && first.0.len() == second.0.len());
    }
}
