//! `fa3 reproduce`: the paper's figures, tables and claims next to this machine's numbers, on one page.

mod claim;
mod page;
mod part;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::console;
use crate::gpu::Which;
use crate::measure::Machine;
use crate::progress;
use crate::write;
use claim::Judged;
use part::{Outcome, PARTS, Part, Ran};

pub(crate) const ABOUT: &str = "\
Makes one HTML page with every figure, table, listing and claim of the FlashAttention-3 paper, and of its authors' talk: \
the paper's number, this machine's number, and a verdict. The page needs neither a network nor scripts.

The numbers come from other commands of fa3, which the page names. Without a Hopper GPU, they are the accuracy by \
emulation, the cycles of a model of the GPU, schedules, and the machine code if ptxas and nvdisasm are found; the page \
says `not run` and why for the others. Every result is checked before its number counts.

Verdicts: speeds agree from 0.9 of the paper's on, ratios within 5 %, errors within 25 %. The model's cycles agree if \
they have the paper's order.

The page takes about 20 minutes of a core, nearly all for the paper's Table 3, or about 5 minutes with a GPU. --quick \
takes about 15 seconds, or one minute with a GPU, and measures Table 3 at a length that is not the paper's.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 reproduce -o report/
  fa3 reproduce --quick -o report/ --json report.json
  fa3 reproduce --from report.json -o report/

Exit code: 0 whatever the verdicts, or 1 if a result is wrong, or 2 if there is no page.")]
pub(crate) struct Options {
    /// The folder for the page, index.html
    #[arg(short, long, value_name = "FOLDER", default_value = "report")]
    output: PathBuf,
    /// Takes seconds: fewer settings, shorter rounds, and Table 3 at 1024 keys
    #[arg(long)]
    quick: bool,
    /// Writes the page's data
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draws the page from this data, and measures nothing
    #[arg(long, value_name = "FILE", conflicts_with = "quick")]
    from: Option<PathBuf>,
}

/// The page's data.
#[derive(Debug, Serialize, Deserialize)]
struct Report {
    /// The GPU, or why there is none, and the number of cores.
    machine: String,
    quick: bool,
    parts: Vec<Ran>,
}

/// A file that holds no report.
#[derive(Debug, thiserror::Error)]
enum NoReport {
    #[error("cannot read {}: {source}", path.display())]
    Unread { path: PathBuf, source: std::io::Error },
    #[error("{} has no data of a page: {source}", path.display())]
    Unknown { path: PathBuf, source: serde_json::Error },
}

/// Runs all parts, and writes the page and its data. False if a result is wrong.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    write::make_folder(&options.output)?;
    let page = options.output.join("index.html");
    let [page, json] = write::open([Some(&page), options.json.as_deref()], options.from.as_slice())?;
    let report = match &options.from {
        Some(path) => read(path)?,
        None => measure(options.quick)?,
    };
    let judged = claim::judge(&report);
    let html = page::html(&report, &judged)?.into_bytes();
    let mut files: Vec<_> = page.map(|file| (file, html)).into_iter().collect();
    files.extend(json.map(|file| (file, write::json(&Data { report: &report, claims: &judged }))));
    write::write_below(files)?;
    Ok(report.is_right())
}

/// A report with its claims.
#[derive(Serialize)]
struct Data<'a> {
    #[serde(flatten)]
    report: &'a Report,
    claims: &'a [Judged],
}

fn read(path: &Path) -> Result<Report, NoReport> {
    let bytes = fs::read(path).map_err(|source| NoReport::Unread { path: path.into(), source })?;
    serde_json::from_slice(&bytes).map_err(|source| NoReport::Unknown { path: path.into(), source })
}

/// Runs all parts, one after another.
fn measure(quick: bool) -> Result<Report, Box<dyn Error>> {
    let gpu = Which::First.open().map_err(|why| format!("no Hopper GPU, {why}"));
    let cores = thread::available_parallelism()?;
    let board = gpu.as_ref().map_or_else(Clone::clone, |device| Machine::of(device).to_string());
    let (gpu, machine) = (gpu.map(drop), format!("{board}; {cores} CPU cores"));
    let parts: Vec<&Part> = PARTS.iter().filter(|part| !(quick && part.is_long)).collect();
    let seconds: u32 = parts.iter().map(|part| part.estimate(quick, gpu.is_ok())).sum();
    console::print(&format_args!("{machine}\nthis takes about {seconds} s of a core\n"));
    let progress = progress::bar(parts.len());
    let run = |part: &&Part| {
        progress.set_message(part.id);
        let ran = part.run(quick, gpu.as_ref().copied())?;
        progress.inc(1);
        progress.suspend(|| console::print(&ran));
        Ok(ran)
    };
    let parts = parts.iter().map(run).collect::<Result<_, Box<dyn Error>>>()?;
    progress.finish_and_clear();
    Ok(Report { machine, quick, parts })
}

impl Report {
    /// Whether no result is wrong.
    fn is_right(&self) -> bool {
        self.parts.iter().all(|ran| !matches!(ran.outcome, Outcome::Done { right: false, .. }))
    }

    fn part(&self, id: &str) -> Option<&Ran> {
        self.parts.iter().find(|ran| ran.id == id)
    }

    /// The data of a part and whether its checks passed, or why there is none.
    fn data(&self, id: &str) -> Result<(&Value, bool), String> {
        match self.part(id).map(|ran| &ran.outcome) {
            Some(Outcome::Done { right, data, .. }) => Ok((data, *right)),
            Some(Outcome::Skipped(why)) => Err(why.clone()),
            None => Err(format!("the data has no part {id}")),
        }
    }

    /// A number in the data of a part.
    fn number(&self, id: &str, pointer: &str) -> Result<f64, String> {
        let number = self.data(id)?.0.pointer(pointer).and_then(Value::as_f64);
        number.ok_or_else(|| format!("part {id} has no number {pointer}"))
    }
}
