//! Writes files atomically.
//!
//! A file is written to a temporary file `.NAME.XXXXXX` in the same folder and then renamed. If the command is
//! interrupted, the old file is unchanged and the temporary file remains; removing it would need a signal handler, and
//! a crate for one.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::iter;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::NamedTempFile;

use crate::console;

/// Why a file was not written. An existing file is unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("cannot write {}: there is no folder {}", path.display(), folder.display())]
    NoFolder { path: PathBuf, folder: PathBuf },
    #[error("cannot write to stdout, where the report goes; a file of the name - is ./-")]
    Stdout,
    #[error("cannot write {}: it is the name of a folder", path.display())]
    NamesFolder { path: PathBuf },
    #[error("cannot write {}: it exists and is not a file", path.display())]
    NotAFile { path: PathBuf },
    #[error("cannot write {}: it leads to {}, where there are no files to replace", path.display(), folder.display())]
    Device { path: PathBuf, folder: PathBuf },
    #[error("cannot write {}: it is read-only", path.display())]
    ReadOnly { path: PathBuf },
    #[error("cannot write {}: it is a link to something that is not there", path.display())]
    DanglingLink { path: PathBuf },
    #[error("cannot write {}: it is an input", path.display())]
    IsInput { path: PathBuf },
    #[error("outputs {} and {} are the same file", first.display(), second.display())]
    SameFile { first: PathBuf, second: PathBuf },
    // Only the error's kind is shown: its message names the temporary file.
    #[error("cannot write {}: no file can be created in {}: {kind}", path.display(), folder.display())]
    NoNewFile { path: PathBuf, folder: PathBuf, kind: ErrorKind },
    #[error("cannot write {}: {kind}", path.display())]
    Io { path: PathBuf, kind: ErrorKind },
}

/// An output path that was checked before a long computation.
#[derive(Debug)]
pub(crate) struct NewFile {
    /// The path as the user gave it.
    path: PathBuf,
    /// The path with symbolic links resolved. No two outputs share it.
    target: PathBuf,
    /// The permissions of the existing file that will be replaced.
    replaces: Option<Permissions>,
}

/// Checks the given output paths before a computation that may take minutes. Refuses paths that cannot be written,
/// paths of `inputs`, and two paths of one file.
pub(crate) fn open<const N: usize>(
    paths: [Option<&Path>; N],
    inputs: &[PathBuf],
) -> Result<[Option<NewFile>; N], WriteError> {
    // A missing input is reported when it is read.
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

/// Writes all `files` to temporary files, then renames them and prints their names. No file is renamed before all are
/// written.
pub(crate) fn write(files: impl IntoIterator<Item = (NewFile, Vec<u8>)>) -> Result<(), WriteError> {
    let write = |(file, bytes): (NewFile, Vec<u8>)| Ok((file.write_beside(&bytes)?, file));
    let written: Vec<(NamedTempFile, NewFile)> = files.into_iter().map(write).collect::<Result<_, _>>()?;
    let mut names = Vec::new();
    for (temporary, file) in written {
        temporary.persist(&file.target).map_err(|error| file.error(&error.error))?;
        names.push(console::escaped(&file.path.to_string_lossy()));
    }
    names.iter().for_each(|name| console::print(&format_args!("wrote {name}")));
    Ok(())
}

/// Makes a folder, unless it is there.
pub(crate) fn make_folder(path: &Path) -> Result<(), WriteError> {
    fs::create_dir_all(path).map_err(|error| WriteError::Io { path: path.into(), kind: error.kind() })
}

/// Writes files by their names to a folder, which is made if it is not there. All of them are written, or none.
pub(crate) fn write_into(path: &Path, files: Vec<(String, Vec<u8>)>) -> Result<(), WriteError> {
    make_folder(path)?;
    let open = |(name, bytes): (String, Vec<u8>)| Ok((NewFile::open(&path.join(name))?, bytes));
    write(files.into_iter().map(open).collect::<Result<Vec<_>, _>>()?)
}

/// Writes files as [`write`] does, and leaves a line free above their names.
pub(crate) fn write_below(files: Vec<(NewFile, Vec<u8>)>) -> Result<(), WriteError> {
    if !files.is_empty() {
        console::print(&"");
    }
    write(files)
}

/// A report as JSON, for a file.
pub(crate) fn json(report: &impl Serialize) -> Vec<u8> {
    let json = serde_json::to_string_pretty(report).expect("a report holds numbers and names only");
    (json + "\n").into_bytes()
}

impl NewFile {
    fn open(path: &Path) -> Result<NewFile, WriteError> {
        if path == Path::new("-") {
            return Err(WriteError::Stdout);
        }
        if let Some(folder) = folder_of_devices(path) {
            return Err(WriteError::Device { path: path.into(), folder });
        }
        let target = match path.canonicalize() {
            Ok(existing) if existing.is_file() => existing,
            Ok(_) => return Err(WriteError::NotAFile { path: path.into() }),
            Err(_) if path.is_symlink() => return Err(WriteError::DanglingLink { path: path.into() }),
            Err(_) => new_target(path)?,
        };
        let replaces = fs::metadata(&target).ok().map(|metadata| metadata.permissions());
        let file = NewFile { path: path.into(), target, replaces };
        file.check_writable()?;
        Ok(file)
    }

    /// Checks that the target can be written. Replacing a read-only file would be possible, but is refused.
    fn check_writable(&self) -> Result<(), WriteError> {
        if let Some(permissions) = &self.replaces {
            if permissions.readonly() {
                return Err(WriteError::ReadOnly { path: self.path.clone() });
            }
            OpenOptions::new().write(true).open(&self.target).map_err(|error| self.error(&error))?;
        }
        // Checks that a file can be created in the folder. The file is removed at once; if it were kept for the
        // computation, it would remain after an interruption.
        match self.temporary() {
            Ok(_) => Ok(()),
            Err(error) => {
                let NewFile { path, target, .. } = self;
                let (path, folder) = (path.clone(), folder(target).into());
                Err(WriteError::NoNewFile { path, folder, kind: error.kind() })
            }
        }
    }

    /// The path as the user gave it.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    fn write_beside(&self, bytes: &[u8]) -> Result<NamedTempFile, WriteError> {
        let write = || {
            let mut temporary = self.temporary()?;
            if let Some(permissions) = &self.replaces {
                temporary.as_file().set_permissions(permissions.clone())?;
            }
            temporary.write_all(bytes)?;
            Ok(temporary)
        };
        write().map_err(|error| self.error(&error))
    }

    /// Creates an empty temporary file in the target's folder, from where it can be renamed.
    fn temporary(&self) -> io::Result<NamedTempFile> {
        // A long name is shortened, because the temporary name is longer.
        let name: String =
            self.target.file_name().unwrap_or_default().to_string_lossy().chars().take(40).collect();
        let prefix = format!(".{name}.");
        let mut builder = tempfile::Builder::new();
        builder.prefix(&prefix);
        #[cfg(unix)]
        if self.replaces.is_none() {
            // The usual mode of a new file, before the umask. By default a temporary file is private to its owner.
            use std::os::unix::fs::PermissionsExt;
            builder.permissions(Permissions::from_mode(0o666));
        }
        builder.tempfile_in(folder(&self.target))
    }

    fn error(&self, error: &io::Error) -> WriteError {
        let (path, folder) = (self.path.clone(), folder(&self.target));
        if error.kind() == ErrorKind::NotFound && !folder.exists() {
            return WriteError::NoFolder { path, folder: folder.into() };
        }
        WriteError::Io { path, kind: error.kind() }
    }
}

/// The resolved path of a file that does not exist yet.
fn new_target(path: &Path) -> Result<PathBuf, WriteError> {
    // `x/` and `x/.` have the name x, but do not end with it.
    let ends_with = |name: &&OsStr| path.as_os_str().as_encoded_bytes().ends_with(name.as_encoded_bytes());
    let name = path.file_name().filter(ends_with);
    let name = name.ok_or_else(|| WriteError::NamesFolder { path: path.into() })?;
    let folder = folder(path);
    match folder.canonicalize() {
        Ok(folder) if folder.is_dir() => Ok(folder.join(name)),
        _ => Err(WriteError::NoFolder { path: path.into(), folder: folder.into() }),
    }
}

/// Follows the links of `path`, and returns the first folder that holds devices or the open files of processes.
/// /dev/stdout leads to the file that the shell redirects to. Replacing that file would destroy its contents, and lose
/// what is printed later.
fn folder_of_devices(path: &Path) -> Option<PathBuf> {
    const MOST_LINKS: usize = 40;
    let follow = |at: &PathBuf| Some(folder(at).join(at.read_link().ok()?));
    let steps = iter::successors(Some(path.to_path_buf()), follow).take(MOST_LINKS);
    steps.filter_map(|at| folder(&at).canonicalize().ok()).find(|folder| {
        folder.starts_with("/proc") || folder.starts_with("/dev") && !folder.starts_with("/dev/shm")
    })
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
        let error = write([file(&good), gone]).unwrap_err();
        let folder_is_gone = format!("there is no folder {}", folder.path().join("gone").display());
        assert!(error.to_string().ends_with(&folder_is_gone), "{error}");
        assert_eq!(fs::read_to_string(&good).unwrap(), "old");
        write([file(&good)]).unwrap();
        assert_eq!(fs::read_to_string(&good).unwrap(), "new");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn places_that_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let inside = |name: &str| folder.path().join(name).display().to_string();
        for (path, why) in [
            (inside(""), "it exists and is not a file"),
            (inside("a/b"), "there is no folder"),
            (inside("new/"), "it is the name of a folder"),
            (inside("new/."), "it is the name of a folder"),
            ("-".to_owned(), "cannot write to stdout, where the report goes; a file of the name - is ./-"),
        ] {
            let error = open_one(Path::new(&path)).unwrap_err().to_string();
            assert!(error.ends_with(why) || error.contains(&format!("{why} ")), "{error}");
        }
        open_one(&folder.path().join("a")).unwrap();
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

    #[test]
    fn files_on_the_way_say_whose_they_are() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["out.safetensors".to_owned(), "ö".repeat(127)] {
            let file = open_one(&folder.path().join(&name)).unwrap();
            let written = file.write_beside(b"new").unwrap();
            let beside = written.path().file_name().unwrap().to_str().unwrap();
            let start: String = name.chars().take(40).collect();
            assert!(beside.starts_with(&format!(".{start}.")), "{beside}");
            written.persist(&file.target).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[cfg(unix)]
    #[test]
    fn permissions_are_kept_and_minded() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("private");
        fs::write(&path, "old").unwrap();
        for mode in [0o600, 0o666] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            write([(open_one(&path).unwrap(), b"new".to_vec())]).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode);
        }
        fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
        let error = open_one(&path).unwrap_err();
        assert!(matches!(error, WriteError::ReadOnly { .. }), "{error}");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn devices_are_no_places() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/stdout", &link).unwrap();
        let own = format!("/proc/{}/fd/1", std::process::id());
        for path in
            ["/dev/stdout", "/dev/fd/1", &own, "/dev/null", "/dev/new", "/proc/new", link.to_str().unwrap()]
        {
            let error = open_one(Path::new(path)).unwrap_err();
            assert!(matches!(error, WriteError::Device { .. }), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["file", "link"].map(|name| folder.path().join(name));
        std::os::unix::fs::symlink("file", &link).unwrap();
        assert!(matches!(open_one(&link), Err(WriteError::DanglingLink { .. })));
        fs::write(&file, "old").unwrap();
        write([(open_one(&link).unwrap(), b"new".to_vec())]).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
    }
}
