//! Slices and reorderings of problems, for properties that relate two calls.

use fa3_types::{KnownProblem, SequenceRows, Shape, TensorDesc};
use ndarray::{Array1, Array3, Array4, ArrayView4, Axis};

use crate::Values;

/// A problem with the sequences and heads of another problem in reverse order.
pub struct Reversed {
    /// The reversed problem.
    pub problem: KnownProblem,
    order_q: Order,
    order_k: Order,
}

/// Source index of each row of a tensor: a permutation of the batch, or of the rows of a packed tensor.
struct Order {
    axis: Axis,
    from: Vec<usize>,
}

impl Reversed {
    /// Reverses `problem`.
    ///
    /// # Panics
    /// Never: the order of sequences and heads does not affect whether a problem is valid.
    pub fn new(problem: &KnownProblem) -> Reversed {
        let reversed = problem.spec().with_rows(reverse(problem.rows_q()), reverse(problem.rows_k()));
        Reversed {
            order_q: Order::reversed(problem.rows_q(), problem.q().shape.seqlen),
            order_k: Order::reversed(problem.rows_k(), problem.k().shape.seqlen),
            problem: reversed.expect("the order of sequences does not matter"),
        }
    }

    /// Values of the problem, rearranged for the reversed one.
    pub fn values(&self, values: &Values) -> Values {
        Values {
            q: self.order_q.apply(&values.q),
            k: self.order_k.apply(&values.k),
            v: self.order_k.apply(&values.v),
            dout: self.order_q.apply(&values.dout),
            qv: values.qv.as_ref().map(|qv| self.order_q.apply(qv)),
            sink: values.sink.as_ref().map(reversed),
        }
    }

    /// dsink of the reversed problem, put back in order.
    pub fn sink<F: Copy>(&self, x: &Array1<F>) -> Array1<F> {
        reversed(x)
    }

    /// O or dQ of the reversed problem, put back in order.
    pub fn rows_q<F: Copy>(&self, x: &Array4<F>) -> Array4<F> {
        self.order_q.inverse().apply(x)
    }

    /// dK or dV of the reversed problem, put back in order.
    pub fn rows_k<F: Copy>(&self, x: &Array4<F>) -> Array4<F> {
        self.order_k.inverse().apply(x)
    }

    /// LSE of the reversed problem, put back in order.
    pub fn lse<F: Copy>(&self, lse: &Array3<F>) -> Array3<F> {
        let as_rows = lse.view().permuted_axes([0, 2, 1]).insert_axis(Axis(3)).to_owned();
        self.rows_q(&as_rows).index_axis_move(Axis(3), 0).permuted_axes([0, 2, 1]).to_owned()
    }
}

impl Order {
    fn reversed(sequences: &SequenceRows, rows: usize) -> Order {
        let count = sequences.count();
        if !sequences.is_packed() {
            return Order { axis: Axis(0), from: (0..count).rev().collect() };
        }
        let rows_of = |index| {
            let (_, first) = sequences.start(index);
            first..first + sequences.capacity(index)
        };
        let mut from: Vec<usize> = (0..count).rev().flat_map(rows_of).collect();
        from.extend(from.len()..rows);
        Order { axis: Axis(1), from }
    }

    fn inverse(&self) -> Order {
        let mut from = vec![0; self.from.len()];
        self.from.iter().enumerate().for_each(|(to, &source)| from[source] = to);
        Order { axis: self.axis, from }
    }

    /// Reorders the rows, and reverses the heads.
    fn apply<F: Copy>(&self, x: &Array4<F>) -> Array4<F> {
        let mut ordered = x.select(self.axis, &self.from);
        ordered.invert_axis(Axis(2));
        ordered.as_standard_layout().into_owned()
    }
}

fn reversed<F: Copy>(of_heads: &Array1<F>) -> Array1<F> {
    of_heads.iter().rev().copied().collect()
}

fn reverse(sequences: &SequenceRows) -> SequenceRows {
    let order = || (0..sequences.count()).rev();
    let used: Vec<i32> = order().map(|index| sequences.len(index) as i32).collect();
    let reversed = if sequences.is_packed() {
        SequenceRows::packed_lengths(&order().map(|index| sequences.capacity(index)).collect::<Vec<_>>())
    } else {
        sequences.clone()
    };
    reversed.with_used(&used).expect("each sequence keeps its capacity")
}

/// One query head of one sequence as a problem of its own: dense, one sequence, one head, valid rows only.
pub fn alone(problem: &KnownProblem, values: &Values, index: usize, head_q: usize) -> (KnownProblem, Values) {
    let (rows_q, rows_k) = (problem.rows_q(), problem.rows_k());
    let head_kv = problem.heads().kv_head(head_q);
    let values = Values {
        q: rows(values.q.view(), rows_q, index, head_q),
        k: rows(values.k.view(), rows_k, index, head_kv),
        v: rows(values.v.view(), rows_k, index, head_kv),
        dout: rows(values.dout.view(), rows_q, index, head_q),
        qv: values.qv.as_ref().map(|qv| rows(qv.view(), rows_q, index, head_q)),
        sink: values.sink.as_ref().map(|sink| Array1::from_elem(1, sink[head_q])),
    };
    (dense_like(problem, &values), values)
}

/// The valid rows of one head of one sequence.
pub fn rows<F: Copy>(x: ArrayView4<'_, F>, sequences: &SequenceRows, index: usize, head: usize) -> Array4<F> {
    let (batch, first) = sequences.start(index);
    let ranges = [batch..batch + 1, first..first + sequences.len(index), head..head + 1];
    let part = ranges
        .into_iter()
        .enumerate()
        .fold(x, |x, (axis, range)| x.slice_axis_move(Axis(axis), range.into()));
    part.to_owned()
}

/// A dense problem with these values as its tensors, and with the other properties of `problem`.
///
/// # Panics
/// If the shapes of the values do not match: they must be slices of values of `problem`.
pub fn dense_like(problem: &KnownProblem, values: &Values) -> KnownProblem {
    let tensor = |x: &Array4<f32>, like: &TensorDesc| {
        let (batch, seqlen, heads, head_dim) = x.dim();
        TensorDesc::contiguous(like.dtype, Shape { batch, seqlen, heads, head_dim })
    };
    let sequences = |x: &Array4<f32>| SequenceRows::dense(x.dim().0, x.dim().1);
    let mut spec = problem.spec();
    spec.q = tensor(&values.q, problem.q());
    spec.k = tensor(&values.k, problem.k());
    spec.v = tensor(&values.v, problem.v());
    spec.o = tensor(&values.dout, problem.o());
    spec.qv = values.qv.as_ref().map(|qv| tensor(qv, problem.q()));
    let known = spec.with_rows(sequences(&values.q), sequences(&values.k));
    known.expect("parts of a valid problem are valid")
}

/// Batch and rows of a tensor that holds exactly these sequences.
pub fn extent(sequences: &SequenceRows) -> (usize, usize) {
    if !sequences.is_packed() {
        // All dense sequences have the same capacity. There may be no sequences.
        return (sequences.count(), sequences.capacity(0));
    }
    let ends = (0..sequences.count()).map(|index| sequences.start(index).1 + sequences.capacity(index));
    (1, ends.max().unwrap_or(0))
}
