//! Attention on the CPU: Algorithm 1 of the paper (arXiv 2407.08608, §3.1) in f32, with a base-2 softmax between two
//! matrix products. Its backward pass is Algorithm 3. `A3:21` is line 21 of Algorithm 3.
//!
//! A tile has the rows of some query positions, of all query heads that share a key/value head. Consecutive tiles form
//! a strip: blocks of K and V are converted to f32 and packed once for all tiles of a strip. Strips run in parallel,
//! and so do the splits of long sequences of keys. A tile multiplies only the keys that its rows see, which the
//! functions of the kernels' tile scheduler give. Results do not depend on the number of threads.

mod backward;
mod cut;
mod exp2;
pub(crate) mod keys;
mod mask;
mod product;
pub(crate) mod queries;
pub(crate) mod rows;
mod strip;
mod tile;
mod unit;

use std::cmp::Reverse;

use fa3_types::{Feature, Known, KnownProblem, UnknownFeature};
use ndarray::{ArrayViewMut4, Axis};
use rayon::prelude::*;

use crate::Scalar;
use cut::{pieces, sequences};
use keys::Keys;
use queries::Queries;
use strip::{Call, Strip};
use unit::ScoreUnit;

pub(crate) use backward::backward;

/// Number of rows of a tile.
const TILE_M: usize = 96;
/// Number of keys of a block.
const TILE_N: usize = 256;
/// Number of elements of one loop iteration, for vector code.
const LANES: usize = 16;
/// Largest number of tiles of a strip.
const STRIP: usize = 8;

/// The features that the forward pass computes. A cache reaches it as sequences of contiguous rows.
pub(crate) const KNOWN: Known = Known::new(
    "the CPU engine",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Tree,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Qv,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Int8Keys,
        Feature::TokenScales,
        Feature::Packed,
        Feature::Used,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// Computes the forward pass into `o` and `of_rows`, which is (batch, heads_q, seqlen_q, 1 or 2): LSE of a row, and its
/// largest score, if the problem has it. The views have the problem's shapes: all come from one [`crate::Attention`] or
/// [`crate::CachedAttention`]. If K and V are paged, the problem has only the sequences' lengths, and `keys` has the
/// pages.
///
/// # Errors
/// The problem has a feature that is not computed.
pub(crate) fn forward<T: Scalar>(
    problem: &KnownProblem,
    queries: Queries<'_, T>,
    keys: Keys<'_>,
    mut o: ArrayViewMut4<'_, T::Output>,
    mut of_rows: ArrayViewMut4<'_, f32>,
) -> Result<(), UnknownFeature> {
    KNOWN.check(problem)?;
    if o.is_empty() {
        // An empty O may have more sequences or heads than a loop can visit.
        return Ok(());
    }
    o.fill(T::Output::default());
    let empty = [problem.lse_form().empty(), f32::NEG_INFINITY];
    of_rows.axis_iter_mut(Axis(3)).zip(empty).for_each(|(mut numbers, empty)| numbers.fill(empty));
    let call = Call { problem, unit: ScoreUnit::of(problem), queries: queries.view(), keys: keys.view() };
    let mut strips = strips(&call, o, of_rows);
    // The longest strips come first, so that no long strip is left for one thread at the end.
    strips.sort_by_key(|strip| Reverse(strip.pairs()));
    strips.into_par_iter().with_max_len(1).for_each(Strip::run);
    Ok(())
}

/// All strips of a call, with their parts of the results.
fn strips<'a, T: Scalar>(
    call: &'a Call<'a, T>,
    o: ArrayViewMut4<'a, T::Output>,
    of_rows: ArrayViewMut4<'a, f32>,
) -> Vec<Strip<'a, T>> {
    let (problem, group) = (call.problem, call.problem.heads().group_size());
    let heads = group.min(TILE_M);
    let positions = TILE_M / heads * tiles_a_strip(problem, heads);
    // (batch, rows, heads, numbers), cut as O is.
    let of_rows = of_rows.permuted_axes([0, 2, 1, 3]);
    let mut strips = vec![];
    let seqs = problem.rows_q();
    for (index, (o, of_rows)) in sequences(seqs, o).into_iter().zip(sequences(seqs, of_rows)).enumerate() {
        let groups = pieces(o, Axis(1), group).into_iter().zip(pieces(of_rows, Axis(1), group));
        for (head_kv, (o, of_rows)) in groups.enumerate() {
            let parts = pieces(o, Axis(1), heads).into_iter().zip(pieces(of_rows, Axis(1), heads));
            for (part, (o, of_rows)) in parts.enumerate() {
                let first_head = head_kv * group + part * heads;
                let places =
                    pieces(o, Axis(0), positions).into_iter().zip(pieces(of_rows, Axis(0), positions));
                strips.extend(places.enumerate().map(|(strip, (o, of_rows))| Strip {
                    call,
                    index,
                    head_kv,
                    first_head,
                    first: strip * positions,
                    o,
                    of_rows,
                }));
            }
        }
    }
    strips
}

/// Number of tiles of a strip, small enough to leave some strips for each thread. A row's result does not depend on
/// this number.
fn tiles_a_strip(problem: &KnownProblem, heads: usize) -> usize {
    let tiles = |index| problem.lengths(index).q.div_ceil(TILE_M / heads);
    let all = (0..problem.batch()).map(tiles).sum::<usize>() * (problem.heads().q() / heads);
    (all / (4 * rayon::current_num_threads())).clamp(1, STRIP)
}

#[cfg(test)]
mod tests {
    use fa3_quant::E4m3;
    use fa3_types::{Dtype, ProblemSpec, Shape, TensorDesc};
    use half::bf16;
    use ndarray::{Array3, Array4};

    use super::*;
    use crate::{Output, OutputGradients};

    #[test]
    fn features_that_are_not_computed_are_refused() {
        let shape = Shape { batch: 1, seqlen: 4, heads: 1, head_dim: 16 };
        let problem = ProblemSpec::dense(Dtype::E4m3, shape, shape).block_scales(128).known().unwrap();
        let x = Array4::<E4m3>::default(shape.dims());
        let (mut o, mut lse) = (Array4::<bf16>::default(shape.dims()), Array3::zeros(problem.lse_shape()));
        let x = x.view();
        let (queries, keys) = (Queries { q: x, qv: None, sink: None }, Keys::new(&x, &x));
        let error =
            forward(&problem, queries, keys, o.view_mut(), lse.view_mut().insert_axis(Axis(3))).unwrap_err();
        assert_eq!(error.to_string(), "the CPU engine cannot compute attention with scales of blocks");

        let x = Array4::<f32>::zeros(shape.dims());
        let qv = TensorDesc::contiguous(Dtype::F32, shape);
        let problem = ProblemSpec::dense(Dtype::F32, shape, shape).qv(qv).known().unwrap();
        let (output, dout) = (Output::new(x.clone(), lse), OutputGradients::new(&x));
        let error = backward(&problem, [x.view(); 3], None, &output, dout).unwrap_err();
        assert_eq!(error.to_string(), "the CPU engine's backward pass cannot compute attention with qv");
    }
}
