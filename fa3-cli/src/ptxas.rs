//! ptxas, NVIDIA's assembler, where it is installed: the same compiler as the driver's.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use fa3_cuda::JitReport;
use fa3_ir::Ptx;

/// An assembler that runs.
#[derive(Debug)]
pub(crate) struct Ptxas {
    path: PathBuf,
    version: String,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
#[error("no ptxas: {}; $PTXAS names one, {}", not_run(path, *kind), wheel("nvidia-cuda-nvcc"))]
pub(crate) struct NoPtxas {
    path: PathBuf,
    kind: io::ErrorKind,
}

/// What it made of a kernel.
#[derive(Debug)]
pub(crate) struct Assembled {
    /// What it says of the kernel.
    pub(crate) report: JitReport,
    /// How long it took.
    pub(crate) time: Duration,
    /// The machine code, as a cubin.
    pub(crate) cubin: Vec<u8>,
}

/// Why a kernel was not assembled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum PtxasError {
    #[error("cannot write or read a temporary file: {0}")]
    Temporary(io::Error),
    #[error("cannot run ptxas: {0}")]
    Run(io::Error),
    #[error("ptxas rejects kernel {kernel}: {log}")]
    Rejected { kernel: String, log: String },
}

impl Ptxas {
    /// The one that `$PTXAS` names, or that of the path.
    ///
    /// # Errors
    /// [`NoPtxas`].
    pub(crate) fn find() -> Result<Ptxas, NoPtxas> {
        let path = PathBuf::from(std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into()));
        match Command::new(&path).arg("--version").stdin(Stdio::null()).output() {
            Ok(output) => Ok(Ptxas { path, version: version(&String::from_utf8_lossy(&output.stdout)) }),
            Err(error) => Err(NoPtxas { path, kind: error.kind() }),
        }
    }

    /// Its version and where it is.
    pub(crate) fn describe(&self) -> String {
        format!("{} ({})", self.version, self.path.display())
    }

    /// Assembles a kernel.
    ///
    /// # Errors
    /// See [`PtxasError`].
    pub(crate) fn assemble(&self, ptx: &Ptx) -> Result<Assembled, PtxasError> {
        let folder = tempfile::tempdir().map_err(PtxasError::Temporary)?;
        let [source, object] = ["kernel.ptx", "kernel.cubin"].map(|name| folder.path().join(name));
        std::fs::write(&source, &ptx.text).map_err(PtxasError::Temporary)?;
        let mut command = Command::new(&self.path);
        let args: [OsString; 5] =
            ["-arch=sm_90a".into(), "-v".into(), "-o".into(), (&object).into(), source.into()];
        let start = Instant::now();
        let output = command.args(args).stdin(Stdio::null()).output().map_err(PtxasError::Run)?;
        let time = start.elapsed();
        let log = String::from_utf8_lossy(&output.stderr);
        match JitReport::parse(&log) {
            Some(report) if output.status.success() => {
                let cubin = std::fs::read(object).map_err(PtxasError::Temporary)?;
                Ok(Assembled { report, time, cubin })
            }
            _ => Err(PtxasError::Rejected { kernel: ptx.entry.clone(), log: log.trim().to_owned() }),
        }
    }
}

/// Why a tool did not run.
pub(crate) fn not_run(path: &Path, kind: io::ErrorKind) -> String {
    let name = path.display();
    match kind == io::ErrorKind::NotFound {
        true if path.components().count() == 1 => format!("{name} is not on the path"),
        true => format!("there is no {name}"),
        false => format!("cannot run {name}: {kind}"),
    }
}

/// How to get a tool of NVIDIA's without the toolkit.
pub(crate) fn wheel(package: &str) -> String {
    format!("and the zip archive that `pip download --no-deps {package}` fetches has one")
}

/// The version in what `ptxas --version` prints, and NVIDIA's other tools: "Cuda compilation tools,
/// release 13.0, V13.0.48".
pub(crate) fn version(text: &str) -> String {
    let number = text.lines().filter(|line| line.contains("release")).find_map(|line| line.split_once(", V"));
    number.map_or_else(|| "of unknown version".to_owned(), |(_, number)| number.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        let text = "ptxas: NVIDIA (R) Ptx optimizing assembler\nCopyright (c) 2005-2025\n\
                    Cuda compilation tools, release 13.0, V13.0.48\nBuild cuda_13.0.r13.0/compiler.1\n";
        assert_eq!(version(text), "13.0.48");
        assert_eq!(version("something else"), "of unknown version");
    }

    #[test]
    fn tools_that_do_not_run() {
        let said = |path: &str, kind| not_run(Path::new(path), kind);
        assert_eq!(said("ptxas", io::ErrorKind::NotFound), "ptxas is not on the path");
        assert_eq!(said("/opt/ptxas", io::ErrorKind::NotFound), "there is no /opt/ptxas");
        assert_eq!(said("/opt", io::ErrorKind::PermissionDenied), "cannot run /opt: permission denied");
    }
}
