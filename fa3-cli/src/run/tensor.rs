//! Tensors in files: a name, a type, a shape, and the elements' bytes.

#![allow(clippy::wildcard_enum_match_arm, reason = "the list of types in files grows without us")]

use fa3::Scalar;
use fa3_quant::E4m3;
use half::{bf16, f16};
use ndarray::{Array, Array4, ArrayView, Dimension};
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
/// The shapes of Q, K and V.
const DENSE: &str =
    "(batch, seqlen, heads, head_dim), or cu_seqlens_q and (total, heads, head_dim), or another --layout";
const PACKED: &str = "(total, heads, head_dim) because there is cu_seqlens";
/// The element types of a list.
pub(super) const LIST: &str = "I32 or I64";

/// A contiguous tensor, the last dimension fastest.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    /// The tensor's name in the file, or the file's name. Names of inputs are shortened for messages.
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// The elements in little-endian order, as many as the shape says.
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// Whether elements of this type can be read.
    pub(super) fn reads(dtype: Dtype) -> bool {
        use Dtype::{BF16, F8_E4M3, F16, F32, F64, I32, I64};
        [F64, F32, F16, BF16, F8_E4M3, I64, I32].contains(&dtype)
    }

    /// A tensor with the elements of `array`.
    pub(crate) fn new<T: Stored, D: Dimension>(name: &str, array: Array<T, D>) -> Tensor {
        let shape = array.shape().to_vec();
        Tensor { name: name.to_owned(), dtype: T::STORED, shape, bytes: T::encode(array) }
    }

    /// The extents of batch, seqlen, heads and head_dim.
    pub(crate) fn dims(&self) -> Result<[usize; 4], Error> {
        <[usize; 4]>::try_from(self.shape.as_slice())
            .map_err(|_| Error::shape(self, "(batch, seqlen, heads, head_dim)"))
    }

    /// The tensor as an array (batch, seqlen, heads, head_dim). A packed tensor is (total, heads, head_dim), and gets
    /// batch 1. `q` is the name of the tensor whose type is required.
    pub(crate) fn array<T: Stored>(self, packed: bool, q: &str) -> Result<Array4<T>, Error> {
        let dims = match (self.shape.as_slice(), packed) {
            (&[batch, seqlen, heads, head_dim], false) => [batch, seqlen, heads, head_dim],
            (&[total, heads, head_dim], true) => [1, total, heads, head_dim],
            (_, false) => return Err(Error::shape(&self, DENSE)),
            (_, true) => return Err(Error::shape(&self, PACKED)),
        };
        let Tensor { name: tensor, dtype: given, shape, bytes } = self;
        if given != T::STORED {
            let (expected, like) = (T::STORED, q.to_owned());
            return Err(Error::MixedDtypes { tensor, given, expected, like });
        }
        Array4::from_shape_vec(dims, T::decode(&bytes)).map_err(|_| Error::TooLarge { tensor, given: shape })
    }

    /// The tensor with its dimensions in another order.
    pub(super) fn permuted(self, order: &[usize]) -> Tensor {
        let shape: Vec<usize> = order.iter().map(|&axis| self.shape[axis]).collect();
        let extents = [self.shape.as_slice(), &[self.dtype.bitsize() / 8]].concat();
        let order = [order, &[order.len()]].concat();
        // Only a tensor without elements has extents whose product is too large for a view.
        let view = ArrayView::from_shape(extents, &self.bytes).map(|view| view.permuted_axes(order));
        let bytes = view.map_or_else(|_| Vec::new(), |view| view.iter().copied().collect());
        Tensor { shape, bytes, ..self }
    }

    /// A tensor that was read with its first dimension fastest, as one with the last dimension fastest.
    pub(super) fn in_c_order(mut self) -> Tensor {
        self.shape.reverse();
        let backwards: Vec<usize> = (0..self.shape.len()).rev().collect();
        self.permuted(&backwards)
    }

    /// The same elements with the last two dimensions as one.
    pub(super) fn with_fused_columns(mut self) -> Tensor {
        let columns = self.shape.drain(self.shape.len() - 2..).product();
        self.shape.push(columns);
        self
    }

    /// The tensor rounded to `T`; integers stay as they are.
    pub(crate) fn rounded_to<T: Stored>(self) -> Tensor {
        match self.numbers(|x| T::from_f32(x as f32)) {
            Some(numbers) => Tensor { dtype: T::STORED, bytes: T::encode(numbers), ..self },
            None => self,
        }
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
            false => Err(Error::Shape { tensor, given, expected: format!("{expected:?}") }),
        }
    }

    /// Removes the leading dimension of a packed result, which is 1.
    pub(super) fn without_batch(mut self) -> Tensor {
        self.shape.remove(0);
        self
    }

    /// The numbers, each converted by `to`. `None` if they are integers.
    fn numbers<T>(&self, to: impl Fn(f64) -> T) -> Option<Vec<T>> {
        let bytes = &self.bytes;
        Some(match self.dtype {
            Dtype::F64 => decode(bytes, |x| to(f64::from_le_bytes(x))),
            Dtype::F32 => decode(bytes, |x| to(f32::from_le_bytes(x).into())),
            Dtype::F16 => decode(bytes, |x| to(f16::from_le_bytes(x).into())),
            Dtype::BF16 => decode(bytes, |x| to(bf16::from_le_bytes(x).into())),
            Dtype::F8_E4M3 => decode(bytes, |[bits]: [u8; 1]| to(E4m3::from_bits(bits).to_f32().into())),
            _ => return None,
        })
    }

    /// The numbers of an expected result, which cannot be in FP8.
    fn results<T>(&self, to: impl Fn(f64) -> T) -> Result<Vec<T>, Error> {
        let numbers = if self.dtype == Dtype::F8_E4M3 { None } else { self.numbers(to) };
        numbers.ok_or_else(|| Error::dtype(self, EXPECTED))
    }

    /// The values as f32. Only their number must match `shape`.
    pub(super) fn flat(&self, shape: &[usize]) -> Result<Vec<f32>, Error> {
        let values = self.results(|x| x as f32)?;
        let fits = values.len() == shape.iter().product::<usize>();
        if fits { Ok(values) } else { Err(Error::shape(self, format!("{shape:?}"))) }
    }

    /// The tensor as f64 with the shape `expected`. A leading extent of 1 may be missing in the tensor.
    pub(crate) fn expected<D: Dimension>(self, expected: D) -> Result<Array<f64, D>, Error> {
        let values = self.results(|x| x)?;
        let fits = |shape: &[usize]| shape == expected.slice();
        if !fits(&self.shape) && !fits(&[&[1], self.shape.as_slice()].concat()) {
            return Err(Error::shape(&self, format!("{:?}", expected.slice())));
        }
        let Tensor { name: tensor, shape: given, .. } = self;
        Array::from_shape_vec(expected, values).map_err(|_| Error::TooLarge { tensor, given })
    }

    /// The tensor as a list of 32-bit integers.
    pub(super) fn list(self) -> Result<Vec<i32>, Error> {
        if self.shape.len() != 1 {
            return Err(Error::shape(&self, "a list"));
        }
        let entries: Vec<i64> = match self.dtype {
            Dtype::I32 => decode(&self.bytes, |x| i32::from_le_bytes(x).into()),
            Dtype::I64 => decode(&self.bytes, i64::from_le_bytes),
            _ => return Err(Error::dtype(&self, LIST)),
        };
        let narrow = |(index, given): (usize, i64)| {
            given.try_into().map_err(|_| Error::ListEntry { tensor: self.name.clone(), index, given })
        };
        entries.into_iter().enumerate().map(narrow).collect()
    }
}

/// Decodes elements of `N` bytes. No bytes are left over, because a file's offsets were checked against its shapes.
fn decode<T, const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&chunk| from(chunk)).collect()
}

/// An element type of files that attention can compute with.
pub(crate) trait Stored: Scalar {
    /// The type's name in files.
    const STORED: Dtype;

    fn decode(bytes: &[u8]) -> Vec<Self>;

    fn encode(numbers: impl IntoIterator<Item = Self>) -> Vec<u8>;
}

macro_rules! stored {
    ($($number:ty: $stored:ident, $from:expr, $to:expr;)*) => {$(
        impl Stored for $number {
            const STORED: Dtype = Dtype::$stored;

            fn decode(bytes: &[u8]) -> Vec<Self> {
                decode(bytes, $from)
            }

            fn encode(numbers: impl IntoIterator<Item = Self>) -> Vec<u8> {
                numbers.into_iter().flat_map($to).collect()
            }
        }
    )*};
}

stored! {
    f32: F32, f32::from_le_bytes, f32::to_le_bytes;
    f16: F16, f16::from_le_bytes, f16::to_le_bytes;
    bf16: BF16, bf16::from_le_bytes, bf16::to_le_bytes;
    E4m3: F8_E4M3, |[bits]: [u8; 1]| E4m3::from_bits(bits), |x| [x.to_bits()];
    i8: I8, i8::from_le_bytes, i8::to_le_bytes;
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Dim, arr1, arr3};

    /// An element of each type is read from its bytes, and written as the same bytes.
    #[test]
    fn little_endian_bytes() {
        assert_eq!(f16::decode(&[0x00, 0x3C, 0x00, 0xC0]), [1.0, -2.0].map(f16::from_f32));
        assert_eq!(f16::encode([1.0, -2.0].map(f16::from_f32)), [0x00, 0x3C, 0x00, 0xC0]);
        assert_eq!(f32::decode(&[0x00, 0x3C, 0x00, 0xC0]), [-2.0 - 60.0 / 16384.0]);
        assert_eq!(E4m3::decode(&[0x38]), [E4m3::from_f32(1.0)]);
        assert!(Tensor::reads(Dtype::F8_E4M3) && !Tensor::reads(Dtype::U8));
    }

    #[test]
    fn numbers_are_rounded() {
        let wide = [1.0, 1.0 + 1e-4].into_iter().flat_map(f64::to_le_bytes).collect();
        let wide = Tensor { name: "x".into(), dtype: Dtype::F64, shape: vec![2], bytes: wide };
        let ones = |x: f32| Tensor::new("x", arr1(&[bf16::from_f32(x); 2]));
        assert_eq!(wide.rounded_to::<bf16>(), ones(1.0));
        let codes = Tensor::new("x", arr1(&[E4m3::from_f32(-1.5); 2]));
        assert_eq!(codes.rounded_to::<bf16>(), ones(-1.5));
    }

    #[test]
    fn expected_results_may_lack_the_batch() {
        let x = Tensor::new("x", arr1(&[1.0f32, 2.0]));
        let expected = |shape: &[usize]| Tensor { shape: shape.into(), ..x.clone() }.expected(Dim([1, 2, 1]));
        assert_eq!(expected(&[2, 1]).unwrap(), arr3(&[[[1.0], [2.0]]]));
        assert_eq!(expected(&[1, 2, 1]).unwrap(), arr3(&[[[1.0], [2.0]]]));
        let error = expected(&[1, 2]).unwrap_err();
        assert_eq!(error.to_string(), "x has shape [1, 2], expected [1, 2, 1]");
    }

    #[test]
    fn lists_are_of_integers() {
        let tensor = |shape: &[usize], entries: [i64; 2]| {
            let bytes = entries.into_iter().flat_map(i64::to_le_bytes).collect();
            Tensor { name: "x".into(), dtype: Dtype::I64, shape: shape.into(), bytes }
        };
        assert_eq!(tensor(&[2], [0, 7]).list().unwrap(), [0, 7]);
        let large = tensor(&[2], [0, 1 << 31]).list().unwrap_err();
        assert_eq!(large.to_string(), "x has 2147483648 at entry 1, more than 32 bits hold");
        assert!(matches!(Tensor::new("x", arr1(&[0.0f32])).list(), Err(Error::Dtype { .. })));
        assert!(matches!(tensor(&[1, 2], [0, 1]).list(), Err(Error::Shape { .. })));
    }
}
