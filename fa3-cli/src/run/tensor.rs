//! Tensors in files: a name, a shape, and values of one of several types.

use fa3::Scalar;
use fa3_quant::E4m3;
use half::{bf16, f16};
use ndarray::{Array, Array4, ArrayView, Dimension, IxDyn};
use safetensors::Dtype;

use super::error::Error;

/// The element types of Q, K and V.
pub(super) const ATTENDED: &str = "F32, F16, BF16 or F8_E4M3";
/// The element types that have gradients.
pub(super) const DIFFERENTIATED: &str = "F32, F16 or BF16 with --backward";
/// The element type of tensors with scales.
pub(super) const SCALED: &str = "F8_E4M3 beside scales, without --backward";
/// The element types of an expected result.
pub(super) const EXPECTED: &str = "F64, F32, F16 or BF16";
/// The element types of a list.
pub(super) const LIST: &str = "I32 or I64";

/// A contiguous tensor, the last dimension fastest.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    /// The tensor's name in the file, or the file's name. Names of inputs are shortened for messages.
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    /// The elements; their number is the product of the shape.
    pub(crate) values: Values,
}

/// Elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Values {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    E4m3(Vec<E4m3>),
    I64(Vec<i64>),
    I32(Vec<i32>),
}

impl Tensor {
    /// A tensor with the elements of `array`.
    pub(crate) fn new<T: Stored, D: Dimension>(name: String, array: Array<T, D>) -> Tensor {
        let shape = array.shape().to_vec();
        Tensor { name, shape, values: T::wrap(array.into_iter().collect()) }
    }

    /// The extents of batch, seqlen, heads and head_dim.
    ///
    /// # Errors
    /// [`Error::Rank`].
    pub(crate) fn dims(&self) -> Result<[usize; 4], Error> {
        <[usize; 4]>::try_from(self.shape.as_slice())
            .map_err(|_| Error::Rank { tensor: self.name.clone(), given: self.shape.clone() })
    }

    /// The tensor as (batch, seqlen, heads, head_dim), or from (total, heads, head_dim) if it is packed. `q` is the
    /// name of the tensor whose type is required.
    pub(super) fn array<T: Stored>(self, packed: bool, q: &str) -> Result<Array4<T>, Error> {
        let Tensor { name: tensor, shape: given, values } = self;
        let dims = match (given.as_slice(), packed) {
            (&[batch, seqlen, heads, head_dim], false) => [batch, seqlen, heads, head_dim],
            (&[total, heads, head_dim], true) => [1, total, heads, head_dim],
            (_, false) => return Err(Error::DenseRank { tensor, given }),
            (_, true) => return Err(Error::PackedRank { tensor, given }),
        };
        match T::take(values) {
            Ok(values) => Array4::from_shape_vec(dims, values).map_err(|_| Error::TooLarge { tensor, given }),
            Err(given) => Err(Error::MixedDtypes { tensor, given, expected: T::STORED, like: q.to_owned() }),
        }
    }

    /// The tensor with two dimensions swapped.
    pub(super) fn with_swapped(self, a: usize, b: usize) -> Tensor {
        fn swapped<T: Clone>(values: Vec<T>, shape: &[usize], a: usize, b: usize) -> Vec<T> {
            let mut view =
                ArrayView::from_shape(IxDyn(shape), &values).expect("as many values as the shape says");
            view.swap_axes(a, b);
            view.iter().cloned().collect()
        }
        let Tensor { name, mut shape, values } = self;
        let values = match values {
            Values::F64(values) => Values::F64(swapped(values, &shape, a, b)),
            Values::F32(values) => Values::F32(swapped(values, &shape, a, b)),
            Values::F16(values) => Values::F16(swapped(values, &shape, a, b)),
            Values::Bf16(values) => Values::Bf16(swapped(values, &shape, a, b)),
            Values::E4m3(values) => Values::E4m3(swapped(values, &shape, a, b)),
            Values::I64(values) => Values::I64(swapped(values, &shape, a, b)),
            Values::I32(values) => Values::I32(swapped(values, &shape, a, b)),
        };
        shape.swap(a, b);
        Tensor { name, shape, values }
    }

    /// The same elements with the last two dimensions as one.
    pub(super) fn with_fused_columns(mut self) -> Tensor {
        let columns = self.shape.drain(self.shape.len() - 2..).product();
        self.shape.push(columns);
        self
    }

    /// The tensor rounded to `T`; integers stay as they are.
    pub(super) fn rounded_to<T: Stored>(self) -> Tensor {
        let round = |x: f64| T::from_f32(x as f32);
        let values = match self.values {
            Values::F64(values) => T::wrap(values.into_iter().map(round).collect()),
            Values::F32(values) => T::wrap(values.into_iter().map(T::from_f32).collect()),
            Values::F16(values) => T::wrap(values.into_iter().map(|x| T::from_f32(x.to_f32())).collect()),
            Values::Bf16(values) => T::wrap(values.into_iter().map(|x| T::from_f32(x.to_f32())).collect()),
            Values::E4m3(values) => T::wrap(values.into_iter().map(|x| T::from_f32(x.to_f32())).collect()),
            integers @ (Values::I64(_) | Values::I32(_)) => integers,
        };
        Tensor { values, ..self }
    }

    /// Like [`Tensor::array`], for a tensor that must have the shape `expected`.
    pub(super) fn array_like<T: Stored>(
        self,
        packed: bool,
        q: &str,
        expected: &[usize],
    ) -> Result<Array4<T>, Error> {
        let (tensor, given) = (self.name.clone(), self.shape.clone());
        let array = self.array::<T>(packed, q)?;
        match array.shape() == expected {
            true => Ok(array),
            false => Err(Error::ExpectedShape { tensor, given, expected: expected.to_vec() }),
        }
    }

    /// Removes the leading dimension of a packed result, which is 1.
    pub(super) fn without_batch(mut self) -> Tensor {
        self.shape.remove(0);
        self
    }

    fn numbers(name: &str, values: Values) -> Result<Vec<f64>, Error> {
        match values {
            Values::F64(values) => Ok(values),
            Values::F32(values) => Ok(values.into_iter().map(f64::from).collect()),
            Values::F16(values) => Ok(values.into_iter().map(f64::from).collect()),
            Values::Bf16(values) => Ok(values.into_iter().map(f64::from).collect()),
            other @ (Values::E4m3(_) | Values::I64(_) | Values::I32(_)) => {
                Err(Error::Dtype { tensor: name.to_owned(), given: other.dtype(), expected: EXPECTED })
            }
        }
    }

    /// The values as f32. Only their number must match `shape`.
    pub(super) fn flat(self, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let values = Tensor::numbers(&self.name, self.values)?;
        match values.len() == shape.iter().product::<usize>() {
            true => Ok(values.into_iter().map(|x| x as f32).collect()),
            false => {
                let (tensor, given, expected) = (self.name, self.shape, shape.to_vec());
                Err(Error::ExpectedShape { tensor, given, expected })
            }
        }
    }

    /// The tensor as f64 with the shape `expected`. A leading extent of 1 may be missing in the tensor.
    pub(crate) fn expected<D: Dimension>(self, expected: D) -> Result<Array<f64, D>, Error> {
        let Tensor { name, shape, values } = self;
        let values = Tensor::numbers(&name, values)?;
        let fits = |shape: &[usize]| shape == expected.slice();
        if !fits(&shape) && !fits(&[&[1], shape.as_slice()].concat()) {
            let expected = expected.slice().to_vec();
            return Err(Error::ExpectedShape { tensor: name, given: shape, expected });
        }
        Array::from_shape_vec(expected, values).map_err(|_| Error::TooLarge { tensor: name, given: shape })
    }

    /// The tensor as a list of 32-bit integers.
    pub(super) fn list(self) -> Result<Vec<i32>, Error> {
        let Tensor { name: tensor, shape, values } = self;
        if shape.len() != 1 {
            return Err(Error::NotAList { tensor, given: shape });
        }
        match values {
            Values::I32(values) => Ok(values),
            Values::I64(values) => {
                let narrow = |(index, given)| match i32::try_from(given) {
                    Ok(entry) => Ok(entry),
                    Err(_) => Err(Error::ListEntry { tensor: tensor.clone(), index, given }),
                };
                values.into_iter().enumerate().map(narrow).collect()
            }
            other
            @ (Values::F64(_) | Values::F32(_) | Values::F16(_) | Values::Bf16(_) | Values::E4m3(_)) => {
                Err(Error::Dtype { tensor, given: other.dtype(), expected: LIST })
            }
        }
    }
}

impl Values {
    /// Decodes little-endian bytes; `None` for an unsupported type.
    #[allow(clippy::wildcard_enum_match_arm, reason = "the list of types in files grows without us")]
    pub(super) fn decode(dtype: Dtype, bytes: &[u8]) -> Option<Values> {
        Some(match dtype {
            Dtype::F64 => Values::F64(decode(bytes, f64::from_le_bytes)),
            Dtype::F32 => Values::F32(decode(bytes, f32::from_le_bytes)),
            Dtype::F16 => Values::F16(decode(bytes, f16::from_le_bytes)),
            Dtype::BF16 => Values::Bf16(decode(bytes, bf16::from_le_bytes)),
            Dtype::F8_E4M3 => Values::E4m3(decode(bytes, |[bits]: [u8; 1]| E4m3::from_bits(bits))),
            Dtype::I64 => Values::I64(decode(bytes, i64::from_le_bytes)),
            Dtype::I32 => Values::I32(decode(bytes, i32::from_le_bytes)),
            _ => return None,
        })
    }

    /// Encodes to little-endian bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        match self {
            Values::F64(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::F32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::F16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::Bf16(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::E4m3(values) => values.iter().map(|x| x.to_bits()).collect(),
            Values::I64(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Values::I32(values) => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// The type.
    pub(crate) fn dtype(&self) -> Dtype {
        match self {
            Values::F64(_) => Dtype::F64,
            Values::F32(_) => Dtype::F32,
            Values::F16(_) => Dtype::F16,
            Values::Bf16(_) => Dtype::BF16,
            Values::E4m3(_) => Dtype::F8_E4M3,
            Values::I64(_) => Dtype::I64,
            Values::I32(_) => Dtype::I32,
        }
    }
}

/// Decodes elements of `N` bytes. No bytes are left over, because a file's offsets were checked against its shapes.
fn decode<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&chunk| from(chunk)).collect()
}

/// An element type of [`Values`] that attention can compute with.
pub(crate) trait Stored: Scalar {
    /// The type's name in files.
    const STORED: Dtype;

    /// Values of this type.
    fn wrap(values: Vec<Self>) -> Values;

    /// The values if they have this type, otherwise their type.
    fn take(values: Values) -> Result<Vec<Self>, Dtype>;
}

macro_rules! stored {
    ($($element:ty: $variant:ident, $stored:ident;)*) => {$(
        impl Stored for $element {
            const STORED: Dtype = Dtype::$stored;

            fn wrap(values: Vec<Self>) -> Values {
                Values::$variant(values)
            }

            fn take(values: Values) -> Result<Vec<Self>, Dtype> {
                if let Values::$variant(values) = values { Ok(values) } else { Err(values.dtype()) }
            }
        }
    )*};
}

stored! {
    f32: F32, F32;
    f16: F16, F16;
    bf16: Bf16, BF16;
    E4m3: E4m3, F8_E4M3;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Dim, arr3};

    fn tensor(shape: &[usize], values: Values) -> Tensor {
        Tensor { name: "x".into(), shape: shape.to_vec(), values }
    }

    #[test]
    fn little_endian_bytes() {
        let bytes = [0x00, 0x3C, 0x00, 0xC0];
        let f16s = Values::F16(vec![f16::from_f32(1.0), f16::from_f32(-2.0)]);
        assert_eq!(Values::decode(Dtype::F16, &bytes), Some(f16s.clone()));
        assert_eq!(f16s.encode(), bytes);
        assert_eq!(Values::decode(Dtype::F32, &bytes), Some(Values::F32(vec![-2.0 - 60.0 / 16384.0])));
        assert_eq!(Values::decode(Dtype::F8_E4M3, &[0x38]), Some(Values::E4m3(vec![E4m3::from_f32(1.0)])));
        assert_eq!(Values::decode(Dtype::U8, &bytes), None);
    }

    #[test]
    fn numbers_are_rounded() {
        let wide = tensor(&[2], Values::F64(vec![1.0, 1.0 + 1e-4]));
        let ones = |x: f32| Values::Bf16(vec![bf16::from_f32(x); 2]);
        assert_eq!(wide.rounded_to::<bf16>().values, ones(1.0));
        let codes = tensor(&[2], Values::E4m3(vec![E4m3::from_f32(-1.5); 2]));
        assert_eq!(codes.rounded_to::<bf16>().values, ones(-1.5));
    }

    #[test]
    fn packed_tensors_have_one_dimension_less() {
        let values = || Values::F32(vec![0.0; 6 * 8]);
        let dims =
            |shape: &[usize], packed| tensor(shape, values()).array::<f32>(packed, "q").map(|a| a.dim());
        assert_eq!(dims(&[3, 2, 8], true).unwrap(), (1, 3, 2, 8));
        assert_eq!(dims(&[1, 3, 2, 8], false).unwrap(), (1, 3, 2, 8));
        assert!(matches!(dims(&[3, 2, 8], false), Err(Error::DenseRank { .. })));
        assert!(matches!(dims(&[1, 3, 2, 8], true), Err(Error::PackedRank { .. })));
        let mixed = tensor(&[1, 3, 2, 8], values()).array::<f16>(false, "q").unwrap_err();
        assert_eq!(mixed.to_string(), "x is F32, expected F16 like q; --dtype makes one type of all");
    }

    #[test]
    fn expected_results_may_lack_the_batch() {
        let values = || Values::F32(vec![1.0, 2.0]);
        let expected = |shape: &[usize]| tensor(shape, values()).expected(Dim([1, 2, 1]));
        assert_eq!(expected(&[2, 1]).unwrap(), arr3(&[[[1.0], [2.0]]]));
        assert_eq!(expected(&[1, 2, 1]).unwrap(), arr3(&[[[1.0], [2.0]]]));
        let error = expected(&[1, 2]).unwrap_err();
        assert_eq!(error.to_string(), "x has shape [1, 2], expected [1, 2, 1]");
    }

    #[test]
    fn lists_are_of_integers() {
        assert_eq!(tensor(&[2], Values::I64(vec![0, 7])).list().unwrap(), [0, 7]);
        let large = tensor(&[2], Values::I64(vec![0, 1 << 31])).list().unwrap_err();
        assert_eq!(large.to_string(), "x has 2147483648 at entry 1, more than 32 bits hold");
        assert!(matches!(tensor(&[1], Values::F32(vec![0.0])).list(), Err(Error::Dtype { .. })));
        assert!(matches!(tensor(&[1, 2], Values::I32(vec![0, 1])).list(), Err(Error::NotAList { .. })));
    }
}
