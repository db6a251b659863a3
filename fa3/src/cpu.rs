//! Attention on the CPU: Algorithm 1 of the paper (arXiv 2407.08608, §3.1) in f32, with matrix products by
//! `matrixmultiply` (through ndarray) and a base-2 softmax between them. Its backward pass is Algorithm 3.
//!
//! A job is one block of query rows of one head; jobs run in parallel. Key blocks that no row sees are skipped and
//! those that every row sees are not masked, by the same KV ranges that the kernels will use.

mod backward;
mod exp2;
mod tile;
mod unit;

use std::ops::Range;

use fa3_types::Problem;
use ndarray::{Array1, Array2, ArrayView4, ArrayViewMut3, ArrayViewMut4, Axis};
use rayon::prelude::*;

use crate::Scalar;
use tile::KeyValue;

pub(crate) use backward::backward;

/// Query rows a tile.
const TILE_M: usize = 128;
/// Keys a block: with head_dim 128, a block of K and one of V are 256 KB each, in reach of a core's L2 cache.
const TILE_N: usize = 512;

/// The forward pass into `o` and `lse`. The views have the problem's shapes: both come from one [`crate::Attention`].
pub(crate) fn forward<T: Scalar>(
    problem: &Problem,
    qkv: [ArrayView4<'_, T>; 3],
    mut o: ArrayViewMut4<'_, T::Output>,
    mut lse: ArrayViewMut3<'_, f32>,
) {
    if o.is_empty() {
        // There may be more empty sequences, or heads of them, than can be gone through.
        return;
    }
    o.fill(T::Output::default());
    lse.fill(f32::NEG_INFINITY);
    let tiles: Vec<TileOutput<T::Output>> =
        (0..problem.batch()).into_par_iter().flat_map(|index| sequence(problem, qkv, index)).collect();
    for TileOutput { batch, head, first_row, o: tile_o, lse: tile_lse } in tiles {
        let rows = first_row..first_row + tile_lse.len();
        let mut o = o.index_axis_mut(Axis(0), batch);
        o.index_axis_mut(Axis(1), head).slice_axis_mut(Axis(0), rows.clone().into()).assign(&tile_o);
        let mut lse = lse.index_axis_mut(Axis(0), batch);
        lse.index_axis_mut(Axis(0), head).slice_axis_mut(Axis(0), rows.into()).assign(&tile_lse);
    }
}

/// A tile's result and where it belongs.
struct TileOutput<T> {
    batch: usize,
    head: usize,
    first_row: usize,
    o: Array2<T>,
    lse: Array1<f32>,
}

/// All tiles of one sequence.
fn sequence<T: Scalar>(
    problem: &Problem,
    [q, k, v]: [ArrayView4<'_, T>; 3],
    index: usize,
) -> Vec<TileOutput<T::Output>> {
    let (heads, len) = (problem.heads(), problem.lengths(index));
    let (batch, first_q) = problem.seqs_q().start(index);
    let (batch_k, first_k) = problem.seqs_k().start(index);
    let keys = first_k..first_k + len.k;
    let kv: Vec<KeyValue> = (0..heads.kv())
        .into_par_iter()
        .map(|head| KeyValue {
            k: matrix(&k, batch_k, keys.clone(), head),
            v: matrix(&v, batch_k, keys.clone(), head),
        })
        .collect();
    let tiles = len.q.div_ceil(TILE_M);
    (0..heads.q() * tiles)
        .into_par_iter()
        .map(|job| {
            let (head, m_block) = (job / tiles, job % tiles);
            let first_row = first_q + m_block * TILE_M;
            let rows = first_row..(first_q + len.q).min(first_row + TILE_M);
            let q = matrix(&q, batch, rows, head);
            let (o, lse) = tile::attend(problem, len, m_block, q, &kv[heads.kv_head(head)]);
            TileOutput { batch, head, first_row, o: o.mapv(T::Output::from_f32), lse }
        })
        .collect()
}

/// Rows of one head, contiguous and in f32.
fn matrix<T: Scalar>(
    tensor: &ArrayView4<'_, T>,
    batch: usize,
    rows: Range<usize>,
    head: usize,
) -> Array2<f32> {
    let tensor = tensor.index_axis(Axis(0), batch);
    tensor.index_axis(Axis(1), head).slice_axis(Axis(0), rows.into()).mapv(T::to_f32)
}

#[cfg(test)]
mod tests {
    use crate::{Attention, Device};
    use fa3_ref::law::ForwardLaw;
    use fa3_ref::{Forward, Inputs, Precision};
    use half::f16;
    use ndarray::{Array4, Axis};

    /// Judges f16 attention of 300 queries over 1700 keys: 3 tiles by 4 blocks.
    fn check(with: impl Fn(Attention<'_, f16>) -> Attention<'_, f16>) {
        let mut x = 0.0f32;
        let mut wave = |heads, seqlen, step: f32| {
            Array4::from_shape_simple_fn((1, seqlen, heads, 64), || {
                x += step;
                f16::from_f32(2.0 * x.sin())
            })
        };
        let (q, k, v) = (wave(2, 300, 0.7), wave(1, 1700, 0.9), wave(1, 1700, 1.1));
        let attention = with(Attention::new(q.view(), k.view(), v.view()));
        let output = attention.forward(&Device::Cpu).unwrap();
        let problem = attention.problem().unwrap();
        let inputs = Inputs::new(&problem, q.view(), k.view(), v.view()).unwrap();
        let forward = Forward { o: output.o.mapv(f16::to_f32), lse: output.lse };
        ForwardLaw::new(&inputs, Precision::F16).check(&forward, "cargo test -p fa3 cpu").unwrap();
    }

    #[test]
    fn without_a_mask() {
        check(|attention| attention);
    }

    /// Blocks 0 and 1 are visible in full, 2 and 3 in part.
    #[test]
    fn causal() {
        check(|attention| attention.causal());
    }

    /// Under a causal mask, with a NaN in V at key `bad`: which rows are NaN, which are 0; LSE is what it is without.
    fn rows_with_a_nan_in_v(queries: usize, keys: usize, bad: usize) -> [Vec<usize>; 2] {
        let wave =
            |seqlen| Array4::from_shape_fn((1, seqlen, 1, 8), |(_, s, _, d)| ((s + 5 * d) as f32).sin());
        let (q, k, mut v) = (wave(queries), wave(keys), wave(keys));
        let attend = |v: &Array4<f32>| {
            Attention::new(q.view(), k.view(), v.view()).causal().forward(&Device::Cpu).unwrap()
        };
        let clean = attend(&v);
        v.index_axis_mut(Axis(1), bad).fill(f32::NAN);
        let dirty = attend(&v);
        assert_eq!(dirty.lse, clean.lse);
        let row = |x: &Array4<f32>, row: usize| x.index_axis(Axis(1), row).to_owned();
        let (nan, rest): (Vec<usize>, Vec<usize>) =
            (0..queries).partition(|&index| row(&dirty.o, index).iter().all(|x| x.is_nan()));
        assert!(rest.iter().all(|&index| row(&dirty.o, index) == row(&clean.o, index)));
        [nan, rest.into_iter().filter(|&index| row(&clean.o, index).iter().all(|&x| x == 0.0)).collect()]
    }

    /// What [`Attention`] says: every row of a tile that visits the NaN's block, also those that see no key of that
    /// block, but none that sees no key at all.
    #[test]
    fn a_nan_in_v_reaches_whole_tiles() {
        // Row r sees the keys up to r + 1400. Block 3 begins at 1536, which rows from 136 on see: tiles 1 and 2.
        let [nan, zero] = rows_with_a_nan_in_v(300, 1700, 1600);
        assert_eq!((nan, zero), ((128..300).collect(), vec![]));
        // Only the last 20 rows see a key. They are in tile 2.
        let [nan, zero] = rows_with_a_nan_in_v(300, 20, 0);
        assert_eq!((nan, zero), ((280..300).collect(), (0..280).collect()));
    }

    /// Block 0 is skipped, the others are visible in part.
    #[test]
    fn window_and_cap() {
        check(|attention| attention.window(Some(700), Some(3)).softcap(8.0));
    }
}
