//! Safetensors files: finds the calls in a file, and writes results.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;

use safetensors::tensor::Metadata;
use safetensors::{Dtype, View};

use super::call::{Call, Lists};
use super::error::{Error, HeaderError};
use super::scales::{self, Scales};
use super::source::Source;
use super::tensor::{self, Tensor};
use super::text::{Names, short};

/// The names of Q, K and V in a file.
#[derive(Debug, Default, clap::Args)]
pub(super) struct Selection {
    /// Computes only the call whose tensors' names begin with PREFIX, as in `layer0.`
    #[arg(long)]
    pub(super) prefix: Option<String>,
    /// Q's name; with several calls, what follows the prefix that Q, K and V share
    #[arg(long, value_name = "NAME")]
    pub(super) q: Option<String>,
    /// K's name, like --q
    #[arg(long, value_name = "NAME")]
    pub(super) k: Option<String>,
    /// V's name, like --q
    #[arg(long, value_name = "NAME")]
    pub(super) v: Option<String>,
}

impl Selection {
    /// The names of Q, K and V without a prefix.
    fn names(&self) -> [&str; 3] {
        [(&self.q, "q"), (&self.k, "k"), (&self.v, "v")].map(|(given, name)| given.as_deref().unwrap_or(name))
    }

    /// Whether any name is given.
    fn has_names(&self) -> bool {
        self.q.is_some() || self.k.is_some() || self.v.is_some()
    }
}

/// The size of the header's length field in bytes.
const LENGTH_BYTES: u64 = 8;
/// The first bytes of a zip archive.
const ZIP: &[u8] = b"PK\x03\x04";
/// The longest header, which is the format's own limit.
const MOST_HEADER_BYTES: u64 = 100_000_000;

/// A file whose header has been read. Tensors are read on demand.
pub(super) struct File<'a> {
    path: &'a Path,
    source: Source,
    metadata: Metadata,
    /// The offset of the data.
    start: u64,
    /// The names of tensors that have been read.
    read: BTreeSet<String>,
}

impl<'a> File<'a> {
    /// Reads the header of the file at `path`.
    pub(super) fn open(path: &'a Path) -> Result<File<'a>, Error> {
        let mut source = Source::open(path)?;
        let (metadata, start) = header(path, &mut source)?;
        Ok(File { path, source, metadata, start, read: BTreeSet::new() })
    }

    /// The prefixes of the selected calls, sorted: the given prefix, or every P for which the file has tensors Pq, Pk
    /// and Pv, with given names in place of q, k and v. If the given names are complete, there is one call with an
    /// empty prefix.
    pub(super) fn prefixes(&self, selection: &Selection) -> Result<Vec<String>, Error> {
        if let Some(prefix) = &selection.prefix {
            return Ok(vec![prefix.clone()]);
        }
        let names = self.names();
        let [q, k, v] = selection.names();
        let has = |prefix: &str, name: &str| self.metadata.info(&format!("{prefix}{name}")).is_some();
        let is_call = |prefix: &str| has(prefix, k) && has(prefix, v);
        let prefixes =
            names.0.iter().filter_map(|name| name.strip_suffix(q)).filter(|prefix| is_call(prefix));
        let mut prefixes: Vec<String> = prefixes.map(str::to_owned).collect();
        prefixes.sort_unstable();
        if selection.has_names() && (prefixes.is_empty() || prefixes[0].is_empty()) {
            return Ok(vec![String::new()]);
        }
        if prefixes.is_empty() {
            return Err(Error::NoCall { path: self.path.into(), names });
        }
        Ok(prefixes)
    }

    /// Reads the call with `prefix`, including lists. If Q, K and V have their default names, also reads the expected
    /// results, and, for the `backward` pass, the gradients of O and LSE.
    pub(super) fn call(
        &mut self,
        prefix: &str,
        selection: &Selection,
        backward: bool,
    ) -> Result<Call, Error> {
        let full = |name: &str| format!("{prefix}{name}");
        let names = selection.names().map(|name| {
            let is_whole = self.metadata.info(&full(name)).is_none() && self.metadata.info(name).is_some();
            if is_whole { name.to_owned() } else { full(name) }
        });
        let [q, k, v] = names.each_ref().map(|name| self.tensor(name, tensor::ATTENDED));
        let (q, k, v) = (q?, k?, v?);
        let mut list = |name| self.find(&full(name), tensor::LIST)?.map(Tensor::list).transpose();
        let lists = Lists {
            cu_seqlens_q: list("cu_seqlens_q")?,
            cu_seqlens_k: list("cu_seqlens_k")?,
            seqused_q: list("seqused_q")?,
            seqused_k: list("seqused_k")?,
        };
        let mut scales = <[Scales; 3]>::default();
        if [&q, &k, &v].iter().all(|x| x.dtype == Dtype::F8_E4M3) {
            for (scales, name) in scales.iter_mut().zip(&names) {
                *scales = self.scales(name)?;
            }
        }
        let qv = self.find(&full("qv"), tensor::ATTENDED)?;
        let sink = self.find(&full("sink"), tensor::EXPECTED)?;
        let mut beside = |name, types, wanted| match selection {
            Selection { q: None, k: None, v: None, .. } if wanted => self.find(&full(name), types),
            _ => Ok(None),
        };
        let (expected_o, expected_lse) =
            (beside("o", tensor::EXPECTED, true)?, beside("lse", tensor::EXPECTED, true)?);
        let dout = match beside("do", tensor::ATTENDED, backward)? {
            None => beside("dout", tensor::ATTENDED, backward)?,
            dout => dout,
        };
        let dlse = beside("dlse", tensor::EXPECTED, backward)?;
        let prefix = prefix.to_owned();
        Ok(Call { prefix, q, k, v, lists, qv, sink, scales, expected_o, expected_lse, dout, dlse })
    }

    /// The scales of the codes called `name`, and the means of their channels.
    fn scales(&mut self, name: &str) -> Result<Scales, Error> {
        let [scales, mean] = match name.strip_suffix("codes") {
            Some(start) => [format!("{start}scales"), format!("{start}mean")],
            None => [format!("{name}_descale"), format!("{name}_mean")],
        };
        let [scales, mean] = [scales, mean].map(|name| self.find(&name, tensor::EXPECTED));
        Ok(Scales { scales: scales?, mean: mean? })
    }

    /// Names in these calls that are probably scales of codes that were read, but were not read themselves.
    pub(super) fn unused_scales(&self, prefixes: &[String]) -> Option<Names> {
        let is_code =
            |name: &String| self.metadata.info(name).is_some_and(|info| info.dtype == Dtype::F8_E4M3);
        let mut names = self.names();
        names.0.retain(|name| {
            scales::is_named_so(name)
                && !self.read.contains(name)
                && prefixes.iter().any(|prefix| name.starts_with(prefix))
        });
        (!names.0.is_empty() && self.read.iter().any(is_code)).then_some(names)
    }

    fn names(&self) -> Names {
        let mut names = self.metadata.offset_keys();
        names.sort_unstable();
        Names(names)
    }

    /// Reads a tensor. Its type may be any supported one; messages name the `expected` types.
    pub(super) fn tensor(&mut self, name: &str, expected: &'static str) -> Result<Tensor, Error> {
        match self.find(name, expected)? {
            Some(tensor) => Ok(tensor),
            None => Err(Error::NoTensor { path: self.path.into(), name: short(name), names: self.names() }),
        }
    }

    /// Reads a tensor if it exists. Fails if its type is not supported; messages name the `expected` types.
    fn find(&mut self, name: &str, expected: &'static str) -> Result<Option<Tensor>, Error> {
        let Some(info) = self.metadata.info(name) else { return Ok(None) };
        self.read.insert(name.to_owned());
        let (name, shape, (begin, end)) = (short(name), info.shape.clone(), info.data_offsets);
        if !Tensor::reads(info.dtype) {
            return Err(Error::Dtype { tensor: name, given: info.dtype, expected });
        }
        let [from, to] = [begin, end].map(|offset| self.start.saturating_add(offset as u64));
        let bytes = self.source.bytes(from..to);
        let bytes = bytes.map_err(|source| Error::Read { path: self.path.into(), source })?;
        if bytes.len() != end - begin {
            let (path, given) = (self.path.into(), bytes.len());
            return Err(Error::TensorCut { path, tensor: name, given, expected: end - begin });
        }
        Ok(Some(Tensor { name, dtype: info.dtype, shape, bytes }))
    }
}

/// A file's header, and the offset of its data.
fn header(path: &Path, source: &mut Source) -> Result<(Metadata, u64), Error> {
    let refused = |source| Err(Error::NotSafetensors { path: path.into(), source });
    let failed = |source| Error::Read { path: path.into(), source };
    let length = source.bytes(0..LENGTH_BYTES).map_err(failed)?;
    let Ok(length) = <[u8; LENGTH_BYTES as usize]>::try_from(length.as_slice()) else {
        return refused(HeaderError::NoLength { given: length.len(), expected: LENGTH_BYTES });
    };
    if length.starts_with(ZIP) {
        return refused(HeaderError::Zip);
    }
    let length = u64::from_le_bytes(length);
    if length > MOST_HEADER_BYTES {
        return refused(HeaderError::Long { given: length, most: MOST_HEADER_BYTES });
    }
    let start = LENGTH_BYTES + length;
    let header = source.bytes(LENGTH_BYTES..start).map_err(failed)?;
    if header.len() as u64 != length {
        return refused(HeaderError::Cut { given: header.len(), expected: length });
    }
    let metadata: Metadata = match serde_json::from_slice(&header) {
        Ok(metadata) => metadata,
        Err(error) => return refused(HeaderError::Json(error)),
    };
    let expected = start.saturating_add(metadata.data_len() as u64);
    match source.len() {
        Some(given) if given != expected => refused(HeaderError::Length { given, expected }),
        _ => Ok((metadata, start)),
    }
}

/// The bytes of a safetensors file with `tensors`.
pub(crate) fn encode(path: &Path, tensors: &[Tensor]) -> Result<Vec<u8>, Error> {
    let views = tensors.iter().map(|tensor| (tensor.name.as_str(), tensor));
    safetensors::serialize(views, None).map_err(|source| Error::Serialize { path: path.into(), source })
}

impl View for &Tensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
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

    fn file(names: &[&str]) -> tempfile::NamedTempFile {
        let tensors = names.iter().map(|name| Tensor::new(name, ndarray::arr1(&[0.0f32])));
        let bytes = encode(Path::new("x"), &tensors.collect::<Vec<_>>()).unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn prefixes(names: &[&str], selection: &Selection) -> Result<Vec<String>, Error> {
        File::open(file(names).path()).unwrap().prefixes(selection)
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

    /// Names of a model's layers: a prefix and a name, full names, and common suffixes.
    #[test]
    fn names_go_with_prefixes() {
        let layers = ["m.0.q_proj", "m.0.k_proj", "m.0.v_proj", "m.1.q_proj", "m.1.k_proj", "m.1.v_proj"];
        let named = |prefix: Option<&str>, [q, k, v]: [&str; 3]| {
            let [q, k, v] = [q, k, v].map(|name| Some(name.to_owned()));
            Selection { prefix: prefix.map(str::to_owned), q, k, v }
        };
        let ends = ["q_proj", "k_proj", "v_proj"];
        assert_eq!(prefixes(&layers, &named(None, ends)).unwrap(), ["m.0.", "m.1."]);
        assert_eq!(prefixes(&layers, &named(Some("m.1."), ends)).unwrap(), ["m.1."]);
        let whole = ["m.0.q_proj", "m.1.k_proj", "m.0.v_proj"];
        assert_eq!(prefixes(&layers, &named(None, whole)).unwrap(), [""]);
        let file = file(&layers);
        let q = |prefix, selection| {
            File::open(file.path())
                .unwrap()
                .call(prefix, &selection, false)
                .map(|call| [call.q.name, call.k.name])
        };
        assert_eq!(q("m.1.", named(Some("m.1."), ends)).unwrap(), ["m.1.q_proj", "m.1.k_proj"]);
        assert_eq!(q("", named(None, whole)).unwrap(), ["m.0.q_proj", "m.1.k_proj"]);
        assert_eq!(q("m.0.", named(Some("m.0."), whole)).unwrap(), ["m.0.q_proj", "m.1.k_proj"]);
        let error = q("m.2.", named(Some("m.2."), ends)).unwrap_err().to_string();
        assert!(error.contains(" has no tensor m.2.q_proj; it holds "), "{error}");
    }

    #[test]
    fn an_archive_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"PK\x03\x04 and more").unwrap();
        let Err(error) = File::open(file.path()) else { panic!("it is read") };
        assert!(error.to_string().contains("it is a zip archive, as .npz files are"), "{error}");
    }
}
