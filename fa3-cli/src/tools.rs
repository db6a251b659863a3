//! NVIDIA's assembler and disassembler, if installed.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fa3_cuda::JitReport;
use fa3_cuda::sass::{Listing, ListingError};
use fa3_ir::Ptx;

/// ptxas, the compiler of PTX. The driver contains the same compiler.
#[derive(Debug)]
pub(crate) struct Ptxas(pub(crate) Tool);

/// nvdisasm, which disassembles machine code.
#[derive(Debug)]
pub(crate) struct Nvdisasm(pub(crate) Tool);

/// An installed tool.
#[derive(Debug)]
pub(crate) struct Tool {
    name: &'static str,
    path: PathBuf,
    version: String,
}

/// A tool that is missing or does not run. The message names a wheel that contains it, for users without the toolkit.
#[derive(Debug, thiserror::Error)]
#[error(
    "no {name}: {}; ${variable} names one, and the zip archive that `pip download --no-deps {wheel}` fetches has one",
    not_run(path, *kind)
)]
pub(crate) struct NoTool {
    name: &'static str,
    variable: &'static str,
    wheel: &'static str,
    path: PathBuf,
    kind: io::ErrorKind,
}

/// Why a tool fails for a kernel.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    #[error("cannot write or read a temporary file: {0}")]
    Temporary(io::Error),
    #[error("cannot run {tool}: {source}")]
    Run { tool: &'static str, source: io::Error },
    #[error("{tool} rejects kernel {kernel}: {log}")]
    Rejected { tool: &'static str, kernel: String, log: String },
    #[error("nvdisasm's listing of kernel {kernel}: {why}")]
    Listing { kernel: String, why: ListingError },
}

/// An assembled kernel.
#[derive(Debug)]
pub(crate) struct Assembled {
    /// The report that ptxas prints.
    pub(crate) report: JitReport,
    /// The time to assemble.
    pub(crate) time: Duration,
    /// The machine code, as a cubin.
    pub(crate) cubin: Vec<u8>,
}

impl Ptxas {
    /// Finds ptxas at `$PTXAS`, or on the path.
    pub(crate) fn find() -> Result<Ptxas, NoTool> {
        Tool::find("ptxas", "PTXAS", "nvidia-cuda-nvcc").map(Ptxas)
    }

    pub(crate) fn assemble(&self, ptx: &Ptx) -> Result<Assembled, ToolError> {
        let folder = tempfile::tempdir().map_err(ToolError::Temporary)?;
        let [source, object] = ["kernel.ptx", "kernel.cubin"].map(|name| folder.path().join(name));
        std::fs::write(&source, &ptx.text).map_err(ToolError::Temporary)?;
        let start = Instant::now();
        let args: [&OsStr; 5] =
            ["-arch=sm_90a".as_ref(), "-v".as_ref(), "-o".as_ref(), object.as_ref(), source.as_ref()];
        let output = self.0.run(&args)?;
        let time = start.elapsed();
        match JitReport::parse(&String::from_utf8_lossy(&output.stderr)) {
            Some(report) if output.status.success() => {
                let cubin = std::fs::read(object).map_err(ToolError::Temporary)?;
                Ok(Assembled { report, time, cubin })
            }
            _ => Err(self.0.rejects(&ptx.entry, &output)),
        }
    }
}

impl Nvdisasm {
    /// Finds nvdisasm at `$NVDISASM`, or on the path.
    pub(crate) fn find() -> Result<Nvdisasm, NoTool> {
        Tool::find("nvdisasm", "NVDISASM", "nvidia-cuda-nvdisasm").map(Nvdisasm)
    }

    pub(crate) fn disassemble(&self, kernel: &str, cubin: &[u8]) -> Result<Listing, ToolError> {
        let folder = tempfile::tempdir().map_err(ToolError::Temporary)?;
        let path = folder.path().join("kernel.cubin");
        std::fs::write(&path, cubin).map_err(ToolError::Temporary)?;
        let output = self.0.run(&["-c".as_ref(), path.as_ref()])?;
        if !output.status.success() {
            return Err(self.0.rejects(kernel, &output));
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Listing::parse(&text).map_err(|why| ToolError::Listing { kernel: kernel.to_owned(), why })
    }
}

impl Tool {
    fn find(name: &'static str, variable: &'static str, wheel: &'static str) -> Result<Tool, NoTool> {
        let path = PathBuf::from(std::env::var_os(variable).unwrap_or_else(|| name.into()));
        match Command::new(&path).arg("--version").stdin(Stdio::null()).output() {
            Ok(output) => Ok(Tool { name, path, version: version(&String::from_utf8_lossy(&output.stdout)) }),
            Err(error) => Err(NoTool { name, variable, wheel, path, kind: error.kind() }),
        }
    }

    /// The version and the path.
    pub(crate) fn describe(&self) -> String {
        format!("{} ({})", self.version, self.path.display())
    }

    fn run(&self, args: &[&OsStr]) -> Result<Output, ToolError> {
        let output = Command::new(&self.path).args(args).stdin(Stdio::null()).output();
        output.map_err(|source| ToolError::Run { tool: self.name, source })
    }

    fn rejects(&self, kernel: &str, output: &Output) -> ToolError {
        let log = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        ToolError::Rejected { tool: self.name, kernel: kernel.to_owned(), log }
    }
}

/// Why a tool did not run, in words.
fn not_run(path: &Path, kind: io::ErrorKind) -> String {
    let name = path.display();
    match kind == io::ErrorKind::NotFound {
        true if path.components().count() == 1 => format!("{name} is not on the path"),
        true => format!("there is no {name}"),
        false => format!("cannot run {name}: {kind}"),
    }
}

/// Extracts the version from the output of `--version`: "Cuda compilation tools, release 13.0, V13.0.48".
fn version(text: &str) -> String {
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
