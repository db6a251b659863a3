//! Results, and their assembly from the heads' results.

use std::ops::AddAssign;

use fa3_types::{KnownProblem, SequenceRows};
use ndarray::{Array1, Array2, Array3, Array4, Axis, Slice};
use rayon::prelude::*;

/// Results of the forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward<F> {
    /// Output (batch, seqlen_q, heads_q, head_dim_v). It is 0 for a row with no visible key and for rows outside every
    /// sequence.
    pub o: Array4<F>,
    /// Natural log-sum-exp (batch, heads_q, seqlen_q), batch 1 for packed sequences. It is -inf for rows with no
    /// visible key (their sink, if heads have sinks) and for rows outside every sequence.
    pub lse: Array3<F>,
}

/// Results of the backward pass. Each has the shape of its tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<F> {
    /// dQ (batch, seqlen_q, heads_q, head_dim).
    pub dq: Array4<F>,
    /// dK (batch, seqlen_k, heads_kv, head_dim), summed over the group's query heads.
    pub dk: Array4<F>,
    /// dV (batch, seqlen_k, heads_kv, head_dim_v), summed over the group's query heads.
    pub dv: Array4<F>,
    /// dsink (heads_q), if the problem has sinks.
    pub dsink: Option<Array1<F>>,
    /// The gradients of the tables of a function of scores, each in row-major order. A table without gradient has no
    /// elements here.
    pub dtables: Vec<Vec<F>>,
}

impl<F: Copy> Forward<F> {
    /// O and LSE of one head of a sequence.
    pub(crate) fn head(&self, problem: &KnownProblem, index: usize, head: usize) -> HeadForward<F> {
        let (batch, first) = problem.rows_q().start(index);
        let rows = Slice::from(first..first + problem.rows_q().len(index));
        let o = self.o.index_axis(Axis(0), batch).index_axis_move(Axis(1), head);
        let lse = self.lse.index_axis(Axis(0), batch).index_axis_move(Axis(0), head);
        let (o, lse) = (o.slice_axis(Axis(0), rows), lse.slice_axis(Axis(0), rows));
        HeadForward { o: o.as_standard_layout().into_owned(), lse: lse.to_owned() }
    }
}

/// One head's forward result: O (seqlen_q, head_dim_v) and LSE (seqlen_q).
pub(crate) struct HeadForward<F> {
    pub(crate) o: Array2<F>,
    pub(crate) lse: Array1<F>,
}

/// One key/value head's backward result; dQ of each query head of the group.
pub(crate) struct GroupGradients<F> {
    pub(crate) dq: Vec<Array2<F>>,
    pub(crate) dk: Array2<F>,
    pub(crate) dv: Array2<F>,
    pub(crate) dtables: Vec<Vec<F>>,
}

/// Runs `head(sequence, head_q)` for every head of every sequence in parallel and stores the results.
pub(crate) fn forward_heads<F>(
    problem: &KnownProblem,
    head: impl Fn(usize, usize) -> HeadForward<F> + Sync,
) -> Forward<F>
where
    F: Copy + Default + Send + From<f32>,
{
    let heads = problem.heads().q();
    let results: Vec<HeadForward<F>> =
        (0..problem.batch() * heads).into_par_iter().map(|i| head(i / heads, i % heads)).collect();
    let mut o = Array4::from_elem(problem.o().shape.dims(), F::default());
    let mut lse = Array3::from_elem(problem.lse_shape(), F::from(f32::NEG_INFINITY));
    for (i, result) in results.into_iter().enumerate() {
        let (index, head) = (i / heads, i % heads);
        put(&mut o, problem.rows_q(), index, head, &result.o);
        let (batch, first) = problem.rows_q().start(index);
        let rows = first..first + problem.rows_q().len(index);
        let mut lse_head = lse.index_axis_mut(Axis(0), batch);
        lse_head.index_axis_mut(Axis(0), head).slice_axis_mut(Axis(0), rows.into()).assign(&result.lse);
    }
    Forward { o, lse }
}

/// Runs `group(sequence, head_kv)` for every key/value head of every sequence in parallel and stores the results,
/// beside `dsink`. There are `N` sets of gradients.
pub(crate) fn backward_groups<F, const N: usize>(
    problem: &KnownProblem,
    dsink: [Option<Array1<F>>; N],
    group: impl Fn(usize, usize) -> [GroupGradients<F>; N] + Sync,
) -> [Gradients<F>; N]
where
    F: Copy + Default + Send + AddAssign,
{
    let heads = problem.heads();
    let results: Vec<[GroupGradients<F>; N]> = (0..problem.batch() * heads.kv())
        .into_par_iter()
        .map(|i| group(i / heads.kv(), i % heads.kv()))
        .collect();
    let zeros = |dims: [usize; 4]| Array4::from_elem(dims, F::default());
    let [q, k, v] = [problem.q(), problem.k(), problem.v()].map(|tensor| tensor.shape.dims());
    let mut gradients = dsink.map(|dsink| {
        let dtables = problem.score_zeros();
        Gradients { dq: zeros(q), dk: zeros(k), dv: zeros(v), dsink, dtables }
    });
    for (i, results) in results.into_iter().enumerate() {
        let (index, head_kv) = (i / heads.kv(), i % heads.kv());
        for (gradients, result) in gradients.iter_mut().zip(results) {
            for (j, dq_head) in result.dq.iter().enumerate() {
                let head_q = head_kv * heads.group_size() + j;
                put(&mut gradients.dq, problem.rows_q(), index, head_q, dq_head);
            }
            put(&mut gradients.dk, problem.rows_k(), index, head_kv, &result.dk);
            put(&mut gradients.dv, problem.rows_k(), index, head_kv, &result.dv);
            add_tables(&mut gradients.dtables, &result.dtables);
        }
    }
    gradients
}

/// Adds gradients of tables to others.
pub(crate) fn add_tables<F: Copy + AddAssign>(sums: &mut [Vec<F>], tables: &[Vec<F>]) {
    sums.iter_mut().flatten().zip(tables.iter().flatten()).for_each(|(sum, &x)| *sum += x);
}

/// Writes `rows` to the rows of head `head` of sequence `index` in `tensor`.
fn put<F: Copy>(
    tensor: &mut Array4<F>,
    sequences: &SequenceRows,
    index: usize,
    head: usize,
    rows: &Array2<F>,
) {
    let (batch, first) = sequences.start(index);
    let place = (first..first + sequences.len(index)).into();
    let mut tensor = tensor.index_axis_mut(Axis(0), batch);
    tensor.index_axis_mut(Axis(1), head).slice_axis_mut(Axis(0), place).assign(rows);
}
