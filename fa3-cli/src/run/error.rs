//! Why there is no result.

use std::fmt;
use std::io;
use std::path::PathBuf;

use fa3::cuda::{BackwardError, ForwardError};
use fa3_ref::InputError;
use fa3_types::ProblemError;
use safetensors::{Dtype, SafeTensorError};

use super::npy::NpyError;
use super::safetensors::HeaderError;

/// Everything that `fa3 run` refuses. One sentence each, with the names and the numbers.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
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
    #[error("{tensor} is {given}, expected {expected}")]
    Dtype { tensor: String, given: Dtype, expected: &'static str },
    #[error("{tensor} is {given}, expected {expected} like {like}")]
    MixedDtypes { tensor: String, given: Dtype, expected: Dtype, like: String },
    #[error("{tensor} has shape {}, expected (batch, seqlen, heads, head_dim)", extents(given))]
    Rank { tensor: String, given: Vec<usize> },
    #[error(
        "{tensor} has shape {}, expected (batch, seqlen, heads, head_dim), or cu_seqlens_q and (total, heads, head_dim)",
        extents(given)
    )]
    DenseRank { tensor: String, given: Vec<usize> },
    #[error(
        "{tensor} has shape {}, expected (total, heads, head_dim) because there is cu_seqlens",
        extents(given)
    )]
    PackedRank { tensor: String, given: Vec<usize> },
    #[error("{tensor} of shape {} is too large to be addressed", extents(given))]
    TooLarge { tensor: String, given: Vec<usize> },
    #[error("{tensor} has shape {}, expected {expected:?}", extents(given))]
    ExpectedShape { tensor: String, given: Vec<usize>, expected: Vec<usize> },
    #[error("{tensor} has shape {}, expected a list", extents(given))]
    NotAList { tensor: String, given: Vec<usize> },
    #[error("{tensor} has {given} at entry {index}, more than 32 bits hold")]
    ListEntry { tensor: String, index: usize, given: i64 },
    #[error("cu_seqlens_k is there and cu_seqlens_q is not")]
    NoCuSeqlensQ,
    #[error("cu_seqlens_q is there and cu_seqlens_k is not, and q has {rows_q} rows and k {rows_k}")]
    NoCuSeqlensK { rows_q: usize, rows_k: usize },

    #[error("{tensors}: {source}")]
    Problem { tensors: String, source: ProblemError },
    // The source names the tensors itself.
    #[error("{prefix}{source}")]
    Sequences { prefix: String, source: fa3::Error },
    #[error(transparent)]
    Cuda(ForwardError),
    #[error(transparent)]
    CudaBackward(BackwardError),
    #[error(transparent)]
    Input(#[from] InputError),
    #[error("cannot write {}: {source}", path.display())]
    Serialize { path: PathBuf, source: SafeTensorError },
}

impl Error {
    /// An error of the library: the call's, or the GPU's.
    #[allow(clippy::wildcard_enum_match_arm, reason = "all others name the tensors themselves")]
    pub(super) fn compute(prefix: &str, error: fa3::Error) -> Error {
        match error {
            fa3::Error::Cuda(error) => Error::Cuda(error),
            fa3::Error::CudaBackward(error) => Error::CudaBackward(error),
            source => Error::Sequences { prefix: short(prefix), source },
        }
    }
}

/// The names of a file's tensors, the first few of them printed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Names(pub(crate) Vec<String>);

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MOST: usize = 8;
        let join = |names: &[String]| names.iter().map(|name| short(name)).collect::<Vec<_>>().join(", ");
        match self.0.as_slice() {
            [] => f.write_str("nothing"),
            names if names.len() <= MOST => f.write_str(&join(names)),
            names => write!(f, "{} and {} more", join(&names[..MOST]), names.len() - MOST),
        }
    }
}

/// A name out of a file, as long as names are.
pub(super) fn short(name: &str) -> String {
    cut(name, 60)
}

/// The extents of a tensor in a file, which may have any number of them.
pub(crate) fn extents(shape: &[usize]) -> String {
    const MOST: usize = 8;
    match shape.get(..MOST) {
        Some(first) if shape.len() > MOST => {
            let first = first.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            format!("[{first}, ... ({} extents)]", shape.len())
        }
        _ => format!("{shape:?}"),
    }
}

/// No more than `most` characters of a text out of a file.
pub(super) fn cut(text: &str, most: usize) -> String {
    match text.chars().count() {
        count if count > most => {
            let start: String = text.chars().take(most).collect();
            format!("{start}... ({count} characters)")
        }
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_of_names_are_cut() {
        let names = |count: usize| Names((0..count).map(|i| i.to_string()).collect()).to_string();
        assert_eq!(names(0), "nothing");
        assert_eq!(names(2), "0, 1");
        assert_eq!(names(10), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more");
    }

    #[test]
    fn long_shapes_are_cut() {
        assert_eq!(extents(&[]), "[]");
        assert_eq!(extents(&[1; 8]), "[1, 1, 1, 1, 1, 1, 1, 1]");
        assert_eq!(extents(&[1; 100_000]), "[1, 1, 1, 1, 1, 1, 1, 1, ... (100000 extents)]");
    }

    #[test]
    fn long_names_are_cut() {
        assert_eq!(short(&"ä".repeat(60)), "ä".repeat(60));
        let cut = "ä".repeat(60) + "... (100000 characters)";
        assert_eq!(short(&"ä".repeat(100_000)), cut);
        assert_eq!(Names(vec!["ä".repeat(100_000)]).to_string(), cut);
    }
}
