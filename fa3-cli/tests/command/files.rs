//! Folders with tensors in files, in which commands run.

use std::fs;
use std::path::PathBuf;

use fa3::Scalar;
use fa3_quant::E4m3;
use half::{bf16, f16};
use ndarray::{Array4, ArrayBase, Data, Dimension};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::{Ran, command};

pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    /// A folder with these tensors in the file in.safetensors.
    pub(crate) fn with(tensors: &[Tensor]) -> Folder {
        let folder = Folder::new();
        folder.put("in.safetensors", tensors);
        folder
    }

    /// Runs `fa3` in the folder, with words that are separated by blanks.
    pub(crate) fn fa3(&self, words: &str) -> Ran {
        Ran::of(command(words).current_dir(&self.0))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub(crate) fn bytes(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    pub(crate) fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    pub(crate) fn json(&self, name: &str) -> Value {
        serde_json::from_slice(&self.bytes(name)).unwrap()
    }

    /// A script in place of a tool of NVIDIA's, which knows its version and runs `body`. Returns its path.
    #[cfg(unix)]
    pub(crate) fn tool(&self, name: &str, body: &str) -> String {
        use std::os::unix::fs::PermissionsExt;
        let version = "[ \"$1\" = --version ] && echo 'tools, release 9.9, V9.9.1' && exit 0";
        self.write(name, format!("#!/bin/sh\n{version}\n{body}\n"));
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(0o755)).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(crate) fn count(&self) -> usize {
        fs::read_dir(&self.0).unwrap().count()
    }

    /// Writes tensors to a safetensors file.
    pub(crate) fn put(&self, name: &str, tensors: &[Tensor]) {
        self.write(name, encoded(tensors));
    }

    /// The tensors of a safetensors file, sorted by name.
    pub(crate) fn get(&self, name: &str) -> Vec<Tensor> {
        let bytes = self.bytes(name);
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let tensors = tensors.iter();
        let mut all: Vec<Tensor> = tensors
            .map(|(name, view)| Tensor {
                name: name.to_owned(),
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                bytes: view.data().to_vec(),
            })
            .collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }
}

/// The bytes of a safetensors file.
pub(crate) fn encoded(tensors: &[Tensor]) -> Vec<u8> {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
        (tensor.name.as_str(), view)
    });
    safetensors::serialize(views, None).unwrap()
}

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Tensor {
    /// The elements of `x` in their logical order.
    pub(crate) fn of<T: Number, D: Dimension>(name: &str, x: &ArrayBase<impl Data<Elem = T>, D>) -> Tensor {
        let bytes = x.iter().flat_map(|x| x.bytes()).collect();
        Tensor { name: name.to_owned(), dtype: T::DTYPE, shape: x.shape().to_vec(), bytes }
    }

    pub(crate) fn zeros(name: &str, dtype: Dtype, shape: &[usize]) -> Tensor {
        let bytes = vec![0; shape.iter().product::<usize>() * dtype.bitsize() / 8];
        Tensor { name: name.to_owned(), dtype, shape: shape.to_vec(), bytes }
    }

    /// The tensor with other extents.
    pub(crate) fn shaped(self, shape: &[usize]) -> Tensor {
        Tensor { shape: shape.to_vec(), ..self }
    }

    /// The tensor without its first extent, as of packed sequences.
    pub(crate) fn packed(mut self) -> Tensor {
        self.shape.remove(0);
        self
    }
}

/// A number in a file.
pub(crate) trait Number {
    const DTYPE: Dtype;

    /// The number in little-endian bytes.
    fn bytes(&self) -> Vec<u8>;
}

macro_rules! numbers {
    ($($number:ty: $dtype:ident, |$x:ident| $bytes:expr;)*) => {$(
        impl Number for $number {
            const DTYPE: Dtype = Dtype::$dtype;

            fn bytes(&self) -> Vec<u8> {
                let $x = self;
                $bytes
            }
        }
    )*};
}

numbers! {
    f64: F64, |x| x.to_le_bytes().into();
    f32: F32, |x| x.to_le_bytes().into();
    f16: F16, |x| x.to_le_bytes().into();
    bf16: BF16, |x| x.to_le_bytes().into();
    E4m3: F8_E4M3, |x| vec![x.to_bits()];
    i64: I64, |x| x.to_le_bytes().into();
}

/// The numbers in little-endian bytes.
pub(crate) fn bytes<'a, T: Number + 'a>(numbers: impl IntoIterator<Item = &'a T>) -> Vec<u8> {
    numbers.into_iter().flat_map(Number::bytes).collect()
}

pub(crate) fn wave<T: Scalar>(dims: [usize; 4], step: f32) -> Array4<T> {
    let mut x = 0.0;
    Array4::from_shape_simple_fn(dims, || {
        x += step;
        T::from_f32(2.0 * f32::sin(x))
    })
}

/// Q, K and V of four query heads and two heads of keys.
pub(crate) fn qkv<T: Scalar>(seqlen: usize) -> [Array4<T>; 3] {
    [(4, 0.7), (2, 0.9), (2, 1.1)].map(|(heads, step)| wave([1, seqlen, heads, 16], step))
}

pub(crate) fn tensors<T: Number>(qkv: &[Array4<T>; 3]) -> Vec<Tensor> {
    named(["q", "k", "v"], qkv)
}

pub(crate) fn named<T: Number>(names: [&str; 3], qkv: &[Array4<T>; 3]) -> Vec<Tensor> {
    names.into_iter().zip(qkv).map(|(name, x)| Tensor::of(name, x)).collect()
}
