//! `fa3 doctor`: what this machine has, and what runs on it.

mod attempt;

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};

use fa3_cuda::Archive;
use fa3_cuda::host::{Device, HostError, Origin};
use serde_json::{Map, Value, json};

use crate::args::json::JsonArgs;
use crate::gpu;
use crate::threads;
use crate::tools::{Nvdisasm, Ptxas};
use crate::write;
use attempt::Trouble;

pub(crate) const ABOUT: &str = "\
Shows what this machine has (driver, GPUs, ptxas, nvdisasm), what runs where, and why other things do not. \
Everything that it says runs has run: a small attention on the CPU and on every GPU, and a small kernel in the \
simulator. For each GPU it says where the kernels came from: an archive, the driver's cache on disk, or the \
driver's compiler.

The exit code is 0, even if only the CPU can be used, or 1 if something is present but broken.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 doctor
  fa3 doctor --json -")]
pub(crate) struct Options {
    /// An archive of compiled kernels, such as the Python package's; see fa3 archive
    #[arg(long, value_name = "FILE")]
    archive: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

/// The findings.
#[derive(Debug, Default)]
struct Report {
    machine: Vec<(String, String)>,
    runs: Vec<(&'static str, String, Verdict)>,
}

/// Whether something runs.
#[derive(Debug)]
enum Verdict {
    Yes,
    No(HostError),
    Broken(Trouble),
}

/// Inspects the machine, runs small tests, and prints the findings. False if something is present and broken.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let [json] = write::open([options.json.file(false)?], &[])?;
    threads::start()?;
    let mut report = Report::default();
    report.fact("fa3", env!("CARGO_PKG_VERSION"));
    for (name, tool) in
        [("ptxas", Ptxas::find().map(|it| it.0)), ("nvdisasm", Nvdisasm::find().map(|it| it.0))]
    {
        report.fact(name, tool.map_or_else(|error| error.to_string(), |tool| tool.describe()));
    }
    report.tried("attention", fa3::Device::Cpu, attempt::attention(&fa3::Device::Cpu));
    report.tried("kernels", "simulator", attempt::simulated());
    let archive = options.archive.as_deref().and_then(|path| report.archive(path));
    report.gpus(archive.as_ref());
    options.json.print(&report, &report.json());
    write::write(json.map(|file| (file, write::json(&report.json()))))?;
    Ok(!report.runs.iter().any(|(_, _, verdict)| matches!(verdict, Verdict::Broken(_))))
}

impl Report {
    fn fact(&mut self, what: &str, is: impl ToString) {
        self.machine.push((what.to_owned(), is.to_string()));
    }

    fn tried(&mut self, what: &'static str, place: impl ToString, result: Result<(), Trouble>) {
        let verdict = result.map_or_else(Verdict::Broken, |()| Verdict::Yes);
        self.runs.push((what, place.to_string(), verdict));
    }

    /// The findings as JSON, with the reason for each test that does not run.
    fn json(&self) -> Value {
        let run = |(what, place, verdict): &(&str, String, Verdict)| {
            let (runs, broken) = (matches!(verdict, Verdict::Yes), matches!(verdict, Verdict::Broken(_)));
            let why = (!runs).then(|| verdict.to_string());
            json!({ "what": what, "where": place, "runs": runs, "broken": broken, "why": why })
        };
        let machine: Map<String, Value> =
            self.machine.iter().map(|(what, is)| (what.clone(), is.clone().into())).collect();
        json!({ "machine": machine, "runs": self.runs.iter().map(run).collect::<Vec<_>>() })
    }

    /// Opens an archive of compiled kernels.
    fn archive(&mut self, path: &Path) -> Option<Archive> {
        match Archive::open(path) {
            Ok(archive) => {
                self.fact("archive", format_args!("{} kernels ({})", archive.kernels(), path.display()));
                Some(archive)
            }
            Err(error) => {
                self.tried("kernels", "archive", Err(error.into()));
                None
            }
        }
    }

    /// Tries every GPU of the driver, because one that cannot be used says nothing about the next. If there is none,
    /// reports why.
    fn gpus(&mut self, archive: Option<&Archive>) {
        for ordinal in 0..Device::count().unwrap_or(0).max(1) {
            let (place, found) = (format!("gpu {ordinal}"), gpu::open(ordinal));
            if ordinal == 0 {
                self.fact("driver", driver(&found));
            }
            match found {
                Ok(Ok(device)) => {
                    let device = match archive {
                        Some(archive) => device.with_archive(archive.clone()),
                        None => device,
                    };
                    let result = attempt::attention(&fa3::Device::Cuda(device.clone()));
                    let origins = device.kernels().into_iter().map(|kernel| kernel.origin());
                    self.fact(&place, format_args!("{}; {}", describe(&device), words(origins)));
                    self.tried("attention", place, result);
                }
                Ok(Err(absent)) => self.runs.push(("attention", place, Verdict::No(absent))),
                Err(broken) => self.tried("attention", place, Err(broken.into())),
            }
        }
    }
}

/// The driver's version, as the first GPU reports it.
fn driver(first: &Result<Result<Device, HostError>, HostError>) -> String {
    match first {
        Ok(Ok(device)) => {
            let (major, minor) = device.driver_version();
            format!("cuda {major}.{minor}")
        }
        Ok(Err(HostError::NotHopper { .. })) => "loaded".to_owned(),
        Ok(Err(why)) | Err(why) => why.to_string(),
    }
}

/// The number of kernels from each place, in words.
fn words(origins: impl Iterator<Item = Origin>) -> String {
    let origins: Vec<Origin> = origins.collect();
    let places = [
        (Origin::Archive, "from the archive"),
        (Origin::DriverCache, "from the driver's cache on disk"),
        (Origin::Compiler, "compiled by the driver"),
    ];
    let count = |place| origins.iter().filter(|origin| **origin == place).count();
    format!("kernels: {}", places.map(|(place, words)| format!("{} {words}", count(place))).join(", "))
}

fn describe(device: &Device) -> String {
    let (name, sms, (major, minor)) = (device.name(), device.sm_count(), device.compute_capability());
    let memory = device.memory().map_or_else(
        |error| error.to_string(),
        |memory| format!("{} of {} MiB free", memory.free >> 20, memory.total >> 20),
    );
    format!("{name}, compute capability {major}.{minor}, {sms} sms, {memory}")
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, is) in &self.machine {
            writeln!(f, "{what:8} {is}")?;
        }
        write!(f, "\nwhat       where            runs")?;
        for (what, place, verdict) in &self.runs {
            write!(f, "\n{what:10} {place:16} {verdict}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Verdict::Yes => write!(f, "yes"),
            Verdict::No(absent) => match absent.to_string() {
                absent if absent.starts_with("no ") => f.write_str(&absent),
                absent => write!(f, "no: {absent}"),
            },
            Verdict::Broken(trouble) => write!(f, "broken: {trouble}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_places_of_kernels() {
        let origins = [Origin::Compiler, Origin::Archive, Origin::Compiler];
        let expected =
            "kernels: 1 from the archive, 0 from the driver's cache on disk, 2 compiled by the driver";
        assert_eq!(words(origins.into_iter()), expected);
    }

    #[test]
    fn what_is_broken_is_told_from_what_is_not_there() {
        let mut report = Report::default();
        report.fact("driver", "cuda 13.0");
        report.tried("kernels", "simulator", Ok(()));
        report.runs.push(("attention", "gpu 0".to_owned(), Verdict::No(HostError::NoDriver)));
        report.tried("attention", "gpu 1", Err(Trouble::Attention));
        let expected = "\
driver   cuda 13.0

what       where            runs
kernels    simulator        yes
attention  gpu 0            no nvidia driver: libcuda cannot be loaded
attention  gpu 1            broken: attention of ones is not one";
        assert_eq!(report.to_string(), expected);
    }
}
