//! The `fa3` command: attention of tensors in files, the schedules behind it, and the kernels.
//!
//! ```text
//! O = softmax(mask(cap(softmax_scale · Q Kᵀ))) V        LSE = ln Σ_k exp(score)
//! ```
//!
//! There is one module per command (verb). Each has `ABOUT`, the first text of its help, `Options`, and a function
//! `run`, which prints to stdout and returns whether all checks passed. The exit code is 0 if they passed, 1 if not,
//! and 2 if the command could not do its work.

mod accuracy;
mod archive;
mod args;
mod bars;
mod bench;
mod cache;
mod completions;
mod console;
mod device;
mod doctor;
mod draw;
mod export;
mod fp8;
mod gpu;
mod grid;
mod ir;
mod kernel;
mod kernels;
mod launches;
mod measure;
mod memory;
mod paper;
mod plan;
mod progress;
mod ptx;
mod quantize;
mod reproduce;
mod run;
mod sass;
mod sim;
mod table;
mod threads;
mod tools;
mod tune;
mod write;

use std::error::Error;
use std::process::ExitCode;

use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand};

#[global_allocator]
static MEMORY: memory::Memory = memory::Memory;

/// FlashAttention-3 on the command line
#[derive(Debug, Parser)]
#[command(
    name = "fa3",
    version,
    propagate_version = true,
    after_help = "`fa3 VERB --help` explains a verb, with examples."
)]
struct Command {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Computes the attention of tensors in a file and compares it with an expected result
    #[command(long_about = run::ABOUT)]
    Run(run::Options),
    /// Quantizes a tensor in a file to FP8, with rotary embedding and Hadamard transform
    #[command(long_about = quantize::ABOUT)]
    Quantize(quantize::Options),
    /// Measures the error of attention in fp16 and FP8, next to the FlashAttention-3 paper's
    #[command(long_about = accuracy::ABOUT)]
    Accuracy(accuracy::Options),
    /// Measures the forward pass on a GPU, next to the paper's Figure 5 and Table 2
    #[command(long_about = bench::ABOUT)]
    Bench(bench::Options),
    /// Makes a page of the paper's figures and claims, next to this machine's numbers
    #[command(long_about = reproduce::ABOUT)]
    Reproduce(reproduce::Options),
    /// Looks for tiles and orders of tiles that are faster on a GPU than the table's
    #[command(long_about = tune::ABOUT)]
    Tune(tune::Options),
    /// Shows how a problem would be cut into tiles and scheduled on a GPU
    #[command(long_about = plan::ABOUT)]
    Plan(plan::Options),
    /// Lists shipped kernels, their resources and the compilers' reports
    #[command(long_about = kernels::ABOUT)]
    Kernels(kernels::Options),
    /// Prints a kernel's statements, each with the line that built it
    #[command(long_about = ir::ABOUT)]
    Ir(ir::Options),
    /// Prints a kernel as PTX, or as JSON with everything that a launch needs
    #[command(long_about = ptx::ABOUT)]
    Ptx(ptx::Options),
    /// Writes a folder with a problem's kernels, a C program that launches them, and a test vector
    #[command(long_about = export::ABOUT)]
    Export(export::Options),
    /// Shows the machine code of a kernel's main loops: what runs under which product
    #[command(long_about = sass::ABOUT)]
    Sass(sass::Options),
    /// Runs a kernel on the CPU under schedules that provoke races
    #[command(long_about = sim::ABOUT)]
    Sim(sim::Options),
    /// Compiles the kernels of usual calls into a file, from which programs load them
    #[command(long_about = archive::ABOUT)]
    Archive(archive::Options),
    /// Says what this machine has, and what runs on it
    #[command(long_about = doctor::ABOUT)]
    Doctor(doctor::Options),
    /// Prints a script with which a shell completes commands and options
    #[command(long_about = completions::ABOUT)]
    Completions(completions::Options),
}

fn main() -> ExitCode {
    let parsed = with_negative_numbers(Command::command()).try_get_matches();
    let parsed = parsed.and_then(|matches| Command::from_arg_matches(&matches));
    let Command { verb } = parsed.unwrap_or_else(|error| error.exit());
    let result: Result<bool, Box<dyn Error>> = match verb {
        Verb::Run(options) => run::run(&options),
        Verb::Quantize(options) => quantize::run(&options),
        Verb::Accuracy(options) => accuracy::run(&options),
        Verb::Bench(options) => bench::run(&options),
        Verb::Reproduce(options) => reproduce::run(&options),
        Verb::Tune(options) => tune::run(&options),
        Verb::Plan(options) => plan::run(&options),
        Verb::Kernels(options) => kernels::run(&options),
        Verb::Ir(options) => ir::run(&options),
        Verb::Ptx(options) => ptx::run(&options),
        Verb::Export(options) => export::run(&options),
        Verb::Sass(options) => sass::run(&options),
        Verb::Sim(options) => sim::run(&options),
        Verb::Archive(options) => archive::run(&options),
        Verb::Doctor(options) => doctor::run(&options),
        Verb::Completions(options) => Ok(completions::run(&options, Command::command())),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            console::print_error(&error);
            ExitCode::from(2)
        }
    }
}

/// Lets -1 after an option be the option's value; the option's own parser then explains better why it is refused.
fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let with_value = |arg: &Arg| arg.get_long().is_some() && arg.get_action().takes_values();
    let command =
        command.mut_args(|arg| if with_value(&arg) { arg.allow_negative_numbers(true) } else { arg });
    command.mut_subcommands(with_negative_numbers)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    /// The arguments of each `fa3` command in a document's code blocks. A backslash continues a line, and a comment
    /// ends it.
    fn commands(text: &str) -> Vec<String> {
        let blocks: String = text.split("```").skip(1).step_by(2).collect();
        let lines = blocks.replace("\\\n", " ");
        let commands = lines.lines().filter_map(|line| line.trim_start().strip_prefix("fa3 "));
        commands.map(|line| line.split(" #").next().unwrap_or(line).to_owned()).collect()
    }

    /// Parses a command, and plans or builds its subject.
    fn check(words: &str) -> Result<(), Box<dyn Error>> {
        // Blanks in single quotes do not end a word.
        let mut quoted = false;
        let words = words.split(|c: char| {
            quoted ^= c == '\'';
            c.is_whitespace() && !quoted
        });
        let words = words.filter(|word| !word.is_empty()).take_while(|word| ![">", "&&", "|"].contains(word));
        let words = words.map(|word| word.replace('\'', ""));
        let command = with_negative_numbers(Command::command())
            .try_get_matches_from(["fa3".to_owned()].into_iter().chain(words))?;
        let verb = Command::from_arg_matches(&command)?.verb;
        if let Verb::Plan(options) = &verb {
            plan::report(options, false)?;
        }
        if let Verb::Sim(options) = &verb {
            sim::check(options)?;
        }
        Ok(())
    }

    /// The `fa3` commands that a document's sentences name. They may lack values and arguments.
    fn named(text: &str) -> Vec<String> {
        let prose: String = text.split("```").step_by(2).collect();
        let spans = prose.split('`').skip(1).step_by(2).filter_map(|span| span.strip_prefix("fa3 "));
        spans.map(str::to_owned).collect()
    }

    /// The first word of a command that names no command or option.
    fn unknown(words: &str) -> Option<&str> {
        fn longs(command: &clap::Command) -> Vec<&str> {
            let own = command.get_arguments().filter_map(Arg::get_long);
            own.chain(command.get_subcommands().flat_map(longs)).collect()
        }
        let command = Command::command();
        let mut words = words.split_whitespace();
        let verb = words.next().filter(|verb| *verb != "VERB")?;
        let Some(verb) = command.find_subcommand(verb) else { return Some(verb) };
        let longs = longs(verb);
        words
            .find(|word| word.strip_prefix("--").is_some_and(|long| !longs.contains(&long) && long != "help"))
    }

    #[test]
    fn documents_name_commands_that_there_are() {
        assert_eq!(
            [unknown("plan --heads"), unknown("plot"), unknown("plan --head")],
            [None, Some("plot"), Some("--head")]
        );
        let all = documents()
            .into_iter()
            .flat_map(|(path, text)| named(&text).into_iter().map(move |it| (path.clone(), it)));
        let wrong: Vec<_> = all.filter(|(_, command)| unknown(command).is_some()).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    /// The documents with their paths.
    fn documents() -> Vec<(PathBuf, String)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folders = ["", "docs", "fa3-cli", "bindings/python", "bindings/candle"];
        let files = folders.iter().flat_map(|folder| fs::read_dir(root.join(folder)).unwrap());
        let paths =
            files.map(|file| file.unwrap().path()).filter(|path| path.extension() == Some("md".as_ref()));
        paths.map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
    }

    #[test]
    fn documents_have_commands_that_are_understood() {
        let mut count = 0;
        for (path, text) in documents() {
            for command in commands(&text) {
                check(&command).unwrap_or_else(|error| panic!("{}: fa3 {command}: {error}", path.display()));
                count += 1;
            }
        }
        assert_eq!(count, 48, "commands of documents: another number is no fault, if it is meant");
        assert!(
            check("bench --backward --ablation").is_err()
                && check("plan --seqlen 8 --heads 0 --head-dim 64").is_err()
        );
    }

    /// The help texts of a command, of its options and of its subcommands.
    fn help(command: &clap::Command) -> String {
        let own = [command.get_about(), command.get_long_about(), command.get_after_help()];
        let options = command.get_arguments().flat_map(|arg| [arg.get_help(), arg.get_long_help()]);
        let texts = own.into_iter().chain(options).flatten().map(ToString::to_string);
        texts.chain(command.get_subcommands().map(help)).collect::<Vec<_>>().join("\n")
    }

    /// Words with two capitals are names of software rather than Rust types.
    #[test]
    fn help_names_no_types() {
        let is_type = |word: &&str| {
            let humps =
                word.chars().zip(word.chars().skip(1)).filter(|(a, b)| a.is_uppercase() && b.is_lowercase());
            word.starts_with(char::is_uppercase)
                && humps.count() > 1
                && !["FlashAttention", "DeepSeek", "SafeTensors"].contains(word)
        };
        let text = help(&Command::command());
        let words = text.split(|c: char| !c.is_alphanumeric());
        assert_eq!(words.filter(is_type).collect::<Vec<_>>(), [""; 0]);
    }

    /// Words before the command, and redirections, belong to the shell.
    #[test]
    fn every_example_is_understood() {
        let command = Command::command();
        command.clone().debug_assert();
        for verb in command.get_subcommands() {
            let help = verb.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples =
                help.lines().filter_map(|line| line.split_once("fa3 ").filter(|_| line.starts_with("  ")));
            let examples: Vec<&str> = examples.map(|(_, words)| words).collect();
            assert!(!examples.is_empty(), "{help}");
            for example in examples {
                check(example).unwrap_or_else(|error| panic!("fa3 {example}: {error}"));
            }
        }
    }
}
