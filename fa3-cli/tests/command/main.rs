//! `fa3` as a command: the tests run the binary on files in temporary folders.

mod accuracy;
mod bench;
mod checks;
mod export;
mod files;
mod kernels;
mod layouts;
mod plan;
mod quantize;
mod reading;
mod refusals;
mod reproduce;
mod run;
mod sass;
mod sim;

use std::process::{Command, Stdio};

use serde_json::Value;

/// The exit code and output of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `fa3` with words that are separated by blanks.
pub(crate) fn fa3(words: &str) -> Ran {
    fa3_with(words, &[])
}

/// Runs `fa3` with these environment variables.
pub(crate) fn fa3_with(words: &str, variables: &[(&str, &str)]) -> Ran {
    Ran::of(command(words).envs(variables.iter().copied()))
}

/// `fa3` with words that are separated by blanks, and without stdin.
pub(crate) fn command(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fa3"));
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command
}

impl Ran {
    pub(crate) fn of(command: &mut Command) -> Ran {
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Asserts that the command succeeded without complaints. Returns its output.
    #[track_caller]
    pub(crate) fn succeeded(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self.stdout
    }

    /// Asserts that the command succeeded, and parses its output.
    #[track_caller]
    pub(crate) fn json(self) -> Value {
        serde_json::from_str(&self.succeeded()).unwrap()
    }

    /// Asserts that the command refused its input in one line that contains `why`.
    #[track_caller]
    pub(crate) fn refused(self, why: &str) {
        let line = self.stderr.strip_prefix("error: ").and_then(|rest| rest.strip_suffix('\n'));
        let one_line = line.is_some_and(|line| !line.contains('\n') && line.contains(why));
        assert!(self.code == Some(2) && one_line, "expected {why:?}: {self:?}");
    }

    /// Asserts that the parser of the command line refused it, with a text that contains `why`.
    #[track_caller]
    pub(crate) fn misused(self, why: &str) {
        let is_refused = self.code == Some(2) && self.stderr.starts_with("error: ");
        assert!(is_refused && self.stderr.contains(why), "expected {why:?}: {self:?}");
    }
}
