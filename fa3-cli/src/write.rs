//! Writing files, whole or not at all.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Why a file was not written. Whatever was there before is still there.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum WriteError {
    #[error("cannot write {}: there is no folder {}", path.display(), folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("cannot write {}: it exists and is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot write {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A file to be written.
pub(crate) struct NewFile<'a> {
    /// Where.
    pub(crate) path: &'a Path,
    /// What.
    pub(crate) bytes: Vec<u8>,
}

/// Whether `path` looks like a place for a file: to be asked before a long computation.
///
/// # Errors
/// [`WriteError::NoFolder`] without a folder to write to, [`WriteError::NotAFile`] for a folder or a device.
pub(crate) fn check(path: &Path) -> Result<(), WriteError> {
    let folder = folder(path);
    if !folder.is_dir() {
        return Err(WriteError::NoFolder { path: path.into(), folder: folder.into() });
    }
    match fs::metadata(path) {
        Ok(existing) if !existing.is_file() => Err(WriteError::NotAFile { path: path.into() }),
        _ => Ok(()),
    }
}

/// Writes all `files` beside their places and then moves them there.
///
/// # Errors
/// Those of [`check`], and [`WriteError::Io`]. Nothing is moved before everything is written.
pub(crate) fn write(files: &[NewFile<'_>]) -> Result<(), WriteError> {
    files.iter().try_for_each(|file| check(file.path))?;
    let written: Vec<NamedTempFile> = files.iter().map(write_beside).collect::<Result<_, _>>()?;
    for (temporary, NewFile { path, .. }) in written.into_iter().zip(files) {
        temporary.persist(path).map_err(|error| WriteError::Io { path: path.into(), source: error.error })?;
    }
    Ok(())
}

fn write_beside(NewFile { path, bytes }: &NewFile<'_>) -> Result<NamedTempFile, WriteError> {
    let write = || {
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        {
            // What a new file usually gets, less the umask; a temporary file would be its owner's alone.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        let mut file = builder.tempfile_in(folder(path))?;
        file.write_all(bytes)?;
        Ok(file)
    };
    write().map_err(|source| WriteError::Io { path: path.into(), source })
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file<'a>(path: &'a Path, text: &str) -> NewFile<'a> {
        NewFile { path, bytes: text.into() }
    }

    #[test]
    fn all_files_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let (good, bad) = (folder.path().join("good"), folder.path().join("missing/bad"));
        fs::write(&good, "old").unwrap();
        let error = write(&[file(&good, "new"), file(&bad, "new")]).unwrap_err();
        assert!(matches!(error, WriteError::NoFolder { .. }), "{error}");
        assert_eq!(fs::read_to_string(&good).unwrap(), "old");
        write(&[file(&good, "new")]).unwrap();
        assert_eq!(fs::read_to_string(&good).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn folders_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(check(folder.path()), Err(WriteError::NotAFile { .. })));
        assert!(check(Path::new("no_such_file")).is_ok());
    }
}
