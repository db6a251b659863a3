//! Q, K and V of a problem, as array views of its shapes.

use fa3_types::{
    Feature, Known, KnownProblem, Lengths, Problem, SequenceRows, TensorDesc, TensorName, UnknownFeature,
};
use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayView3, ArrayView4, Axis};

use crate::sink;

/// An element type that converts exactly to f64: f32, f16, bf16, e4m3 and f64 itself.
pub trait Element: Copy + Send + Sync + Into<f64> {}

impl<T: Copy + Send + Sync + Into<f64>> Element for T {}

/// The reasons why the reference refuses inputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// An array has another shape than the problem's tensor.
    #[error("{tensor} is an array of shape {given:?}, the problem says {expected:?}")]
    Shape {
        /// The tensor; gradients and outputs go by the name of the tensor whose shape they share.
        tensor: TensorName,
        /// The array's shape.
        given: [usize; 4],
        /// The problem's shape.
        expected: [usize; 4],
    },
    /// The LSE array has another shape than the problem's.
    #[error("lse is an array of shape {given:?}, the problem says {expected:?}")]
    LseShape {
        /// The array's shape.
        given: [usize; 3],
        /// [`Problem::lse_shape`].
        expected: [usize; 3],
    },
    /// The problem has a feature that the reference does not compute. For `qv`, pass the problem of joined columns,
    /// [`Problem::joined`]; for keys in pages, the problem of gathered keys, [`Problem::gathered`].
    #[error(transparent)]
    Unknown(#[from] UnknownFeature),
    /// The number of sinks is wrong.
    #[error("{given} sinks are given, the problem has {expected}")]
    Sinks {
        /// The number given.
        given: usize,
        /// The number of query heads, or 0 if the problem has no sinks.
        expected: usize,
    },
    /// Tiles without rows or keys.
    #[error("tiles of {rows} x {keys} are empty")]
    EmptyTiles {
        /// Query rows of a tile, B_r.
        rows: usize,
        /// Keys of a tile, B_c.
        keys: usize,
    },
}

/// The features that the oracle, standard attention and the tiled algorithms compute. Their inputs are numbers, so
/// scales and the memory layout of V do not matter. Neither does the form of LSE: their LSE has the default one. They
/// have no largest scores as results.
const KNOWN: Known = Known::new(
    "the reference",
    &[
        Feature::Window,
        Feature::Chunks,
        Feature::Intervals,
        Feature::Tree,
        Feature::Blocks,
        Feature::SoftCap,
        Feature::Score,
        Feature::Sinks,
        Feature::E4m3,
        Feature::E4m3Keys,
        Feature::Int8Keys,
        Feature::TokenScales,
        Feature::BlockScales,
        Feature::VChannels,
        Feature::TransposedV,
        Feature::Packed,
        Feature::Used,
        Feature::LseForm,
        Feature::MaxLogits,
    ],
);

/// Q (batch, seqlen_q, heads_q, head_dim), K (batch, seqlen_k, heads_kv, head_dim) and V (batch, seqlen_k, heads_kv,
/// head_dim_v) of a problem, and its sinks (heads_q), if any. Packed tensors have batch 1.
///
/// The views' own strides are used, not the problem's strides, which describe device memory.
#[derive(Clone, Copy)]
pub struct Inputs<'a, T> {
    problem: &'a KnownProblem,
    q: ArrayView4<'a, T>,
    k: ArrayView4<'a, T>,
    v: ArrayView4<'a, T>,
    sink: Option<ArrayView1<'a, f32>>,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Inputs of a problem without sinks.
    ///
    /// # Errors
    /// [`InputError::Shape`] where a view's shape is not the problem's, [`InputError::Sinks`] if the problem has sinks,
    /// [`InputError::Unknown`] if the reference does not compute a feature of the problem.
    pub fn new(
        problem: &'a KnownProblem,
        q: ArrayView4<'a, T>,
        k: ArrayView4<'a, T>,
        v: ArrayView4<'a, T>,
    ) -> Result<Inputs<'a, T>, InputError> {
        Inputs::with_sink(problem, [q, k, v], None)
    }

    /// Inputs of a problem, with sinks of its query heads, if any.
    ///
    /// # Errors
    /// [`InputError::Shape`] where a view's shape is not the problem's, [`InputError::Sinks`] if the number of sinks is
    /// wrong, [`InputError::Unknown`] if the reference does not compute a feature of the problem.
    pub fn with_sink(
        problem: &'a KnownProblem,
        [q, k, v]: [ArrayView4<'a, T>; 3],
        sink: Option<ArrayView1<'a, f32>>,
    ) -> Result<Inputs<'a, T>, InputError> {
        check_shape(TensorName::Q, &q, problem.q())?;
        check_shape(TensorName::K, &k, problem.k())?;
        check_shape(TensorName::V, &v, problem.v())?;
        KNOWN.check(problem)?;
        sink::check(sink.as_ref(), problem)?;
        Ok(Inputs { problem, q, k, v, sink })
    }

    /// The problem of these inputs.
    pub fn problem(&self) -> &'a KnownProblem {
        self.problem
    }

    /// All queries.
    pub fn q(&self) -> ArrayView4<'a, T> {
        self.q
    }

    /// All keys.
    pub fn k(&self) -> ArrayView4<'a, T> {
        self.k
    }

    /// All values.
    pub fn v(&self) -> ArrayView4<'a, T> {
        self.v
    }

    /// The sinks (heads_q), if any.
    pub fn sink(&self) -> Option<ArrayView1<'a, f32>> {
        self.sink
    }
}

/// Inputs by their heads in f64, for any element type. Functions that take this trait object are not generic: they are
/// compiled once, with this crate.
pub(crate) trait Heads: Sync {
    fn problem(&self) -> &KnownProblem;

    /// The sinks (heads_q), if any.
    fn sinks(&self) -> Option<ArrayView1<'_, f32>>;

    /// Q, K and V of query head `head_q` of sequence `index`, each matrix contiguous.
    fn head(&self, index: usize, head_q: usize) -> Head;
}

impl<T: Element> Heads for Inputs<'_, T> {
    fn problem(&self) -> &KnownProblem {
        self.problem
    }

    fn sinks(&self) -> Option<ArrayView1<'_, f32>> {
        self.sink
    }

    fn head(&self, index: usize, head_q: usize) -> Head {
        let head_kv = self.problem.heads().kv_head(head_q);
        Head {
            of: [index, head_q],
            len: self.problem.lengths(index),
            q: gather(&self.q, self.problem.rows_q(), index, head_q),
            k: gather(&self.k, self.problem.rows_k(), index, head_kv),
            v: gather(&self.v, self.problem.rows_k(), index, head_kv),
            sink: self.sink.map_or(f32::NEG_INFINITY, |sink| sink[head_q]),
        }
    }
}

/// Inputs of the backward pass: the gradients of O and of LSE. An array of the gradient of O converts to this type.
#[derive(Clone, Copy)]
pub struct OutputGradients<'a, T> {
    /// dO (batch, seqlen_q, heads_q, head_dim_v).
    pub dout: ArrayView4<'a, T>,
    /// dLSE (batch, heads_q, seqlen_q); `None` counts as 0.
    pub dlse: Option<ArrayView3<'a, f32>>,
}

impl<'a, T> From<ArrayView4<'a, T>> for OutputGradients<'a, T> {
    fn from(dout: ArrayView4<'a, T>) -> OutputGradients<'a, T> {
        OutputGradients { dout, dlse: None }
    }
}

/// Gradients of the output by heads in f64, like [`Heads`] for inputs.
pub(crate) trait OutputHeads: Sync {
    /// Checks that the arrays have the shapes of O and LSE.
    fn check(&self, problem: &Problem) -> Result<(), InputError>;

    /// dO and dLSE of one head.
    fn head(&self, problem: &KnownProblem, index: usize, head_q: usize) -> (Array2<f64>, Array1<f64>);
}

impl<T: Element> OutputHeads for OutputGradients<'_, T> {
    fn check(&self, problem: &Problem) -> Result<(), InputError> {
        check_shape(TensorName::O, &self.dout, problem.o())?;
        match &self.dlse {
            Some(dlse) => check_lse_shape(dlse, problem),
            None => Ok(()),
        }
    }

    fn head(&self, problem: &KnownProblem, index: usize, head_q: usize) -> (Array2<f64>, Array1<f64>) {
        let sequences = problem.rows_q();
        let ((batch, first), rows) = (sequences.start(index), sequences.len(index));
        let dlse = match &self.dlse {
            Some(dlse) => (first..first + rows).map(|row| dlse[[batch, head_q, row]].into()).collect(),
            None => Array1::zeros(rows),
        };
        (gather(&self.dout, sequences, index, head_q), dlse)
    }
}

/// One head of one sequence in f64.
pub(crate) struct Head {
    /// The indices of its sequence and its query head.
    pub(crate) of: [usize; 2],
    pub(crate) len: Lengths,
    /// Q (seqlen_q, head_dim).
    pub(crate) q: Array2<f64>,
    /// K (seqlen_k, head_dim).
    pub(crate) k: Array2<f64>,
    /// V (seqlen_k, head_dim_v).
    pub(crate) v: Array2<f64>,
    /// The head's sink; -inf without sinks.
    pub(crate) sink: f32,
}

/// [`Head`] in f32, which holds every 8-, 16- and 32-bit input exactly.
pub(crate) struct Head32 {
    /// The indices of its sequence and its query head.
    pub(crate) of: [usize; 2],
    pub(crate) q: Array2<f32>,
    pub(crate) k: Array2<f32>,
    pub(crate) v: Array2<f32>,
    /// The head's sink; -inf without sinks.
    pub(crate) sink: f32,
}

impl Head {
    pub(crate) fn to_f32(&self) -> Head32 {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|x| x.mapv(|x| x as f32));
        Head32 { of: self.of, q, k, v, sink: self.sink }
    }
}

pub(crate) fn check_shape<T>(
    tensor: TensorName,
    view: &ArrayView4<'_, T>,
    desc: &TensorDesc,
) -> Result<(), InputError> {
    let (given, expected) = (view.dim().into(), desc.shape.dims());
    if given != expected { Err(InputError::Shape { tensor, given, expected }) } else { Ok(()) }
}

pub(crate) fn check_lse_shape(lse: &ArrayView3<'_, f32>, problem: &Problem) -> Result<(), InputError> {
    let (given, expected) = (lse.dim().into(), problem.lse_shape());
    if given != expected { Err(InputError::LseShape { given, expected }) } else { Ok(()) }
}

/// The used rows of one head of one sequence.
pub(crate) fn rows<'v, T>(
    tensor: &'v ArrayView4<'_, T>,
    sequences: &SequenceRows,
    index: usize,
    head: usize,
) -> ArrayView2<'v, T> {
    let (batch, first) = sequences.start(index);
    let rows = (first..first + sequences.len(index)).into();
    tensor.index_axis(Axis(0), batch).index_axis_move(Axis(1), head).slice_axis_move(Axis(0), rows)
}

/// Copies the view of [`rows`] and converts it.
pub(crate) fn gather<T: Element>(
    tensor: &ArrayView4<'_, T>,
    sequences: &SequenceRows,
    index: usize,
    head: usize,
) -> Array2<f64> {
    let rows = rows(tensor, sequences, index, head);
    // The copy is row by row, whatever the order in memory is: `mapv` would keep the view's order.
    Array2::from_shape_vec(rows.dim(), rows.iter().map(|&x| x.into()).collect())
        .expect("a view has as many elements as its shape says")
}

#[cfg(test)]
mod tests {
    use super::*;
    use fa3_types::{Dtype, ProblemSpec, Shape};
    use ndarray::Array4;

    #[test]
    fn arrays_of_another_shape_are_rejected() {
        let shape = Shape { batch: 1, seqlen: 4, heads: 2, head_dim: 4 };
        let problem = ProblemSpec::dense(Dtype::F32, shape, shape).known().unwrap();
        let (good, bad) = (Array4::<f32>::zeros((1, 4, 2, 4)), Array4::<f32>::zeros((1, 5, 2, 4)));
        assert!(Inputs::new(&problem, good.view(), good.view(), good.view()).is_ok());
        let error = Inputs::new(&problem, good.view(), good.view(), bad.view()).err().unwrap();
        let (given, expected) = ([1, 5, 2, 4], [1, 4, 2, 4]);
        assert_eq!(error, InputError::Shape { tensor: TensorName::V, given, expected });
        let with = |problem, sink: Option<&Array1<f32>>| {
            let x = [good.view(), good.view(), good.view()];
            Inputs::with_sink(problem, x, sink.map(|sink| sink.view())).map(|_| ())
        };
        let (one, two) = (Array1::zeros(1), Array1::zeros(2));
        assert_eq!(with(&problem, Some(&two)), Err(InputError::Sinks { given: 2, expected: 0 }));
        let problem = ProblemSpec::dense(Dtype::F32, shape, shape).sink().known().unwrap();
        assert_eq!(with(&problem, Some(&two)), Ok(()));
        assert_eq!(with(&problem, Some(&one)), Err(InputError::Sinks { given: 1, expected: 2 }));
        assert_eq!(with(&problem, None), Err(InputError::Sinks { given: 0, expected: 2 }));
        let qv = *problem.o();
        let latent = ProblemSpec::dense(Dtype::F32, shape, shape).qv(qv).known().unwrap();
        assert_eq!(
            with(&latent, None),
            Err(InputError::Unknown(UnknownFeature { who: "the reference", feature: Feature::Qv }))
        );
    }

    #[test]
    fn heads_are_contiguous_whatever_the_views_are() {
        let shape = Shape { batch: 1, seqlen: 6, heads: 1, head_dim: 8 };
        let problem = ProblemSpec::dense(Dtype::F32, shape, shape).known().unwrap();
        let transposed = Array4::from_shape_fn((1, 8, 1, 6), |(_, d, _, s)| (10 * s + d) as f32);
        let x = transposed.view().permuted_axes([0, 3, 2, 1]);
        let inputs = Inputs::new(&problem, x, x, x).unwrap();
        let head = inputs.head(0, 0);
        assert!(head.q.is_standard_layout() && head.to_f32().q.is_standard_layout());
        assert_eq!(head.q.row(2).to_vec(), [20.0, 21.0, 22.0, 23.0, 24.0, 25.0, 26.0, 27.0]);
    }

    #[test]
    fn a_packed_head_is_its_sequences_rows() {
        let seqs = SequenceRows::packed(&[0, 2, 5]).unwrap().with_used(&[2, 2]).unwrap();
        let problem =
            ProblemSpec::packed(Dtype::F32, (2, 1), 4, &seqs, &seqs).with_rows(seqs.clone(), seqs).unwrap();
        let q = Array4::from_shape_fn((1, 5, 2, 4), |(_, s, h, _)| (10 * s + h) as f32);
        let kv = Array4::from_shape_fn((1, 5, 1, 4), |(_, s, _, _)| s as f32);
        let inputs = Inputs::new(&problem, q.view(), kv.view(), kv.view()).unwrap();
        let head = inputs.head(1, 1);
        assert_eq!(head.q.column(0).to_vec(), [21.0, 31.0]);
        assert_eq!(head.k.column(0).to_vec(), [2.0, 3.0]);
        assert_eq!(head.len, Lengths { q: 2, k: 2 });
    }
}
