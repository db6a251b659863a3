//! A call as plain data.

use candle_core::{DType, Layout, Shape, Tensor};
use fa3::Mask;
use fa3::problem::{self, Dtype, ProblemSpec, Sequences, TensorDesc, TensorName};

use crate::Attention;
use crate::error::Error;
use crate::rows::Rows;

/// A forward pass: everything that its plan depends on, except for the device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    /// The types, shapes and strides of Q, K and V.
    inputs: [TensorDesc; 3],
    /// The sequences of Q, and of K and V.
    sequences: [Sequences; 2],
    mask: Mask,
    /// The bits of an f32, so that NaN, which every problem refuses, equals itself.
    softmax_scale: u32,
    softcap: Option<u32>,
    sink: bool,
}

impl Call {
    /// A call with these tensors.
    ///
    /// # Errors
    /// A tensor has another rank or type, or the sinks have another shape.
    pub(crate) fn new(
        attention: &Attention,
        [q, k, v]: [(DType, &Layout); 3],
        rows: &Rows,
        sink: Option<&Tensor>,
    ) -> Result<Call, Error> {
        let [is_packed_q, is_packed_k] = [&rows.cu_seqlens_q, &rows.cu_seqlens_k].map(Option::is_some);
        let q = desc(TensorName::Q, q, is_packed_q)?;
        let [k, v] = [desc(TensorName::K, k, is_packed_k)?, desc(TensorName::V, v, is_packed_k)?];
        if let Some(sink) = sink.filter(|sink| sink.dims() != [q.shape.heads]) {
            return Err(Error::Sink { shape: sink.shape().clone(), heads: q.shape.heads });
        }
        Ok(Call {
            inputs: [q, k, v],
            sequences: rows.sequences(q.shape, k.shape),
            mask: attention.mask(),
            softmax_scale: attention.softmax_scale.to_bits(),
            softcap: attention.softcap.map(f32::to_bits),
            sink: sink.is_some(),
        })
    }

    /// The call with contiguous tensors.
    pub(crate) fn contiguous(mut self) -> Call {
        self.inputs = self.inputs.map(|x| TensorDesc::contiguous(x.dtype, x.shape));
        self
    }

    /// The type of Q.
    pub(crate) fn dtype(&self) -> Dtype {
        self.inputs[0].dtype
    }

    /// Whether K and V are a cache.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_cached(&self) -> bool {
        self.sequences[1].has_used()
    }

    /// The problem, not yet checked, with a contiguous O.
    pub(crate) fn spec(&self) -> ProblemSpec {
        // There is no `..` here, so that a new field of a call cannot be forgotten.
        let Call { inputs: [q, k, v], sequences: [of_q, of_k], mask, softmax_scale, softcap, sink } = *self;
        let o = problem::Shape { head_dim: v.shape.head_dim, ..q.shape };
        let spec = ProblemSpec::new(q, k, v, TensorDesc::contiguous(q.dtype, o)).mask(mask);
        let mut spec = spec.seqs_q(of_q).seqs_k(of_k).softmax_scale(f32::from_bits(softmax_scale).into());
        (spec.softcap, spec.sink) = (softcap.map(|cap| f32::from_bits(cap).into()), sink);
        spec
    }

    /// The shape of O: (batch, seqlen_q, heads_q, head_dim_v), or (total_q, heads_q, head_dim_v).
    pub(crate) fn o_shape(&self) -> Shape {
        let [q, _, v] = self.inputs;
        tensor_shape(problem::Shape { head_dim: v.shape.head_dim, ..q.shape }, self.sequences[0])
    }

    /// The shape of LSE: (batch, heads_q, seqlen_q), or (heads_q, total_q).
    pub(crate) fn lse_shape(&self) -> Shape {
        let problem::Shape { batch, seqlen, heads, .. } = self.inputs[0].shape;
        match self.sequences[0].is_packed() {
            true => Shape::from((heads, seqlen)),
            false => Shape::from((batch, heads, seqlen)),
        }
    }

    /// The shapes of Q, K and V, in the form that candle's tensors have.
    pub(crate) fn input_shapes(&self) -> [Shape; 3] {
        let ([q, k, v], [of_q, of_k]) = (self.inputs, self.sequences);
        [(q, of_q), (k, of_k), (v, of_k)].map(|(x, sequences)| tensor_shape(x.shape, sequences))
    }
}

fn tensor_shape(shape: problem::Shape, sequences: Sequences) -> Shape {
    let dims = shape.dims();
    Shape::from(if sequences.is_packed() { &dims[1..] } else { &dims[..] })
}

/// A tensor's type, shape and strides. The stride of a dimension of 1 is replaced, because it has no meaning: calls
/// that differ only in such strides share a plan.
///
/// # Errors
/// [`Error::Dense`], [`Error::Packed`] or [`Error::Dtype`].
pub(crate) fn desc(
    tensor: TensorName,
    (given, layout): (DType, &Layout),
    is_packed: bool,
) -> Result<TensorDesc, Error> {
    // Attention supports three of candle's types.
    #[allow(clippy::wildcard_enum_match_arm, reason = "a type that candle adds is refused as others are")]
    let dtype = match given {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::Bf16,
        DType::F32 => Dtype::F32,
        given => return Err(Error::Dtype { tensor, given }),
    };
    let (dims, strides) = (layout.dims(), layout.stride());
    let shape = layout.shape().clone();
    let (dims, strides) = match (dims, strides, is_packed) {
        (&[batch, seqlen, heads, head_dim], &[of_batch, of_seqlen, of_heads, of_head_dim], false) => {
            ([batch, seqlen, heads, head_dim], [of_batch, of_seqlen, of_heads, of_head_dim])
        }
        (&[total, heads, head_dim], &[of_total, of_heads, of_head_dim], true) => {
            ([1, total, heads, head_dim], [0, of_total, of_heads, of_head_dim])
        }
        (_, _, false) => return Err(Error::Dense { tensor, shape }),
        (_, _, true) => return Err(Error::Packed { tensor, shape }),
    };
    let [batch, seqlen, heads, head_dim] = dims;
    let mut desc = TensorDesc::contiguous(dtype, problem::Shape { batch, seqlen, heads, head_dim });
    // A stride beyond i64 becomes i64::MAX, which is refused as too large.
    let [batch, seqlen, heads, head_dim] = strides.map(|stride| i64::try_from(stride).unwrap_or(i64::MAX));
    (desc.strides.batch, desc.strides.seqlen) = (batch, seqlen);
    (desc.strides.heads, desc.strides.head_dim) = (heads, head_dim);
    Ok(desc.canonical())
}

/// Whether kernels read a tensor of 16-bit elements without a copy: its rows have no gaps, and begin at multiples of 16
/// bytes. A copy would not help a head dimension that is not a multiple of 8. Another check refuses it.
fn has_readable_rows(layout: &Layout) -> bool {
    const MULTIPLE: usize = Dtype::F16.row_multiple();
    let Some((row, outer)) = layout.stride().split_last() else { return false };
    let mut outer = outer.iter().zip(layout.dims()).filter(|&(_, extent)| *extent > 1);
    *row == 1
        && layout.start_offset().is_multiple_of(MULTIPLE)
        && outer.all(|(stride, _)| stride.is_multiple_of(MULTIPLE))
}

/// The tensor, or a copy if it is on a GPU and kernels do not read its rows where they lie.
///
/// # Errors
/// The driver's errors.
pub(crate) fn readable(x: &Tensor) -> candle_core::Result<Tensor> {
    if !x.device().is_cuda() || has_readable_rows(x.layout()) { Ok(x.clone()) } else { x.force_contiguous() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dims: [usize; 4], strides: [usize; 4], start: usize) -> Layout {
        Layout::new(Shape::from(&dims[..]), strides.to_vec(), start)
    }

    #[test]
    fn rows_that_kernels_read_begin_at_multiples_of_16_bytes() {
        let dims = [2, 10, 3, 64];
        assert!(has_readable_rows(&layout(dims, [1920, 192, 64, 1], 0)));
        // Heads before rows; a slice of a packed QKV tensor; and keys that all heads share.
        assert!(has_readable_rows(&layout(dims, [1920, 64, 640, 1], 0)));
        assert!(has_readable_rows(&layout(dims, [5760, 576, 192, 1], 64)));
        assert!(has_readable_rows(&layout(dims, [640, 64, 0, 1], 0)));
        // The stride of a dimension of 1 is meaningless.
        assert!(has_readable_rows(&layout([1, 10, 1, 64], [3, 64, 5, 1], 0)));

        assert!(!has_readable_rows(&layout(dims, [1920, 192, 64, 1], 4)));
        assert!(!has_readable_rows(&layout(dims, [1950, 195, 65, 1], 0)));
        assert!(!has_readable_rows(&layout(dims, [1920, 192, 1, 3], 0)));
    }

    #[test]
    fn a_call_is_the_same_wherever_its_tensors_begin() {
        let attention = Attention::new(0.5).causal();
        let of = |x: Layout| Call::new(&attention, [(DType::BF16, &x); 3], &Rows::default(), None).unwrap();
        let call = |start| of(layout([2, 10, 3, 64], [1920, 192, 64, 1], start));
        assert_eq!(call(0), call(64));
        // The stride of a dimension of 1 is meaningless.
        let of_one = |stride| of(layout([1, 10, 3, 64], [stride, 192, 64, 1], 0));
        assert_eq!(of_one(1920), of_one(5));
        assert_eq!(call(0).input_shapes().map(Shape::into_dims), [const { [2, 10, 3, 64] }; 3]);
        assert_eq!(call(0).lse_shape().into_dims(), [2, 3, 10]);
        assert_eq!(call(0).spec().validate().unwrap().mask(), Mask::Causal);
    }
}
