//! Files of recorded results.

use std::fs;
use std::io;
use std::path::PathBuf;

use super::{Micro, Suite};

/// The first bytes of a file.
const MAGIC: &[u8] = b"fa3 golden 1\n";

/// The results of a [`Suite`]. The file begins with `fa3 golden 1`, a newline, the device's name and a newline. For
/// each kernel follow its name, a newline, the digest of its inputs, the number of bytes of its results, and these
/// bytes. Numbers are 8 bytes, little-endian.
#[derive(Debug, PartialEq, Eq)]
pub struct Golden {
    /// Name of the recording device.
    pub device: String,
    /// Name, digest of the inputs and stored results of each kernel.
    pub results: Vec<(String, u64, Vec<u8>)>,
}

/// The reason why a kernel has no results.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum GoldenError {
    #[error("{path}: {error}")]
    File { path: String, error: io::Error },
    #[error("{path} is not a file of results")]
    Format { path: String },
    #[error("nothing is recorded for {name}: run the example `record` on an H100")]
    Missing { name: String },
    #[error("{name} was recorded with other inputs: run the example `record` on an H100")]
    Inputs { name: String },
}

impl Golden {
    /// Reads the file of a suite.
    ///
    /// # Errors
    /// If the file cannot be read or parsed.
    pub fn load(suite: &Suite) -> Result<Golden, GoldenError> {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{}.bin", suite.name));
        let name = path.display().to_string();
        let bytes = fs::read(&path).map_err(|error| GoldenError::File { path: name.clone(), error })?;
        Golden::decode(&bytes).ok_or(GoldenError::Format { path: name })
    }

    /// The stored results of `micro`.
    ///
    /// # Errors
    /// If it was not recorded, or was recorded with other inputs.
    pub fn of(&self, micro: &Micro) -> Result<&[u8], GoldenError> {
        let name = micro.name.clone();
        let found = self.results.iter().find(|(recorded, ..)| *recorded == name);
        match found {
            None => Err(GoldenError::Missing { name }),
            Some((_, inputs, _)) if *inputs != micro.inputs() => Err(GoldenError::Inputs { name }),
            Some((.., results)) => Ok(results),
        }
    }

    /// Encodes the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = [MAGIC, self.device.as_bytes(), b"\n"].concat();
        for (name, inputs, results) in &self.results {
            bytes.extend_from_slice(name.as_bytes());
            bytes.push(b'\n');
            bytes.extend_from_slice(&inputs.to_le_bytes());
            bytes.extend_from_slice(&(results.len() as u64).to_le_bytes());
            bytes.extend_from_slice(results);
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Golden> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        let device = line(&mut rest)?;
        let mut results = Vec::new();
        while !rest.is_empty() {
            let (name, inputs, len) = (line(&mut rest)?, number(&mut rest)?, number(&mut rest)?);
            results.push((name, inputs, rest.split_off(..usize::try_from(len).ok()?)?.to_vec()));
        }
        Some(Golden { device, results })
    }
}

fn line(rest: &mut &[u8]) -> Option<String> {
    let end = rest.iter().position(|&byte| byte == b'\n')?;
    let line = rest.split_off(..=end)?;
    String::from_utf8(line[..end].to_vec()).ok()
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    Some(u64::from_le_bytes(*rest.split_off(..8)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_they_were_written() {
        let results = vec![("one".to_owned(), 7, b"\n\0x".to_vec()), ("two".to_owned(), u64::MAX, vec![])];
        let golden = Golden { device: "NVIDIA H100".to_owned(), results };
        let bytes = golden.encode();
        assert_eq!(Golden::decode(&bytes), Some(golden));
        assert_eq!(Golden::decode(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Golden::decode(b"fa3 golden 2\n"), None);
    }
}
