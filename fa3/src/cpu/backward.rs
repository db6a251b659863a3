//! The backward pass on the CPU: Algorithm 3 of the paper (Appendix B.1) in f32.
//!
//! A job is one query head of a sequence. It walks over the blocks of keys, and for each of them over the tiles of
//! query rows that see it. dK and dV are added up over a group's heads in the order of the heads, so that gradients are
//! the same bits in every run, on any number of threads.

mod query;

use fa3_types::{Problem, Sequences};
use ndarray::{Array2, Array4, ArrayView3, ArrayView4, Axis, Slice};
use rayon::prelude::*;

use super::matrix;
use super::tile::KeyValue;
use crate::{Gradients, Output, OutputGradients, Scalar};
use query::{HeadGradients, QueryHead};

/// Query rows a tile.
const TILE_M: usize = 128;
/// Keys a block: half of the forward pass's, as there are dK and dV beside K and V.
const TILE_N: usize = 256;

/// The gradients of Q, K and V. All shapes are the problem's: everything comes from one [`crate::Attention`].
pub(crate) fn backward<T: Scalar>(
    problem: &Problem,
    qkv: [ArrayView4<'_, T>; 3],
    output: &Output<T>,
    of: OutputGradients<'_, T>,
) -> Gradients<T> {
    let zeros = |dims: [usize; 4]| Array4::from_elem(dims, T::default());
    let [dq, dk, dv] = [problem.q(), problem.k(), problem.v()].map(|x| zeros(x.shape.dims()));
    let mut gradients = Gradients { dq, dk, dv };
    if qkv.iter().any(|x| x.is_empty()) {
        // No row sees a key. There may be more empty sequences, or heads of them, than can be gone through.
        return gradients;
    }
    let call = Call {
        problem,
        qkv: qkv.each_ref().map(|x| x.view()),
        o: output.o.view(),
        lse: output.lse.view(),
        dout: of.dout.view(),
        dlse: of.dlse.as_ref().map(|dlse| dlse.view()),
    };
    let heads = problem.heads();
    let groups: Vec<Group<T>> = (0..problem.batch() * heads.kv())
        .into_par_iter()
        .map(|job| call.group(job / heads.kv(), job % heads.kv()))
        .collect();
    for (job, group) in groups.into_iter().enumerate() {
        let (index, head_kv) = (job / heads.kv(), job % heads.kv());
        let first = head_kv * heads.group_size();
        for (head, dq) in (first..).zip(&group.dq) {
            put(&mut gradients.dq, problem.seqs_q(), index, head, dq);
        }
        put(&mut gradients.dk, problem.seqs_k(), index, head_kv, &group.dk);
        put(&mut gradients.dv, problem.seqs_k(), index, head_kv, &group.dv);
    }
    gradients
}

/// Writes `rows` where head `head` of sequence `index` lies.
fn put<T: Scalar>(
    tensor: &mut Array4<T>,
    sequences: &Sequences,
    index: usize,
    head: usize,
    rows: &Array2<T>,
) {
    let (batch, first) = sequences.start(index);
    let place = Slice::from(first..first + rows.nrows());
    let mut tensor = tensor.index_axis_mut(Axis(0), batch);
    tensor.index_axis_mut(Axis(1), head).slice_axis_mut(Axis(0), place).assign(rows);
}

/// Everything that is given.
struct Call<'a, T> {
    problem: &'a Problem,
    qkv: [ArrayView4<'a, T>; 3],
    o: ArrayView4<'a, T>,
    lse: ArrayView3<'a, f32>,
    dout: ArrayView4<'a, T>,
    dlse: Option<ArrayView3<'a, f32>>,
}

/// The gradients of query heads that share K and V, and those of K and V.
struct Group<T> {
    dq: Vec<Array2<T>>,
    dk: Array2<T>,
    dv: Array2<T>,
}

impl<T: Scalar> Call<'_, T> {
    /// The group of key/value head `head_kv` of sequence `index`.
    fn group(&self, index: usize, head_kv: usize) -> Group<T> {
        let (problem, len) = (self.problem, self.problem.lengths(index));
        let (batch, first) = problem.seqs_k().start(index);
        let [_, k, v] = &self.qkv;
        let [k, v] = [k, v].map(|x| matrix(x, batch, first..first + len.k, head_kv));
        let kv = KeyValue { k, v };
        let group_size = problem.heads().group_size();
        let heads: Vec<HeadGradients> = (head_kv * group_size..(head_kv + 1) * group_size)
            .into_par_iter()
            .map(|head| self.query(index, head).gradients(&kv))
            .collect();
        let mut dk = Array2::zeros(kv.k.dim());
        let mut dv = Array2::zeros(kv.v.dim());
        for head in &heads {
            dk += &head.dk;
            dv += &head.dv;
        }
        // The scale of the scores is left to the end: one multiplication an element.
        let scale = problem.softmax_scale().natural() as f32;
        Group {
            dq: heads.iter().map(|head| head.dq.mapv(|x| T::from_f32(scale * x))).collect(),
            dk: dk.mapv(|x| T::from_f32(scale * x)),
            dv: dv.mapv(T::from_f32),
        }
    }

    /// Query head `head` of sequence `index`.
    fn query(&self, index: usize, head: usize) -> QueryHead<'_> {
        let (problem, len) = (self.problem, self.problem.lengths(index));
        let (batch, first) = problem.seqs_q().start(index);
        let rows = first..first + len.q;
        let [q, ..] = self.qkv;
        let matrices = [q, self.o, self.dout].map(|x| matrix(&x, batch, rows.clone(), head));
        let vector = |x: ArrayView3<'_, f32>| {
            let x = x.index_axis(Axis(0), batch);
            x.index_axis(Axis(0), head).slice_axis(Axis(0), rows.clone().into()).to_owned()
        };
        QueryHead::new(problem, len, matrices, vector(self.lse), self.dlse.map(vector))
    }
}
