//! Reports for programs.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::console;

/// Where a report goes as JSON.
#[derive(Debug, clap::Args)]
pub(crate) struct JsonArgs {
    /// Writes the report as JSON; with - the JSON is printed instead of the text
    #[arg(long, global = true, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

/// `--json -` together with options that write other files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--json - prints JSON and nothing else: with other output files, --json needs a file name, too")]
pub(crate) struct NotAlone;

impl JsonArgs {
    /// The file to write JSON to, unless it goes to stdout; `others` says whether other files are written.
    pub(crate) fn file(&self, others: bool) -> Result<Option<&Path>, NotAlone> {
        match self.is_printed() {
            true if others => Err(NotAlone),
            true => Ok(None),
            false => Ok(self.json.as_deref()),
        }
    }

    /// Prints a report as text or as JSON.
    pub(crate) fn print(&self, text: &impl Display, json: &Value) {
        self.print_text(text);
        self.print_json(json);
    }

    /// Prints a part of a report as text, unless JSON goes to stdout.
    pub(crate) fn print_text(&self, text: &impl Display) {
        if !self.is_printed() {
            console::print(text);
        }
    }

    /// Prints JSON if it goes to stdout.
    pub(crate) fn print_json(&self, json: &Value) {
        if self.is_printed() {
            console::print(&format_args!("{json:#}"));
        }
    }

    fn is_printed(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }
}
