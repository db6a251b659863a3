//! NVIDIA's assembler and disassembler, if they are installed.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use fa3_cuda::JitReport;
use fa3_cuda::sass::Listing;

/// The ptxas that `$PTXAS` names, otherwise the one on the path.
#[derive(Clone, Debug)]
pub struct Ptxas {
    path: OsString,
    /// Its version, such as 13.5.37.
    pub version: String,
}

/// The nvdisasm that `$NVDISASM` names, otherwise the one on the path.
#[derive(Clone, Debug)]
pub struct Nvdisasm {
    path: OsString,
}

/// The error that a tool is not installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no {0}")]
pub struct NoTool(&'static str);

/// Output of ptxas for a kernel.
#[derive(Clone, Debug)]
pub struct Assembled {
    /// The report of ptxas on the kernel.
    pub report: JitReport,
    /// The machine code.
    pub cubin: Vec<u8>,
}

impl Ptxas {
    /// Finds the tool.
    ///
    /// # Errors
    /// [`NoTool`].
    pub fn find() -> Result<Ptxas, NoTool> {
        let (path, version) = find("ptxas", "PTXAS")?;
        Ok(Ptxas { path, version })
    }

    /// Assembles a kernel.
    ///
    /// # Panics
    /// If ptxas rejects the kernel.
    pub fn assemble(&self, name: &str, ptx: &str) -> Assembled {
        let [source, object] = ["ptx", "cubin"].map(|extension| temporary(name, extension));
        fs::write(&source, ptx).expect("a temporary file can be written");
        let args: [&OsStr; 5] =
            ["-arch=sm_90a".as_ref(), "-v".as_ref(), "-o".as_ref(), object.as_ref(), source.as_ref()];
        let output = run(&self.path, &args);
        let log = String::from_utf8_lossy(&succeeded(name, output).stderr).into_owned();
        let cubin = fs::read(&object).expect("ptxas writes it");
        remove(&[&source, &object]);
        let report = JitReport::parse(&log).unwrap_or_else(|| panic!("{name}: {log}"));
        Assembled { report, cubin }
    }
}

impl Nvdisasm {
    /// Finds the tool.
    ///
    /// # Errors
    /// [`NoTool`].
    pub fn find() -> Result<Nvdisasm, NoTool> {
        let (path, _) = find("nvdisasm", "NVDISASM")?;
        Ok(Nvdisasm { path })
    }

    /// Disassembles a kernel.
    ///
    /// # Panics
    /// If nvdisasm cannot read the machine code.
    pub fn disassemble(&self, name: &str, cubin: &[u8]) -> Listing {
        let path = temporary(name, "sass");
        fs::write(&path, cubin).expect("a temporary file can be written");
        let output = run(&self.path, &["-c".as_ref(), "-ndf".as_ref(), path.as_ref()]);
        remove(&[&path]);
        let text = String::from_utf8_lossy(&succeeded(name, output).stdout).into_owned();
        Listing::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
    }
}

/// The tool's path and version.
fn find(name: &'static str, variable: &str) -> Result<(OsString, String), NoTool> {
    let path = std::env::var_os(variable).unwrap_or_else(|| name.into());
    let output = run(&path, &["--version".as_ref()]).map_err(|_| NoTool(name))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let version = said.lines().find_map(|line| line.split_once(", V")).ok_or(NoTool(name))?.1.trim();
    Ok((path, version.to_owned()))
}

fn run(path: &OsStr, args: &[&OsStr]) -> io::Result<Output> {
    Command::new(path).args(args).stdin(Stdio::null()).output()
}

/// The output of a tool that succeeded.
fn succeeded(name: &str, output: io::Result<Output>) -> Output {
    let output = output.unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn temporary(name: &str, extension: &str) -> PathBuf {
    let file = format!("fa3-{}-{}.{extension}", std::process::id(), name.replace('/', "-"));
    std::env::temp_dir().join(file)
}

fn remove(paths: &[&Path]) {
    paths.iter().for_each(|path| fs::remove_file(path).expect("what was written can be removed"));
}
