//! `fa3 sass`: the SASS that ptxas generates for a kernel's main loops.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;

use fa3_cuda::JitReport;
use fa3_cuda::sass::{Class, Product, Round, product_loops};
use fa3_ir::Ptx;
use serde_json::{Value, json};

use crate::console;
use crate::kernel::{self, KernelArgs};
use crate::ptx;
use crate::tools::{Nvdisasm, Ptxas, ToolError};

pub(crate) const ABOUT: &str = "\
Assembles a kernel with ptxas and disassembles it with nvdisasm ($PTXAS and $NVDISASM, or the ones on the path). For \
every innermost loop with tensor-core products, prints how many instructions of each kind an iteration has, their \
order, and what runs while each product is in flight: the analysis of the paper's Appendix B.2. The tensor cores \
hide what runs between the start of a product and the wait for it.

In the order, FFMA×40+MUFU.EX2×12 is a mixture of 40 FFMA and 12 MUFU.EX2; DEPBAR(1) waits until at most one product \
is in flight; BAR and SYNCS are named barriers and mbarriers. Integer instructions, moves and branches are left out.";

const EXAMPLES: &str = "\
Examples:
  fa3 sass forward
  fa3 sass forward --causal --head-dim 64
  fa3 sass forward --pipeline serial --json

Exit code: 0, or 1 if the compiler spills or warns (C7510: products are serialised), or 2 if there is no compiler or it rejects the kernel.";

/// The width of the text in characters.
const WIDTH: usize = 100;

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, next_help_heading = "Print")]
pub(crate) struct Options {
    #[command(subcommand)]
    kernel: KernelArgs,
    /// Prints JSON, one line per kernel
    #[arg(long, global = true)]
    json: bool,
}

/// Prints. False if ptxas spills or warns.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let kernels = kernel::distinct(options.kernel.program()?);
    let all: Vec<Ptx> = kernels.iter().map(|kernel| ptx::emit(kernel, false)).collect::<Result<_, _>>()?;
    let tools = Tools { ptxas: Ptxas::find()?, nvdisasm: Nvdisasm::find()? };
    let mut good = true;
    for ptx in &all {
        good &= tools.show(options, ptx)?;
    }
    Ok(good)
}

/// The assembler and the disassembler.
struct Tools {
    ptxas: Ptxas,
    nvdisasm: Nvdisasm,
}

impl Tools {
    /// Prints the analysis of a kernel, and returns whether it neither spills nor warns.
    fn show(&self, options: &Options, ptx: &Ptx) -> Result<bool, ToolError> {
        let Tools { ptxas, nvdisasm } = self;
        let assembled = ptxas.assemble(ptx)?;
        let listing = nvdisasm.disassemble(&ptx.entry, &assembled.cubin)?;
        let (report, rounds) = (assembled.report, product_loops(&listing));
        let tools = [("ptxas", ptxas.0.describe()), ("nvdisasm", nvdisasm.0.describe())];
        if options.json {
            let loops: Vec<Value> = rounds.iter().map(describe).collect();
            console::print(&json!({
                "kernel": ptx.entry,
                "tools": BTreeMap::from(tools),
                "registers": report.registers,
                "spill_bytes": report.spill_store_bytes + report.spill_load_bytes,
                "warnings": report.warnings.iter().map(ToString::to_string).collect::<Vec<_>>(),
                "loops": loops,
            }));
        } else {
            console::print(&format_args!("{}: {report}", ptx.entry));
            tools.iter().for_each(|(tool, which)| console::print(&format_args!("{tool} {which}")));
            if rounds.is_empty() {
                console::print(&"\nno loop has tensor-core products");
            }
            rounds.iter().for_each(|round| console::print(&Text(round)));
        }
        Ok(is_good(&report, &rounds))
    }
}

fn is_good(report: &JitReport, rounds: &[Round<'_>]) -> bool {
    report.is_clean() && rounds.iter().all(|round| round.count(Class::Spill) == 0)
}

/// The classes of instructions that a product may hide.
const HIDDEN: [Class; 3] = [Class::Exp, Class::Convert, Class::Float];

fn describe(round: &Round<'_>) -> Value {
    let counts: BTreeMap<String, usize> =
        Class::ALL.iter().map(|class| (class.to_string(), round.count(*class))).collect();
    let product = |product: &Product| {
        let under: BTreeMap<String, usize> =
            HIDDEN.iter().map(|class| (class.to_string(), round.under(product, *class))).collect();
        json!({
            "instruction": round.instructions[product.first].name(),
            "count": product.parts,
            "columns": product.n,
            "fresh": product.fresh,
            "interruptions": product.interruptions,
            "wait": product.wait.map(|wait| address(round, wait)),
            "under": under,
        })
    };
    json!({
        "address": round.instructions.first().map(|first| first.address),
        "instructions": round.instructions.len(),
        "counts": counts,
        "order": round.order().steps.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "products": round.products().iter().map(product).collect::<Vec<_>>(),
    })
}

/// The address of a wait in this loop iteration or a later one.
fn address(round: &Round<'_>, wait: usize) -> u32 {
    round.instructions[wait % round.instructions.len()].address
}

/// Formats one iteration of a loop as text.
struct Text<'r, 'l>(&'r Round<'l>);

impl fmt::Display for Text<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Text(round) = self;
        let start = round.instructions.first().map_or(0, |first| first.address);
        writeln!(f, "\nloop at {start:#06x}: {} instructions a round", round.instructions.len())?;
        let counts = Class::ALL.iter().map(|class| (class, round.count(*class)));
        let counts: Vec<String> =
            counts.filter(|(_, count)| *count > 0).map(|(class, count)| format!("{class} {count}")).collect();
        writeln!(f, "{}\n", wrapped(&counts.join(", ")))?;
        writeln!(f, "{}\n", wrapped(&round.order().to_string()))?;
        let lines: Vec<String> = round.products().iter().map(|product| line(round, product)).collect();
        write!(f, "{}", lines.join("\n"))
    }
}

/// Formats a product as in `8 HGMMA of 176 columns, a new sum, awaited at 0x4630: 0 of 90 exponentials, ...`.
fn line(round: &Round<'_>, product: &Product) -> String {
    let Product { n, parts, fresh, interruptions, first, wait, .. } = product;
    let name = round.instructions[*first].name();
    let sum = if *fresh { "a new sum" } else { "added to a sum" };
    let stops = if *interruptions == 0 { String::new() } else { format!(", stopped {interruptions}×") };
    let wait = wait.map_or_else(
        || "awaited after the loop".to_owned(),
        |wait| format!("awaited at {:#06x}", address(round, wait)),
    );
    let hidden = HIDDEN.map(|class| (class, round.under(product, class), round.count(class)));
    let hidden = hidden.iter().filter(|(_, _, all)| *all > 0);
    let hidden: Vec<String> = hidden.map(|(class, under, all)| format!("{under} of {all} {class}")).collect();
    let hidden = if hidden.is_empty() { "nothing".to_owned() } else { hidden.join(", ") };
    wrapped(&format!("{parts} {name} of {n} columns, {sum}{stops}, {wait}; under it {hidden}"))
}

/// Wraps text to lines of `WIDTH` characters, and indents them.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.last_mut().filter(|line| line.chars().count() + 1 + word.chars().count() <= WIDTH);
        match last {
            Some(line) => {
                line.push_str(if line.is_empty() { "  " } else { " " });
                line.push_str(word);
            }
            None => lines.push(format!("    {word}")),
        }
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_between_words() {
        assert_eq!(wrapped("a b"), "  a b");
        let word = "x".repeat(60);
        assert_eq!(wrapped(&format!("{word} y {word} z")), format!("  {word} y\n    {word} z"));
    }
}
