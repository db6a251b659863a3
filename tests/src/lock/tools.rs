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

/// Kernels that ptxas assembled as one module.
#[derive(Clone, Debug)]
pub struct Module {
    /// The report of ptxas on each kernel, in the order in which they were given.
    pub reports: Vec<JitReport>,
    /// The machine code.
    cubin: Vec<u8>,
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

    /// Assembles kernels as one module: nvdisasm takes several times as long to start as to read a kernel.
    ///
    /// # Panics
    /// If ptxas rejects a kernel.
    pub fn assemble(&self, name: &str, kernels: &[&str]) -> Module {
        let [source, object] = ["ptx", "cubin"].map(|extension| temporary(name, extension));
        let (heads, kernels): (Vec<String>, Vec<String>) = kernels.iter().enumerate().map(numbered).unzip();
        // The heads differ in the version of PTX that a kernel needs, if at all.
        let head = heads.into_iter().max().unwrap_or_default();
        fs::write(&source, head + &kernels.concat()).expect("a temporary file can be written");
        let args: [&OsStr; 5] =
            ["-arch=sm_90a".as_ref(), "-v".as_ref(), "-o".as_ref(), object.as_ref(), source.as_ref()];
        let output = run(&self.path, &args);
        let log = String::from_utf8_lossy(&succeeded(name, output).stderr).into_owned();
        let cubin = fs::read(&object).expect("ptxas writes it");
        remove(&[&source, &object]);
        let logs =
            parts(&log, kernels.len(), |line| line.split_once("entry function 'k")?.1.split('\'').next());
        let report = |log: &String| JitReport::parse(log).unwrap_or_else(|| panic!("{name}: {log}"));
        Module { reports: logs.iter().map(report).collect(), cubin }
    }
}

/// The head of a kernel's text, with the version of PTX and the target, and its text in a module of several kernels,
/// where the entry is `k` and the index, and shared memory has a name of its own.
fn numbered((index, ptx): (usize, &&str)) -> (String, String) {
    let (head, entry) = ptx.split_once(".visible .entry ").expect("a kernel has an entry");
    let (_, body) = entry.split_once('(').expect("an entry has parameters");
    let (memory, head): (Vec<&str>, Vec<&str>) = head.lines().partition(|line| line.starts_with(".extern"));
    let kernel = format!("{}\n.visible .entry k{index}({body}\n", memory.concat());
    (head.join("\n"), kernel.replace("smem", &format!("smem{index}")))
}

/// The lines of each kernel in a text about all kernels of a module. `start` finds the index in the line with which a
/// kernel begins. Lines before the first kernel belong to it.
fn parts(text: &str, kernels: usize, start: impl Fn(&str) -> Option<&str>) -> Vec<String> {
    let (mut parts, mut index) = (vec![String::new(); kernels], None);
    for line in text.lines() {
        index = start(line).map(|index| index.parse::<usize>().expect("kernels are numbered")).or(index);
        let part = &mut parts[index.unwrap_or(0)];
        part.push_str(line);
        part.push('\n');
    }
    parts
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

    /// Disassembles the kernels of a module.
    ///
    /// # Panics
    /// If nvdisasm cannot read the machine code.
    pub fn disassemble(&self, name: &str, module: &Module) -> Vec<Listing> {
        let path = temporary(name, "sass");
        fs::write(&path, &module.cubin).expect("a temporary file can be written");
        let output = run(&self.path, &["-c".as_ref(), "-ndf".as_ref(), path.as_ref()]);
        remove(&[&path]);
        let text = String::from_utf8_lossy(&succeeded(name, output).stdout).into_owned();
        let texts = parts(&text, module.reports.len(), |line| {
            line.split_once(".section\t.text.k")?.1.split(',').next()
        });
        let listing = |text: &String| Listing::parse(text).unwrap_or_else(|error| panic!("{name}: {error}"));
        texts.iter().map(listing).collect()
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
