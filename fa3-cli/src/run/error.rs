//! Errors of `fa3 run`.

use std::io;
use std::path::PathBuf;

use fa3::cuda::OperationError;
use fa3_ref::InputError;
use fa3_types::{ProblemError, ScoreError};
use safetensors::{Dtype, SafeTensorError};

use super::layout::HINT;
use super::tensor::Tensor;
use super::text::{Names, cut, extents, short};

/// Errors that only `fa3 run` has. Each message is one sentence with names and numbers.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("expected one safetensors file or three .npy files (q, k, v), got {given} files")]
    FileCount { given: usize },
    #[error("{} is one .npy file, expected three of them (q, k, v)", path.display())]
    OneNpy { path: PathBuf },
    #[error("{option} is for safetensors input, not for .npy files")]
    NotForNpy { option: &'static str },
    #[error("--lse is for .npy files; a safetensors output holds o and lse")]
    NotForSafetensors,
    #[error("output {} must be named .{expected}, like the input", path.display())]
    OutputFormat { path: PathBuf, expected: &'static str },

    #[error("cannot read -: stdin is /dev/stdin, and a file of the name - is ./-")]
    Stdin,
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot read {}: it is neither a file nor a pipe", path.display())]
    NeitherFileNorPipe { path: PathBuf },
    #[error("{} is not a whole safetensors file: {source}", path.display())]
    NotSafetensors { path: PathBuf, source: HeaderError },
    #[error("{} ends after {given} of the {expected} bytes of {tensor}", path.display())]
    TensorCut { path: PathBuf, tensor: String, given: usize, expected: usize },
    #[error("{} {source}", path.display())]
    Npy { path: PathBuf, source: NpyError },

    #[error(
        "{} has no tensors q, k and v, with or without a prefix; it holds {names} (--q, --k, --v name others)",
        path.display()
    )]
    NoCall { path: PathBuf, names: Names },
    #[error("{} has no tensor {name}; it holds {names}", path.display())]
    NoTensor { path: PathBuf, name: String, names: Names },
    #[error("{tensor} is {given}, expected {expected}{}", if *given == Dtype::F64 { ", as --dtype f32 makes of it" } else { "" })]
    Dtype { tensor: String, given: Dtype, expected: &'static str },
    #[error("{tensor} has shape {}, expected {expected}", extents(given))]
    Shape { tensor: String, given: Vec<usize>, expected: String },
    #[error("{tensor} has {columns} columns, not a multiple of {what} {by}")]
    Columns { tensor: String, columns: usize, by: usize, what: &'static str },
    #[error("--layout fused takes --heads, of Q, or --head-dim: columns are cut by it")]
    FusedHeads,
    #[error("{option} is for --layout fused; in other layouts the shape says it")]
    NotFused { option: &'static str },
    #[error("{tensor} is {given}, expected {expected} like {like}; --dtype makes one type of all")]
    MixedDtypes { tensor: String, given: Dtype, expected: Dtype, like: String },
    #[error("{tensor} of shape {} is too large to be addressed", extents(given))]
    TooLarge { tensor: String, given: Vec<usize> },
    #[error("{tensor} is there beside scales, and there is no latent attention in 8 bits")]
    ScaledQv { tensor: String },
    #[error("{tensor} has {given} at entry {index}, more than 32 bits hold")]
    ListEntry { tensor: String, index: usize, given: i64 },
    #[error("cu_seqlens_k is there and cu_seqlens_q is not")]
    NoCuSeqlensQ,
    #[error("cu_seqlens_q is there and cu_seqlens_k is not, and q has {rows_q} rows and k {rows_k}")]
    NoCuSeqlensK { rows_q: usize, rows_k: usize },

    #[error("{tensors}: {source}")]
    Problem { tensors: String, source: ProblemError },
    #[error("{0}; {HINT}")]
    Layout(Box<Error>),
    // The source's message names the tensors.
    #[error("{prefix}{source}")]
    Sequences { prefix: String, source: fa3::Error },
    #[error(transparent)]
    Cuda(OperationError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error(transparent)]
    Score(#[from] ScoreError),
    #[error("cannot write {}: {source}", path.display())]
    Serialize { path: PathBuf, source: SafeTensorError },
}

impl Error {
    /// The error of a tensor with a shape other than `expected`.
    pub(super) fn shape(tensor: &Tensor, expected: impl Into<String>) -> Error {
        let (tensor, given, expected) = (tensor.name.clone(), tensor.shape.clone(), expected.into());
        Error::Shape { tensor, given, expected }
    }

    /// The error of a tensor with elements of another type than the `expected` ones.
    pub(crate) fn dtype(tensor: &Tensor, expected: &'static str) -> Error {
        Error::Dtype { tensor: tensor.name.clone(), given: tensor.dtype, expected }
    }

    /// Adds a hint at another layout, if that is a likely cause.
    pub(super) fn with_hint(self) -> Error {
        let is_of_heads =
            matches!(self, Error::Problem { source: ProblemError::HeadsNotDivisible { .. }, .. });
        if is_of_heads { Error::Layout(Box::new(self)) } else { self }
    }

    /// The error of `fa3 run` for an error of the library: of the GPU, or of the call whose tensors' names begin with
    /// `prefix`.
    #[allow(clippy::wildcard_enum_match_arm, reason = "all others name the tensors themselves")]
    pub(super) fn compute(prefix: &str, error: fa3::Error) -> Error {
        match error {
            fa3::Error::Cuda(error) => Error::Cuda(error),
            source => Error::Sequences { prefix: short(prefix), source },
        }
    }
}

/// Why a .npy file cannot be read, or a tensor cannot be written as one. Each message continues the file's name.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum NpyError {
    #[error("cannot be read: {0}")]
    Read(io::ErrorKind),
    #[error("is not a .npy file: it does not begin with \\x93NUMPY")]
    Magic,
    #[error("is a .npy file of version {major}.{minor}, expected 1.0, 2.0 or 3.0")]
    Version { major: u8, minor: u8 },
    #[error("has a header of {given} bytes, more than {most}")]
    HeaderLength { given: u32, most: u32 },
    #[error("ends within its header")]
    HeaderCut,
    #[error("is not a .npy file: its header is no dict of descr, fortran_order and shape")]
    Header,
    #[error("holds {descr}, expected f4 or f2")]
    Dtype { descr: String },
    #[error("holds '{descr}', expected f4 or f2, as x.astype('f4') gives")]
    Wide { descr: String },
    #[error(
        "holds '{descr}', two bytes without a type, as NumPy writes bf16: expected f4 or f2, or bf16 in a safetensors file"
    )]
    Untyped { descr: String },
    #[error("has more than {most} dimensions")]
    Rank { most: usize },
    #[error("has an extent of {digits} digits, more than can be addressed")]
    Extent { digits: usize },
    #[error("has shape {}, more elements than can be addressed", extents(shape))]
    TooLarge { shape: Vec<usize> },
    #[error("holds {given} bytes of data, expected {expected} for {dtype} of shape {}", extents(shape))]
    Length { given: u64, expected: u64, dtype: Dtype, shape: Vec<usize> },
}

impl From<io::Error> for NpyError {
    fn from(error: io::Error) -> NpyError {
        NpyError::Read(error.kind())
    }
}

/// Why a file is not a complete safetensors file.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HeaderError {
    #[error("it has {given} bytes, and {expected} say how long its header is")]
    NoLength { given: usize, expected: u64 },
    #[error("it is a zip archive, as .npz files are, which are not read: save its arrays as .npy files")]
    Zip,
    #[error("its header would have {given} bytes, more than {most}")]
    Long { given: u64, most: u64 },
    #[error("it ends after {given} of the {expected} bytes of its header")]
    Cut { given: usize, expected: u64 },
    #[error("its header is no JSON of tensors: {}", cut(&.0.to_string(), 300))]
    Json(serde_json::Error),
    #[error("it has {given} bytes, {expected} by its header")]
    Length { given: u64, expected: u64 },
}
