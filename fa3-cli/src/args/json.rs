//! Reports for programs.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::console;

/// Where a report goes as JSON.
#[derive(Debug, clap::Args)]
pub(crate) struct JsonArgs {
    /// Writes what is printed as JSON; with - it is printed instead of the text
    #[arg(long, global = true, value_name = "FILE|-")]
    json: Option<PathBuf>,
}

/// Other files, of which lines would tell beside the JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("--json - prints JSON and nothing else: beside other files it takes the name of one, too")]
pub(crate) struct NotAlone;

impl JsonArgs {
    /// The file, if it is to be one; `others` says whether other files are written.
    ///
    /// # Errors
    /// If there are others, and the JSON is to be printed.
    pub(crate) fn file(&self, others: bool) -> Result<Option<&Path>, NotAlone> {
        match self.is_printed() {
            true if others => Err(NotAlone),
            true => Ok(None),
            false => Ok(self.json.as_deref()),
        }
    }

    /// Prints a report: its text, or what it is in JSON.
    pub(crate) fn print(&self, text: &impl Display, json: &Value) {
        self.print_text(text);
        self.print_json(json);
    }

    /// Prints text that is part of a report, unless JSON is printed at the end.
    pub(crate) fn print_text(&self, text: &impl Display) {
        if !self.is_printed() {
            console::print(text);
        }
    }

    /// Prints JSON if it is to be printed.
    pub(crate) fn print_json(&self, json: &Value) {
        if self.is_printed() {
            console::print(&format_args!("{json:#}"));
        }
    }

    fn is_printed(&self) -> bool {
        self.json.as_deref() == Some(Path::new("-"))
    }
}
