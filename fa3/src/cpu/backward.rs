//! The backward pass on the CPU: Algorithm 3 of the paper (Appendix B.1) in f32.
//!
//! A job is one query head of a sequence. It visits the blocks of keys, and for each block the tiles of query rows that
//! see it. dK and dV are added over a group's heads in the order of the heads, so gradients have the same bits in every
//! run, on any number of threads.

mod head;
mod sink;
mod tile;

use std::cmp::Reverse;
use std::mem::take;

use fa3_types::{Feature, Known, KnownProblem, UnknownFeature};
use ndarray::{Array4, ArrayView1, ArrayView3, ArrayView4, ArrayViewMut2, ArrayViewMut3, Axis};
use rayon::prelude::*;

use super::cut::{pieces, sequences};
use super::rows::{Rows, write};
use crate::{Gradients, Output, OutputGradients, Scalar};
use head::{HeadGradients, QueryHead};
use tile::TableGradients;

/// Number of query rows of a tile.
const TILE_M: usize = 96;
/// Number of keys of a block: half of the forward pass's number, as there are dK and dV beside K and V.
const TILE_N: usize = 128;

/// The features whose gradients are computed.
const KNOWN: Known = Known::new(
    "the CPU engine's backward pass",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::Packed,
        Feature::Used,
    ],
);

/// The gradients of Q, K, V, sinks and tables. All arrays have the problem's shapes: they come from one
/// [`crate::Attention`].
///
/// # Errors
/// The problem has a feature without gradients.
pub(crate) fn backward<T: Scalar>(
    problem: &KnownProblem,
    qkv: [ArrayView4<'_, T>; 3],
    sink: Option<ArrayView1<'_, f32>>,
    output: &Output<T>,
    of: OutputGradients<'_, T>,
) -> Result<Gradients<T>, UnknownFeature> {
    KNOWN.check(problem)?;
    let zeros = |dims: [usize; 4]| Array4::from_elem(dims, T::default());
    let [dq, dk, dv] = [problem.q(), problem.k(), problem.v()].map(|x| zeros(x.shape.dims()));
    let mut gradients = Gradients::new([dq, dk, dv]);
    let call = Call {
        problem,
        qkv: qkv.each_ref().map(|x| x.view()),
        o: output.o.view(),
        lse: output.lse.view(),
        dout: of.dout.view(),
        dlse: of.dlse.as_ref().map(|dlse| dlse.view()),
    };
    gradients.dsink = sink.map(|sink| sink::gradient(&call, sink));
    gradients.dtables = problem.score_zeros();
    if qkv.iter().any(|x| x.is_empty()) {
        // No row sees a key. An empty tensor may have more sequences or heads than a loop can visit.
        return Ok(gradients);
    }
    let mut groups = groups(problem, &mut gradients);
    // The longest groups come first, so that no long group is left for one thread at the end.
    groups.sort_by_key(|group| Reverse(group.dq.len_of(Axis(0)) * group.dk.len_of(Axis(0))));
    // A table's gradient is added in the order of these groups, and of the heads of each.
    let of_tables: Vec<_> = groups.into_par_iter().with_max_len(1).map(|group| call.group(group)).collect();
    let mut sums: Vec<Vec<f64>> = problem.score_zeros();
    for ((table, place), x) in of_tables.into_iter().flatten().flatten() {
        sums[table][place] += x;
    }
    gradients.dtables =
        sums.into_iter().map(|sums| sums.into_iter().map(|sum| sum as f32).collect()).collect();
    Ok(gradients)
}

/// Query heads that share K and V, and their gradients.
struct Group<'a, T> {
    /// The sequence.
    index: usize,
    head_kv: usize,
    /// dQ (rows, heads, head_dim).
    dq: ArrayViewMut3<'a, T>,
    /// dK (keys, 1, head_dim).
    dk: ArrayViewMut3<'a, T>,
    /// dV (keys, 1, head_dim_v).
    dv: ArrayViewMut3<'a, T>,
}

/// All groups of a call.
fn groups<'a, T>(problem: &KnownProblem, gradients: &'a mut Gradients<T>) -> Vec<Group<'a, T>> {
    let group_size = problem.heads().group_size();
    let dq = sequences(problem.rows_q(), gradients.dq.view_mut());
    let dk = sequences(problem.rows_k(), gradients.dk.view_mut());
    let dv = sequences(problem.rows_k(), gradients.dv.view_mut());
    let mut groups = vec![];
    for (index, ((dq, dk), dv)) in dq.into_iter().zip(dk).zip(dv).enumerate() {
        let [dk, dv] = [dk, dv].map(|x| pieces(x, Axis(1), 1));
        let heads = pieces(dq, Axis(1), group_size).into_iter().zip(dk).zip(dv).enumerate();
        groups.extend(heads.map(|(head_kv, ((dq, dk), dv))| Group { index, head_kv, dq, dk, dv }));
    }
    groups
}

/// The inputs of a call.
struct Call<'a, T> {
    problem: &'a KnownProblem,
    qkv: [ArrayView4<'a, T>; 3],
    o: ArrayView4<'a, T>,
    lse: ArrayView3<'a, f32>,
    dout: ArrayView4<'a, T>,
    dlse: Option<ArrayView3<'a, f32>>,
}

impl<T: Scalar> Call<'_, T> {
    /// Computes the gradients of a group. Returns the gradients of tables, for each head.
    fn group(&self, group: Group<'_, T>) -> Vec<TableGradients> {
        let Group { index, head_kv, mut dq, dk, dv } = group;
        let problem = self.problem;
        let (batch, first) = problem.rows_k().start(index);
        let keys = first..first + problem.lengths(index).k;
        let [_, k, v] = self.qkv;
        let [k, v] = [k, v].map(|x| Rows::of(x, batch, keys.clone(), head_kv));
        let group_size = problem.heads().group_size();
        let mut heads: Vec<HeadGradients> = (head_kv * group_size..(head_kv + 1) * group_size)
            .into_par_iter()
            .map(|head| self.query(index, head).gradients(k, v))
            .collect();
        // The softmax scale is applied at the end: one multiplication for each element.
        let scale = problem.softmax_scale().natural() as f32;
        for (dq, head) in dq.axis_iter_mut(Axis(1)).zip(&heads) {
            put(dq, &head.dq, scale);
        }
        let of_tables = heads.iter_mut().map(|head| take(&mut head.dtables)).collect();
        let sums = heads.into_iter().reduce(|mut sums, head| {
            sums.dk.iter_mut().zip(head.dk).for_each(|(sum, dk)| *sum += dk);
            sums.dv.iter_mut().zip(head.dv).for_each(|(sum, dv)| *sum += dv);
            sums
        });
        if let Some(sums) = sums {
            put(dk.index_axis_move(Axis(1), 0), &sums.dk, scale);
            put(dv.index_axis_move(Axis(1), 0), &sums.dv, 1.0);
        }
        of_tables
    }

    /// Query head `head` of sequence `index`.
    fn query(&self, index: usize, head: usize) -> QueryHead<'_> {
        let (problem, len) = (self.problem, self.problem.lengths(index));
        let (batch, first) = problem.rows_q().start(index);
        let rows = first..first + len.q;
        let [q, ..] = self.qkv;
        let matrices = [q, self.o, self.dout].map(|x| Rows::of(x, batch, rows.clone(), head));
        let vector = |x: ArrayView3<'_, f32>| {
            let x = x.index_axis(Axis(0), batch);
            x.index_axis(Axis(0), head).slice_axis(Axis(0), rows.clone().into()).to_vec()
        };
        QueryHead::new(problem, [index, head], matrices, &vector(self.lse), self.dlse.map(vector).as_deref())
    }
}

/// Writes `scale` times the rows `from` to `to`.
fn put<T: Scalar>(mut to: ArrayViewMut2<'_, T>, from: &[f32], scale: f32) {
    let columns = to.ncols();
    for (to, from) in to.rows_mut().into_iter().zip(from.chunks_exact(columns)) {
        let row: Vec<f32> = from.iter().map(|x| scale * x).collect();
        write(to, &row);
    }
}
