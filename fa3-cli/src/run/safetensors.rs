//! Safetensors files: finding the calls in one, writing results as one.

use std::borrow::Cow;
use std::path::Path;

use safetensors::{Dtype, SafeTensors, View};

use super::call::{Call, Lists};
use super::error::{Error, Names, short};
use super::tensor::{self, Tensor, Values};

/// Which tensors of a file are Q, K and V.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Selection {
    /// Only the call whose tensors begin with PREFIX, as in `layer0.`
    #[arg(long)]
    pub(super) prefix: Option<String>,
    /// Q's name
    #[arg(long, value_name = "NAME")]
    pub(super) q: Option<String>,
    /// K's name
    #[arg(long, value_name = "NAME")]
    pub(super) k: Option<String>,
    /// V's name
    #[arg(long, value_name = "NAME")]
    pub(super) v: Option<String>,
}

/// A file's contents.
pub(super) struct File<'a> {
    path: &'a Path,
    tensors: SafeTensors<'a>,
}

impl<'a> File<'a> {
    /// Takes the bytes of the file at `path`.
    pub(super) fn new(path: &'a Path, bytes: &'a [u8]) -> Result<File<'a>, Error> {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|source| Error::NotSafetensors { path: path.into(), source })?;
        Ok(File { path, tensors })
    }

    /// The prefixes of the selected calls, sorted: the one selected, or every P for which there are Pq, Pk and Pv.
    pub(super) fn prefixes(&self, selection: &Selection) -> Result<Vec<String>, Error> {
        let Selection { prefix, q, k, v } = selection;
        if prefix.is_some() || q.is_some() || k.is_some() || v.is_some() {
            return Ok(vec![prefix.clone().unwrap_or_default()]);
        }
        let names = self.names();
        let has = |prefix: &str, name: &str| names.0.contains(&format!("{prefix}{name}"));
        let mut prefixes: Vec<String> = names
            .0
            .iter()
            .filter_map(|name| name.strip_suffix('q'))
            .filter(|prefix| has(prefix, "k") && has(prefix, "v"))
            .map(str::to_owned)
            .collect();
        prefixes.sort_unstable();
        if prefixes.is_empty() {
            return Err(Error::NoCall { path: self.path.into(), names });
        }
        Ok(prefixes)
    }

    /// The call with `prefix`, with lists if there are any. Q, K and V may have other names; if they do not, there
    /// may be expected results of theirs.
    pub(super) fn call(&self, prefix: &str, selection: &Selection) -> Result<Call, Error> {
        let full = |name: &str| format!("{prefix}{name}");
        let named = |given: &Option<String>, name| {
            self.tensor(&given.clone().unwrap_or_else(|| full(name)), tensor::ATTENDED)
        };
        let list = |name| self.find(&full(name), tensor::LIST)?.map(Tensor::list).transpose();
        let expected = |name| match selection {
            Selection { q: None, k: None, v: None, .. } => self.find(&full(name), tensor::EXPECTED),
            _ => Ok(None),
        };
        Ok(Call {
            prefix: prefix.to_owned(),
            q: named(&selection.q, "q")?,
            k: named(&selection.k, "k")?,
            v: named(&selection.v, "v")?,
            lists: Lists {
                cu_seqlens_q: list("cu_seqlens_q")?,
                cu_seqlens_k: list("cu_seqlens_k")?,
                seqused_q: list("seqused_q")?,
                seqused_k: list("seqused_k")?,
            },
            expected_o: expected("o")?,
            expected_lse: expected("lse")?,
        })
    }

    fn names(&self) -> Names {
        let mut names: Vec<String> = self.tensors.names().into_iter().map(str::to_owned).collect();
        names.sort_unstable();
        Names(names)
    }

    /// The tensor of this name; its type is one of those that any tensor may have, not yet one of those `expected`.
    pub(super) fn tensor(&self, name: &str, expected: &'static str) -> Result<Tensor, Error> {
        let missing = || Error::NoTensor { path: self.path.into(), name: short(name), names: self.names() };
        self.find(name, expected)?.ok_or_else(missing)
    }

    /// The tensor of this name, which is what messages call it; an error if its type is none of those that any tensor
    /// may have.
    fn find(&self, name: &str, expected: &'static str) -> Result<Option<Tensor>, Error> {
        let Ok(view) = self.tensors.tensor(name) else { return Ok(None) };
        let (name, shape) = (short(name), view.shape().to_vec());
        match Values::decode(view.dtype(), view.data()) {
            Some(values) => Ok(Some(Tensor { name, shape, values })),
            None => Err(Error::Dtype { tensor: name, given: view.dtype(), expected }),
        }
    }
}

/// The bytes of a file that holds `tensors`.
pub(crate) fn encode(path: &Path, tensors: &[Tensor]) -> Result<Vec<u8>, Error> {
    let views = tensors.iter().map(|tensor| (tensor.name.as_str(), Encoded::new(tensor)));
    safetensors::serialize(views, None).map_err(|source| Error::Serialize { path: path.into(), source })
}

/// A tensor in little-endian bytes.
struct Encoded<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    bytes: Vec<u8>,
}

impl Encoded<'_> {
    fn new(tensor: &Tensor) -> Encoded<'_> {
        Encoded { dtype: tensor.values.dtype(), shape: &tensor.shape, bytes: tensor.values.encode() }
    }
}

impl View for Encoded<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(names: &[&str]) -> Vec<u8> {
        let tensor =
            |name: &&str| Tensor { name: (*name).into(), shape: vec![1], values: Values::F32(vec![0.0]) };
        encode(Path::new("x"), &names.iter().map(tensor).collect::<Vec<_>>()).unwrap()
    }

    fn prefixes(names: &[&str], selection: &Selection) -> Result<Vec<String>, Error> {
        File::new(Path::new("x"), &bytes(names)).unwrap().prefixes(selection)
    }

    #[test]
    fn calls_are_found_by_prefix() {
        let all = Selection::default();
        let names = ["b.q", "b.k", "b.v", "q", "k", "v", "a.q", "a.k", "freq", "frek"];
        assert_eq!(prefixes(&names, &all).unwrap(), ["", "b."]);
        assert!(matches!(prefixes(&["q", "k"], &all), Err(Error::NoCall { .. })));
        let other = Selection { q: Some("query".into()), ..Selection::default() };
        assert_eq!(prefixes(&names, &other).unwrap(), [""]);
    }

    #[test]
    fn a_missing_name_is_told() {
        let bytes = bytes(&["b.q", "b.k", "b.v"]);
        let file = File::new(Path::new("x"), &bytes).unwrap();
        let error = file.call("c.", &Selection::default()).err().unwrap();
        assert_eq!(error.to_string(), "x has no tensor c.q; it holds b.k, b.q, b.v");
    }
}
