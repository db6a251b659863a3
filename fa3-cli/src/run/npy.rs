//! .npy files: f4 and f2, in C or in Fortran order.

use std::fs;
use std::path::Path;

use half::f16;
use ndarray::{ArrayD, IxDyn, ShapeBuilder};
use npyz::{AutoSerialize, DType, Deserialize, NpyFile, Order, TypeChar, WriterBuilder};

use super::error::Error;
use super::tensor::{Stored, Tensor, Values};

/// Reads a file whole. The tensor has the file's name.
pub(super) fn read(path: &Path) -> Result<Tensor, Error> {
    let bytes = fs::read(path).map_err(|source| Error::Read { path: path.into(), source })?;
    let npy = NpyFile::new(bytes.as_slice()).map_err(|source| Error::NotNpy { path: path.into(), source })?;
    let dtype = npy.dtype();
    let float_bytes = match &dtype {
        DType::Plain(plain) if plain.type_char() == TypeChar::Float => plain.size_field(),
        DType::Plain(_) | DType::Array(..) | DType::Record(_) => 0,
    };
    match float_bytes {
        4 => tensor::<f32>(path, npy),
        2 => tensor::<f16>(path, npy),
        _ => Err(Error::NpyDtype { path: path.into(), descr: dtype.descr() }),
    }
}

fn tensor<T: Deserialize + Stored>(path: &Path, npy: NpyFile<&[u8]>) -> Result<Tensor, Error> {
    let (order, extents) = (npy.order(), npy.shape().to_vec());
    let truncated = || Error::NpyTruncated { path: path.into(), shape: extents.clone() };
    let values: Vec<T> = npy.into_vec().map_err(|_| truncated())?;
    let shape: Option<Vec<usize>> = extents.iter().map(|&extent| usize::try_from(extent).ok()).collect();
    let shape = IxDyn(&shape.ok_or_else(truncated)?).set_f(order == Order::Fortran);
    let array = ArrayD::from_shape_vec(shape, values).map_err(|_| truncated())?;
    Ok(Tensor::new(path.display().to_string(), array))
}

/// The bytes of a file that holds `tensor`.
pub(super) fn encode(path: &Path, tensor: &Tensor) -> Result<Vec<u8>, Error> {
    match &tensor.values {
        Values::F32(values) => write(path, &tensor.shape, values),
        Values::F16(values) => write(path, &tensor.shape, values),
        Values::F64(_) | Values::Bf16(_) | Values::E4m3(_) | Values::I64(_) | Values::I32(_) => {
            Err(Error::NpyDtype { path: path.into(), descr: tensor.values.dtype().to_string() })
        }
    }
}

fn write<T: AutoSerialize + Clone>(path: &Path, shape: &[usize], values: &[T]) -> Result<Vec<u8>, Error> {
    let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
    let mut bytes = Vec::new();
    let mut write = || {
        let options = npyz::WriteOptions::<T>::new().default_dtype().shape(&shape).writer(&mut bytes);
        let mut writer = options.begin_nd()?;
        writer.extend(values.iter().cloned())?;
        writer.finish()
    };
    write().map_err(|source| Error::SerializeNpy { path: path.into(), source })?;
    Ok(bytes)
}
