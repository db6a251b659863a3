//! Writing files, whole or not at all.

use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

/// Why a file was not written. Whatever was there before is still there.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum WriteError {
    #[error("cannot write {}: there is no folder {}", path.display(), folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("cannot write {}: it exists and is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot write {}: it is a link to something that is not there", path.display())]
    DanglingLink { path: PathBuf },
    #[error("cannot write {}: it is an input", path.display())]
    IsInput { path: PathBuf },
    #[error("outputs {} and {} are the same file", first.display(), second.display())]
    SameFile { first: PathBuf, second: PathBuf },
    // Of an error the kind alone: the rest names the temporary file.
    #[error("cannot write {}: no file can be created in {}: {kind}", path.display(), folder.display())]
    NoNewFile { path: PathBuf, folder: PathBuf, kind: ErrorKind },
    #[error("cannot write {}: {kind}", path.display())]
    Io { path: PathBuf, kind: ErrorKind },
}

/// A place for a file, found fit for one before a long computation.
#[derive(Debug)]
pub(crate) struct NewFile {
    /// As the user named it.
    path: PathBuf,
    /// Where it is, behind links: a path that no other output has.
    target: PathBuf,
}

/// Takes the places of those outputs that are asked for, after which a program may compute for minutes.
///
/// # Errors
/// If one of `paths` cannot be written, is one of the `inputs`, or is the same file as another one.
pub(crate) fn open<const N: usize>(
    paths: [Option<&Path>; N],
    inputs: &[PathBuf],
) -> Result<[Option<NewFile>; N], WriteError> {
    // An input that is not there is told of when it is read.
    let inputs: Vec<PathBuf> = inputs.iter().filter_map(|input| input.canonicalize().ok()).collect();
    let mut files = [const { None }; N];
    for (index, path) in paths.into_iter().enumerate() {
        let Some(path) = path else { continue };
        let file = NewFile::open(path)?;
        if inputs.contains(&file.target) {
            return Err(WriteError::IsInput { path: file.path });
        }
        let same = files[..index].iter().flatten().find(|other: &&NewFile| other.target == file.target);
        if let Some(NewFile { path: first, .. }) = same {
            return Err(WriteError::SameFile { first: first.clone(), second: file.path });
        }
        files[index] = Some(file);
    }
    Ok(files)
}

/// Writes all `files` beside their places, then moves them there and says so.
///
/// # Errors
/// [`WriteError::Io`]. Nothing is moved before everything is written.
pub(crate) fn write(files: &[(NewFile, Vec<u8>)]) -> Result<(), WriteError> {
    let written: Vec<NamedTempFile> =
        files.iter().map(|(file, bytes)| file.write_beside(bytes)).collect::<Result<_, _>>()?;
    for (temporary, (file, _)) in written.into_iter().zip(files) {
        temporary.persist(&file.target).map_err(|error| file.error(&error.error))?;
    }
    for (file, _) in files {
        crate::print(&format_args!("wrote {}", file.path.display()));
    }
    Ok(())
}

/// A report as the contents of a file.
pub(crate) fn json(report: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_string_pretty(report).expect("a report holds numbers and names only");
    (json + "\n").into_bytes()
}

impl NewFile {
    fn open(path: &Path) -> Result<NewFile, WriteError> {
        let folder = folder(path);
        let in_folder = || {
            let name = path.file_name()?;
            Some(folder.canonicalize().ok().filter(|folder| folder.is_dir())?.join(name))
        };
        let target = match path.canonicalize() {
            Ok(existing) if existing.is_file() => existing,
            Ok(_) => return Err(WriteError::NotAFile { path: path.into() }),
            Err(_) if path.is_symlink() => return Err(WriteError::DanglingLink { path: path.into() }),
            Err(_) => in_folder()
                .ok_or_else(|| WriteError::NoFolder { path: path.into(), folder: folder.into() })?,
        };
        let file = NewFile { path: path.into(), target };
        // Whether there may be a new file. It goes away at once: one that waited for the end of the computation
        // would stay behind if that is interrupted.
        match file.temporary() {
            Ok(_) => Ok(file),
            Err(error) => {
                let NewFile { path, target } = file;
                Err(WriteError::NoNewFile { path, folder: self::folder(&target).into(), kind: error.kind() })
            }
        }
    }

    /// As the user named it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn write_beside(&self, bytes: &[u8]) -> Result<NamedTempFile, WriteError> {
        let write = || {
            let mut temporary = self.temporary()?;
            temporary.write_all(bytes)?;
            Ok(temporary)
        };
        write().map_err(|error| self.error(&error))
    }

    /// An empty file in the target's folder, so that it can be moved there.
    fn temporary(&self) -> io::Result<NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        #[cfg(unix)]
        {
            // What a new file usually gets, less the umask; a temporary file would be its owner's alone.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(fs::Permissions::from_mode(0o666));
        }
        builder.tempfile_in(folder(&self.target))
    }

    fn error(&self, error: &io::Error) -> WriteError {
        WriteError::Io { path: self.path.clone(), kind: error.kind() }
    }
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

    fn open_one(path: &Path) -> Result<NewFile, WriteError> {
        let [file] = open([Some(path)], &[])?;
        Ok(file.unwrap())
    }

    #[test]
    fn all_files_or_none() {
        let folder = tempfile::tempdir().unwrap();
        let good = folder.path().join("good");
        fs::write(&good, "old").unwrap();
        let file = |path: &Path| (open_one(path).unwrap(), b"new".to_vec());
        fs::create_dir(folder.path().join("gone")).unwrap();
        let gone = file(&folder.path().join("gone/bad"));
        fs::remove_dir(folder.path().join("gone")).unwrap();
        let error = write(&[file(&good), gone]).unwrap_err();
        assert!(error.to_string().ends_with("gone/bad: entity not found"), "{error}");
        assert_eq!(fs::read_to_string(&good).unwrap(), "old");
        write(&[file(&good)]).unwrap();
        assert_eq!(fs::read_to_string(&good).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn places_that_are_none() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(open_one(folder.path()), Err(WriteError::NotAFile { .. })));
        assert!(matches!(open_one(&folder.path().join("a/b")), Err(WriteError::NoFolder { .. })));
        assert!(open_one(&folder.path().join("a")).is_ok());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing waits there");
    }

    #[test]
    fn one_file_by_two_names() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        let (plain, dotted) = (folder.path().join("a"), folder.path().join("sub/../a"));
        let both = || open([Some(&plain), None, Some(&dotted)], &[]).unwrap_err();
        assert!(matches!(both(), WriteError::SameFile { .. }));
        fs::write(&plain, "").unwrap();
        assert!(matches!(both(), WriteError::SameFile { .. }));
        let error = open([Some(plain.as_path())], std::slice::from_ref(&dotted)).unwrap_err();
        assert!(matches!(error, WriteError::IsInput { .. }), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink("file", &link).unwrap();
        assert!(matches!(open_one(&link), Err(WriteError::DanglingLink { .. })));
        fs::write(&file, "old").unwrap();
        write(&[(open_one(&link).unwrap(), b"new".to_vec())]).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    }
}
