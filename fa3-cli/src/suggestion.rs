//! The verb that somebody meant.

use clap::Error;
use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Edits from what was typed to a verb: one letter more, less, or another, or two letters in the wrong order.
const MOST_EDITS: usize = 1;

/// An error of the command line, with the verbs that are near to the one that is none. Clap knows those that share most
/// letters in their order, which of `rnu` are too few.
pub(crate) fn with_verb(mut error: Error, command: &clap::Command) -> Error {
    if error.kind() != ErrorKind::InvalidSubcommand || error.get(ContextKind::SuggestedSubcommand).is_some() {
        return error;
    }
    let Some(ContextValue::String(given)) = error.get(ContextKind::InvalidSubcommand) else { return error };
    let is_near = |verb: &&str| strsim::osa_distance(given, verb) <= MOST_EDITS;
    let near: Vec<String> =
        command.get_subcommands().map(clap::Command::get_name).filter(is_near).map(str::to_owned).collect();
    if !near.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(near));
    }
    error
}
