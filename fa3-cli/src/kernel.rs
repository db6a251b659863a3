//! The kernel that a command works on.

mod backward;
mod forward;
mod ladder;
mod operation;
mod reference;

use std::fmt;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};
use fa3_ir::{Kernel, Program};

use operation::Operation;

pub(crate) use operation::OperationError;
pub(crate) use reference::{Reference, Wrong};

/// A kernel's name and options, as a subcommand.
#[derive(Debug)]
pub(crate) struct KernelArgs {
    operation: Operation,
    typed: String,
}

impl KernelArgs {
    pub(crate) fn program(&self) -> Result<Program<Kernel>, OperationError> {
        Ok(self.operation.program()?.kernels())
    }

    /// The reference that the program's results are checked against.
    pub(crate) fn reference(&self) -> Result<Reference, OperationError> {
        self.operation.reference()
    }
}

/// The kernel and its options as typed on the command line.
impl fmt::Display for KernelArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.typed)
    }
}

/// The distinct kernels of a program, in the order of its steps.
pub(crate) fn distinct(program: Program<Kernel>) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    for step in program.steps {
        if !kernels.contains(&step.kernel) {
            kernels.push(step.kernel);
        }
    }
    kernels
}

/// The kernel's name and its own options as typed on the command line, without the options of the command around it.
fn typed(matches: &ArgMatches) -> String {
    let Some((name, given)) = matches.subcommand() else { return String::new() };
    let kernels = Operation::augment_subcommands(Command::new("fa3"));
    let options = kernels.find_subcommand(name).into_iter().flat_map(Command::get_arguments);
    let mut words = vec![name.to_owned()];
    for option in options {
        let id = option.get_id().as_str();
        if given.value_source(id) == Some(ValueSource::CommandLine) {
            words.extend(option.get_long().map(|long| format!("--{long}")));
            let values = given.get_raw(id).into_iter().flatten();
            let values = values.filter(|_| option.get_action().takes_values());
            let values = values.map(|value| quoted(&value.to_string_lossy()));
            match option.get_value_delimiter() {
                Some(delimiter) => words.push(values.collect::<Vec<_>>().join(&delimiter.to_string())),
                None => words.extend(values),
            }
        }
    }
    words.join(" ")
}

/// A word as a shell takes it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=+".contains(c);
    if word.chars().all(is_plain) { word.to_owned() } else { format!("'{}'", word.replace('\'', r"'\''")) }
}

impl FromArgMatches for KernelArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<KernelArgs, clap::Error> {
        Ok(KernelArgs { operation: Operation::from_arg_matches(matches)?, typed: typed(matches) })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = KernelArgs::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for KernelArgs {
    fn augment_subcommands(command: Command) -> Command {
        let command = command
            .subcommand_help_heading("Kernels (KERNEL --help explains the options of one)")
            .subcommand_value_name("KERNEL");
        Operation::augment_subcommands(command.disable_help_subcommand(true))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        KernelArgs::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        Operation::has_subcommand(name)
    }
}

#[cfg(test)]
mod tests;
