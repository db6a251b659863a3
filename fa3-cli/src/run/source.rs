//! A file or pipe that is read in parts.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use super::error::Error;
use crate::console;
use crate::progress;

/// Reads parts of a file on demand. A pipe is read from its start up to the end of the part.
#[derive(Debug)]
pub(super) struct Source {
    file: fs::File,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// A regular file and its length in bytes.
    File { len: u64 },
    /// A pipe, and the bytes read from it so far.
    Pipe { read: Vec<u8> },
}

impl Source {
    /// Opens the file at `path`. Opening a pipe may block until it has a writer, so a terminal shows a message.
    /// Refuses folders, and devices, which may be endless.
    pub(super) fn open(path: &Path) -> Result<Source, Error> {
        let error = |source| Error::Read { path: path.into(), source };
        // The kind is checked first, because opening a device may have side effects.
        let metadata = fs::metadata(path).map_err(error)?;
        let kind = match metadata.is_file() {
            true => Kind::File { len: metadata.len() },
            false if is_pipe(&metadata) => Kind::Pipe { read: Vec::new() },
            false => return Err(Error::NeitherFileNorPipe { path: path.into() }),
        };
        let waits = matches!(kind, Kind::Pipe { .. }).then(|| {
            let name = console::escaped(&path.to_string_lossy());
            progress::late_bar(1).with_message(format!("waits for a process to write into {name}"))
        });
        let file = fs::File::open(path).map_err(error);
        waits.inspect(|bar| bar.finish_and_clear());
        Ok(Source { file: file?, kind })
    }

    /// The length in bytes; unknown for a pipe.
    pub(super) fn len(&self) -> Option<u64> {
        match self.kind {
            Kind::File { len } => Some(len),
            Kind::Pipe { .. } => None,
        }
    }

    /// The bytes in `range`; fewer if the file ends before.
    pub(super) fn bytes(&mut self, range: Range<u64>) -> io::Result<Vec<u8>> {
        match &mut self.kind {
            Kind::File { len } => {
                let within = range.start..range.end.min(*len).max(range.start);
                let count = within.end - within.start;
                let mut bytes = Vec::with_capacity(usize::try_from(count).unwrap_or(0));
                self.file.seek(SeekFrom::Start(within.start))?;
                self.file.by_ref().take(count).read_to_end(&mut bytes)?;
                Ok(bytes)
            }
            Kind::Pipe { read } => {
                let missing = range.end.saturating_sub(read.len() as u64);
                self.file.by_ref().take(missing).read_to_end(read)?;
                let at = |place: u64| read.len().min(usize::try_from(place).unwrap_or(usize::MAX));
                Ok(read[at(range.start)..at(range.end)].to_vec())
            }
        }
    }
}

#[cfg(unix)]
fn is_pipe(metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::FileTypeExt;
    metadata.file_type().is_fifo()
}

#[cfg(not(unix))]
fn is_pipe(_: &fs::Metadata) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_in_any_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        fs::write(&path, "0123456789").unwrap();
        let mut source = Source::open(&path).unwrap();
        assert_eq!(source.len(), Some(10));
        let mut bytes = |range| source.bytes(range).unwrap();
        assert_eq!([bytes(5..7), bytes(0..2), bytes(8..u64::MAX)], [b"56", b"01", b"89"]);
        assert_eq!(bytes(20..30), b"");
    }

    #[test]
    fn what_is_no_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let error = Source::open(folder.path()).unwrap_err().to_string();
        assert!(error.ends_with("it is neither a file nor a pipe"), "{error}");
        assert!(matches!(Source::open(&folder.path().join("none")), Err(Error::Read { .. })));
    }
}
