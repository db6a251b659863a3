//! Archives of compiled kernels, of any age and in any state.

use std::fs;
use std::path::PathBuf;

use fa3_cuda::kernels::ladder::Spec;
use fa3_cuda::kernels::{self, KernelSpec};
use fa3_cuda::{Archive, ArchiveError};
use fa3_ir::{Ptx, ptx};
use tempfile::TempDir;

/// Two kernels with stand-ins for their machine code.
fn kernels() -> [(Ptx, Vec<u8>); 2] {
    [(Spec::ALL[0], 3), (Spec::ALL[1], 300)].map(|(spec, bytes)| {
        let machine_code = (0..bytes).map(|at| at as u8 ^ 0x5a).collect();
        (ptx::emit(&spec.kernel()).expect("a sound kernel"), machine_code)
    })
}

fn file() -> Vec<u8> {
    Archive::file(kernels().iter().map(|(ptx, cubin)| (ptx, &cubin[..])))
}

/// A file with these bytes, in a folder of its own.
fn written(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let path = folder.path().join("kernels.sm_90a");
    fs::write(&path, bytes).expect("a file can be written");
    (folder, path)
}

#[test]
fn it_finds_what_it_has() {
    let (_folder, path) = written(&file());
    let archive = Archive::open(&path).unwrap();
    assert_eq!((archive.kernels(), archive.path()), (2, &*path));
    for (ptx, cubin) in kernels() {
        assert_eq!(archive.find(&ptx), Some(cubin));
        let other = Ptx { text: ptx.text + "\n", ..ptx };
        assert_eq!(archive.find(&other), None);
    }
}

/// A disk may be full, and a copy may end early.
#[test]
fn an_archive_that_ends_early_is_refused() {
    let file = file();
    for bytes in 0..file.len() {
        let (_folder, path) = written(&file[..bytes]);
        let error = Archive::open(&path).expect_err("it lacks bytes");
        let is_foreign = matches!(error, ArchiveError::Foreign { .. });
        assert_eq!(is_foreign, bytes < 24, "{bytes}: {error}");
    }
    let (_folder, path) = written(&[&file[..16], &[0xff; 8]].concat());
    assert!(matches!(Archive::open(&path), Err(ArchiveError::Truncated { needed: u64::MAX, .. })));
}

#[test]
fn other_files_are_refused() {
    for bytes in [&b""[..], b"fa3 kernels 002\n........", &[0x7f; 4096]] {
        let (_folder, path) = written(bytes);
        assert!(matches!(Archive::open(&path), Err(ArchiveError::Foreign { .. })));
    }
    let folder = tempfile::tempdir().unwrap();
    let error = Archive::open(&folder.path().join("none")).unwrap_err();
    assert!(error.to_string().ends_with("none: entity not found"), "{error}");
}

/// Every bit of the file counts: no kernel gets other machine code than its own.
#[test]
fn a_damaged_kernel_is_not_found() {
    let file = file();
    for at in 0..file.len() {
        let mut damaged = file.clone();
        damaged[at] ^= 0x10;
        let (_folder, path) = written(&damaged);
        let Ok(archive) = Archive::open(&path) else { continue };
        let found = kernels().map(|(ptx, cubin)| archive.find(&ptx).map(|found| found == cubin));
        assert!(found.contains(&None) && !found.contains(&Some(false)), "{at}: {found:?}");
    }
}

/// An installation may replace or remove the file while a process has it open.
#[test]
fn an_archive_that_changes_under_a_process_is_not_believed() {
    let (_folder, path) = written(&file());
    let archive = Archive::open(&path).unwrap();
    let changed: Vec<u8> = file().iter().map(|byte| !byte).collect();
    let finds = || kernels().iter().any(|(ptx, _)| archive.find(ptx).is_some());
    for bytes in [changed, Vec::new()] {
        fs::write(&path, bytes).unwrap();
        assert!(!finds());
    }
    fs::remove_file(&path).unwrap();
    assert!(!finds());
}

/// The list names the kernels of usual calls, and no kernel twice.
#[test]
fn usual_kernels_are_of_every_pass() {
    let texts: Vec<Ptx> =
        kernels::usual().map(|spec| ptx::emit(&spec.kernel()).expect("a sound kernel")).collect();
    let count = |name: &str| texts.iter().filter(|ptx| ptx.entry == name).count();
    assert!(
        ["fwd", "bwd_dkv", "bwd_dq", "bwd_stats", "merge", "schedule", "append"]
            .iter()
            .all(|name| count(name) > 0)
    );
    let distinct: std::collections::HashSet<&str> = texts.iter().map(|ptx| &*ptx.text).collect();
    assert_eq!(distinct.len(), texts.len());
}
