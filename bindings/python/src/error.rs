//! Errors as Python's exceptions.

use fa3_call::{Error, ErrorKind};
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};

/// An exception of Python as an error of a call.
pub(crate) fn caller(exception: PyErr) -> Error {
    Error::Caller(Box::new(exception))
}

/// A refusal of what XLA or tvm-ffi passes.
pub(crate) fn refused(sentence: impl Into<String>) -> Error {
    Error::Caller(sentence.into().into())
}

/// The exception of an error. A refusal of the driver or the system, or a panic, becomes a `RuntimeError`. An error
/// that the caller can correct becomes a `ValueError`, or a `TypeError` if a name or torch's dtype is wrong. An
/// exception of Python stays the same exception.
pub(crate) fn exception(error: Error) -> PyErr {
    let (kind, sentence) = (error.kind(), in_torchs_words(&error.to_string()));
    if let Error::Dtype { given } = &error
        && (given == "i32" || given.starts_with("torch."))
    {
        let expected = "torch.float16, torch.bfloat16, torch.float8_e4m3fn or, on the CPU, torch.float32";
        return PyTypeError::new_err(format!("a tensor is {}, expected {expected}", in_torchs_words(given)));
    }
    if let Error::Caller(error) = error
        && let Ok(exception) = error.downcast()
    {
        return *exception;
    }
    match kind {
        ErrorKind::Name => PyTypeError::new_err(sentence),
        ErrorKind::Machine | ErrorKind::Bug => PyRuntimeError::new_err(sentence),
        ErrorKind::Argument | ErrorKind::Unsupported => PyValueError::new_err(sentence),
    }
}

/// The sentence with torch's names for the types of elements.
fn in_torchs_words(sentence: &str) -> String {
    let pieces = sentence.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let renamed = pieces.map(|piece| {
        let word = piece.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        let name = match word {
            "f32" => "torch.float32",
            "f16" => "torch.float16",
            "bf16" => "torch.bfloat16",
            "e4m3" => "torch.float8_e4m3fn",
            "int8" => "torch.int8",
            "i32" => "torch.int32",
            other => other,
        };
        [name, &piece[word.len()..]].concat()
    });
    renamed.collect()
}
