//! Compiled kernels in a file.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use fa3_ir::Ptx;

/// The first bytes of an archive. The number is the version of its layout.
const MAGIC: [u8; 16] = *b"fa3 kernels 001\n";

/// Bytes of the magic number and of the number of kernels.
const HEAD: u64 = 24;

/// Bytes of a kernel's entry in the table.
const ENTRY: usize = 48;

/// Compiled kernels in a file, by the text of their PTX. A device that has one loads a kernel from it in a millisecond,
/// where the driver would compile for half a second ([`Device::with_archive`](crate::host::Device::with_archive)).
///
/// The text says everything that the machine code depends on, the architecture sm_90a included. So an archive may be
/// older or newer than the library: kernels that it lacks are compiled.
///
/// The file begins with a magic number and the number of kernels. A table follows with an entry for each kernel: the
/// hash of its PTX, the hash of its machine code, and the place of its machine code in the file (offset and length).
/// Then comes the machine code. Numbers are little-endian.
#[derive(Clone, Debug)]
pub struct Archive {
    path: PathBuf,
    /// Sorted by the hash of the PTX.
    entries: Vec<Entry>,
}

/// A file that is not an archive.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub enum ArchiveError {
    #[error("cannot read {}: {}", path.display(), error.kind())]
    Read { path: PathBuf, error: io::Error },
    #[error("{} is no archive of compiled kernels", path.display())]
    Foreign { path: PathBuf },
    #[error("{} has {given} bytes, and the table of its {kernels} kernels needs {needed}", path.display())]
    Truncated { path: PathBuf, given: u64, kernels: u64, needed: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    ptx: u128,
    cubin: u128,
    offset: u64,
    bytes: u64,
}

impl Archive {
    /// Reads the table of an archive. Machine code is read when it is asked for.
    ///
    /// # Errors
    /// The file cannot be read, is of another kind, or ends before its machine code does.
    pub fn open(path: &Path) -> Result<Archive, ArchiveError> {
        let read = |error| ArchiveError::Read { path: path.into(), error };
        let mut file = File::open(path).map_err(read)?;
        let given = file.metadata().map_err(read)?.len();
        let mut head = [0; HEAD as usize];
        let has_head =
            given >= HEAD && file.read_exact(&mut head).map_err(read).map(|()| head.starts_with(&MAGIC))?;
        if !has_head {
            return Err(ArchiveError::Foreign { path: path.into() });
        }
        let kernels = u64::from_le_bytes(number(&head[MAGIC.len()..]));
        let truncated = |needed| ArchiveError::Truncated { path: path.into(), given, kernels, needed };
        let needed = kernels.saturating_mul(ENTRY as u64).saturating_add(HEAD);
        if given < needed {
            return Err(truncated(needed));
        }
        let mut table = vec![0; (needed - HEAD) as usize];
        file.read_exact(&mut table).map_err(read)?;
        let entries: Vec<Entry> = table.chunks_exact(ENTRY).map(Entry::of).collect();
        let ends = entries.iter().map(|entry| entry.offset.saturating_add(entry.bytes));
        match ends.max().filter(|end| given < *end) {
            Some(needed) => Err(truncated(needed)),
            None => Ok(Archive { path: path.into(), entries }),
        }
    }

    /// The file of these kernels: PTX with its machine code.
    pub fn file<'a>(kernels: impl IntoIterator<Item = (&'a Ptx, &'a [u8])>) -> Vec<u8> {
        let mut kernels: Vec<_> =
            kernels.into_iter().map(|(ptx, cubin)| (hash(ptx.text.as_bytes()), cubin)).collect();
        kernels.sort_by_key(|(ptx, _)| *ptx);
        let count = kernels.len();
        let mut file = [&MAGIC[..], &(count as u64).to_le_bytes()].concat();
        let mut offset = HEAD + (count * ENTRY) as u64;
        for &(ptx, cubin) in &kernels {
            file.extend([ptx, hash(cubin)].map(u128::to_le_bytes).as_flattened());
            file.extend([offset, cubin.len() as u64].map(u64::to_le_bytes).as_flattened());
            offset += cubin.len() as u64;
        }
        kernels.iter().for_each(|(_, cubin)| file.extend_from_slice(cubin));
        file
    }

    /// The machine code of a kernel, if the archive has it undamaged.
    pub fn find(&self, ptx: &Ptx) -> Option<Vec<u8>> {
        let hash_of_text = hash(ptx.text.as_bytes());
        let index = self.entries.binary_search_by_key(&hash_of_text, |entry| entry.ptx).ok()?;
        let entry = self.entries[index];
        let mut file = File::open(&self.path).ok()?;
        file.seek(SeekFrom::Start(entry.offset)).ok()?;
        // The file may have changed since it was opened.
        let mut cubin = Vec::new();
        file.take(entry.bytes).read_to_end(&mut cubin).ok()?;
        (hash(&cubin) == entry.cubin).then_some(cubin)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of kernels.
    pub fn kernels(&self) -> usize {
        self.entries.len()
    }
}

impl Entry {
    fn of(bytes: &[u8]) -> Entry {
        Entry {
            ptx: u128::from_le_bytes(number(bytes)),
            cubin: u128::from_le_bytes(number(&bytes[16..])),
            offset: u64::from_le_bytes(number(&bytes[32..])),
            bytes: u64::from_le_bytes(number(&bytes[40..])),
        }
    }
}

/// The first N bytes, which are a number.
fn number<const N: usize>(bytes: &[u8]) -> [u8; N] {
    *bytes.first_chunk().expect("an entry has all its numbers")
}

/// FNV-1a with 128 bits. Archives are trusted, as the library is: the hash finds accidents and not attacks.
fn hash(bytes: &[u8]) -> u128 {
    const OFFSET_BASIS: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = (1 << 88) + 0x13b;
    bytes.iter().fold(OFFSET_BASIS, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An archive is read by later versions of the library.
    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(hash(b""), 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d);
        assert_eq!(hash(b"a"), 0xd228_cb69_6f1a_8caf_7891_2b70_4e4a_8964);
        assert_eq!(hash(b"foobar"), 0x343e_1662_793c_64bf_6f0d_3597_ba44_6f18);
    }
}
