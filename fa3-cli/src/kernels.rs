//! `fa3 kernels`: the shipped kernels and the resources that they use.

mod compile;
mod count;

use std::error::Error;

use fa3_cuda::kernels::shipped::{Shipped, shipped};
use fa3_ir::{Kernel, Ptx};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::args::json::JsonArgs;
use crate::progress;
use crate::ptx;
use crate::table::Table;
use crate::tools::NoTool;
use crate::write;
use compile::Compiler;
use count::Count;

pub(crate) const ABOUT: &str = "\
Lists the shipped kernels whose names contain NAME, by default the ladder kernels: register counts that roles set by \
setmaxnreg, threads per CTA, bytes of shared memory, statements, matrix products (wgmma), tensor and bulk copies \
(TMA), arrivals and waits at barriers (as written, not as often as executed), and bytes of PTX.

Then the results of ptxas, if $PTXAS names one or one is on the path: registers at entry, bytes spilled, warnings, \
and milliseconds. With --gpu, also the results of the driver's compiler. The driver reports nothing on kernels in \
its cache; CUDA_CACHE_DISABLE=1 turns the cache off.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 kernels
  fa3 kernels fwd/bf16/d128/192x80x3
  PTXAS=/usr/local/cuda/bin/ptxas fa3 kernels --gpu

Exit code: 0, or 1 if a compiler spills or warns, or 2 if it rejects a kernel, or without a GPU for --gpu.")]
pub(crate) struct Options {
    /// Part of the kernels' names, such as fwd/bf16/d128 or causal/cap; hundreds begin with fwd
    #[arg(default_value = "ladder/")]
    name: String,
    /// Also compiles them with the driver of GPU 0
    #[arg(long)]
    gpu: bool,
    #[command(flatten)]
    json: JsonArgs,
}

/// The columns that need no compiler.
const FACTS: [&str; 9] =
    ["kernel", "setmaxnreg", "threads", "smem", "stmts", "wgmma", "tma", "barrier", "ptx"];
/// The columns of one compiler.
const VERDICT: [&str; 4] = ["regs", "spills", "warns", "ms"];

/// No kernel's name contains the given text.
#[derive(Debug, thiserror::Error)]
#[error("no kernel's name contains {given}: names are such as {first} and {last}")]
pub(crate) struct UnknownName {
    given: String,
    first: String,
    last: String,
}

/// Lists kernels. False if a compiler spills or warns.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let [json] = write::open([options.json.file(false)?], &[])?;
    let chosen = chosen(&options.name)?;
    let compilers = Compiler::installed(options.gpu)?;
    let bar = progress::late_bar(chosen.len() as u64);
    let listed = list(chosen, &compilers, &bar);
    bar.finish_and_clear();
    let Listed { rows, notes, clean } = listed?;
    let describe = |compiler: &Result<Compiler, NoTool>| match compiler {
        Ok(compiler) => compiler.describe(),
        Err(why) => format!("skipped: {why}"),
    };
    let compilers: Vec<String> = compilers.iter().map(describe).collect();
    let report = self::json(&rows, &compilers, &notes);
    let lines = compilers.iter().chain(&notes).fold(String::new(), |lines, line| lines + "\n" + line);
    options.json.print(&format_args!("{}\n{lines}", Table { rows, left: 2 }), &report);
    write::write(json.map(|file| (file, write::json(&report))))?;
    Ok(clean)
}

/// A table of kernels with the compilers' warnings.
struct Listed {
    /// The table's rows, column heads first.
    rows: Vec<Vec<String>>,
    /// The compilers' warnings.
    notes: Vec<String>,
    /// Whether no compiler spills or warns.
    clean: bool,
}

/// Lists kernels, and compiles them with each available compiler.
fn list(
    chosen: Vec<Shipped>,
    compilers: &[Result<Compiler, NoTool>],
    bar: &ProgressBar,
) -> Result<Listed, Box<dyn Error>> {
    let mut rows = vec![heads(compilers.len())];
    let (mut notes, mut clean) = (Vec::new(), true);
    for shipped in chosen {
        bar.inc(1);
        let kernel = shipped.kernel();
        let ptx = ptx::emit(&kernel, false)?;
        let mut row = facts(&shipped.name, &kernel, &ptx);
        for compiler in compilers {
            let Ok(compiler) = compiler else {
                row.extend(["-"; 4].map(str::to_owned));
                continue;
            };
            let compiled = compiler.compile(&ptx)?;
            row.extend(compiled.cells());
            if let Some(report) = compiled.report {
                clean &= report.is_clean();
                notes.extend(report.warnings.iter().map(|warning| format!("{}: {warning}", shipped.name)));
            }
        }
        rows.push(row);
    }
    Ok(Listed { rows, notes, clean })
}

/// The table as JSON: each kernel's facts, and each compiler's results.
fn json(rows: &[Vec<String>], compilers: &[String], notes: &[String]) -> Value {
    let number = |cell: &String| match cell.as_str() {
        "-" | "?" => Value::Null,
        text => text.parse::<u64>().map_or_else(|_| text.into(), Value::from),
    };
    let object = |names: &[&str], cells: &[String]| -> Map<String, Value> {
        names.iter().zip(cells).map(|(&name, cell)| (name.to_owned(), number(cell))).collect()
    };
    let kernel = |row: &Vec<String>| {
        let (facts, verdicts) = row.split_at(FACTS.len());
        let verdicts = verdicts.chunks(VERDICT.len()).map(|cells| object(&VERDICT, cells));
        let mut kernel = object(&FACTS, facts);
        kernel.insert("compiled".to_owned(), verdicts.collect());
        kernel
    };
    let kernels: Vec<Map<String, Value>> = rows.iter().skip(1).map(kernel).collect();
    json!({ "kernels": kernels, "compilers": compilers, "notes": notes })
}

/// The shipped kernels whose names contain `part`.
fn chosen(part: &str) -> Result<Vec<Shipped>, UnknownName> {
    let (chosen, others): (Vec<_>, Vec<_>) = shipped().partition(|shipped| shipped.name.contains(part));
    if chosen.is_empty() {
        let name =
            |shipped: Option<&Shipped>| shipped.map_or_else(String::new, |shipped| shipped.name.clone());
        let (first, last) = (name(others.first()), name(others.last()));
        return Err(UnknownName { given: part.to_owned(), first, last });
    }
    Ok(chosen)
}

/// The column heads, with four for each compiler.
fn heads(compilers: usize) -> Vec<String> {
    let of_gpu = ["gpu regs", "spills", "warns", "ms"];
    let heads = FACTS.into_iter().chain([VERDICT, of_gpu].into_iter().take(compilers).flatten());
    heads.map(str::to_owned).collect()
}

/// The facts about a kernel that need no compiler.
fn facts(name: &str, kernel: &Kernel, ptx: &Ptx) -> Vec<String> {
    let Count { statements, products, copies, barriers } = Count::of(kernel);
    let names = [name.to_owned(), count::registers(kernel).unwrap_or_else(|| "-".to_owned())];
    let numbers = [ptx.threads, ptx.smem_bytes, statements, products, copies, barriers];
    let numbers = numbers.map(|number| number.to_string());
    names.into_iter().chain(numbers).chain([ptx.text.len().to_string()]).collect()
}
