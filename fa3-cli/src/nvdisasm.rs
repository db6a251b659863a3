//! nvdisasm, NVIDIA's disassembler, where it is installed.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use fa3_cuda::sass::{Listing, ListingError};

use crate::ptxas::{not_run, wheel};

/// A disassembler that runs.
#[derive(Debug)]
pub(crate) struct Nvdisasm {
    path: PathBuf,
    version: String,
}

/// Why there is none.
#[derive(Debug, thiserror::Error)]
#[error(
    "no nvdisasm: {}; $NVDISASM names one, {}",
    not_run(path, *kind),
    wheel("nvidia-cuda-nvdisasm")
)]
pub(crate) struct NoNvdisasm {
    path: PathBuf,
    kind: io::ErrorKind,
}

/// Why a kernel was not disassembled.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message above each variant documents it and names its fields")]
pub(crate) enum NvdisasmError {
    #[error("cannot write a temporary file: {0}")]
    Temporary(io::Error),
    #[error("cannot run nvdisasm: {0}")]
    Run(io::Error),
    #[error("nvdisasm rejects kernel {kernel}: {log}")]
    Rejected { kernel: String, log: String },
    #[error("nvdisasm's listing of kernel {kernel}: {why}")]
    Listing { kernel: String, why: ListingError },
}

impl Nvdisasm {
    /// The one that `$NVDISASM` names, or that of the path.
    ///
    /// # Errors
    /// [`NoNvdisasm`].
    pub(crate) fn find() -> Result<Nvdisasm, NoNvdisasm> {
        let path = PathBuf::from(std::env::var_os("NVDISASM").unwrap_or_else(|| "nvdisasm".into()));
        match Command::new(&path).arg("--version").stdin(Stdio::null()).output() {
            Ok(output) => {
                let version = crate::ptxas::version(&String::from_utf8_lossy(&output.stdout));
                Ok(Nvdisasm { path, version })
            }
            Err(error) => Err(NoNvdisasm { path, kind: error.kind() }),
        }
    }

    /// Its version and where it is.
    pub(crate) fn describe(&self) -> String {
        format!("{} ({})", self.version, self.path.display())
    }

    /// The machine code of a kernel's cubin.
    ///
    /// # Errors
    /// See [`NvdisasmError`].
    pub(crate) fn disassemble(&self, kernel: &str, cubin: &[u8]) -> Result<Listing, NvdisasmError> {
        let folder = tempfile::tempdir().map_err(NvdisasmError::Temporary)?;
        let path = folder.path().join("kernel.cubin");
        std::fs::write(&path, cubin).map_err(NvdisasmError::Temporary)?;
        let mut command = Command::new(&self.path);
        let output = command.arg("-c").arg(path).stdin(Stdio::null()).output().map_err(NvdisasmError::Run)?;
        let kernel = kernel.to_owned();
        if !output.status.success() {
            let log = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(NvdisasmError::Rejected { kernel, log });
        }
        let text = String::from_utf8_lossy(&output.stdout);
        Listing::parse(&text).map_err(|why| NvdisasmError::Listing { kernel, why })
    }
}
