//! `fa3` as a command: the tests run the binary on files in temporary folders.

mod accuracy;
mod bench;
mod checks;
mod kernels;
mod layouts;
mod plan;
mod quantize;
mod reading;
mod refusals;
mod run;
mod sass;
mod sim;

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use fa3_cuda::host::is_driver_present;

/// The exit code and output of a command.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

pub(crate) fn fa3<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    fa3_with(args, &[])
}

/// Runs `fa3` with these environment variables.
pub(crate) fn fa3_with<S: AsRef<OsStr>>(args: &[S], variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fa3"));
    command.args(args).envs(variables.iter().copied()).stdin(Stdio::null());
    Ran::of(command.output().unwrap())
}

/// Asserts that each command, with `--json` added, needs a GPU: without one it reports this and writes nothing.
#[track_caller]
pub(crate) fn assert_needs_a_gpu(commands: &[&str]) {
    if is_driver_present() {
        println!("skipped: there is a driver");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("a.json");
    for command in commands {
        let args = command.split_whitespace().chain(["--json", json.to_str().unwrap()]);
        let ran = fa3(&args.collect::<Vec<_>>());
        assert_eq!(ran.stdout, "", "{command}");
        ran.refused("no nvidia driver: libcuda cannot be loaded");
        assert!(!json.exists(), "{command}");
    }
}

impl Ran {
    pub(crate) fn of(output: Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Ran { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Asserts that the command succeeded without complaints. Returns its output.
    #[track_caller]
    pub(crate) fn succeeded(self) -> String {
        assert_eq!((self.code, self.stderr.as_str()), (Some(0), ""), "{}", self.stdout);
        self.stdout
    }

    /// Asserts that the command refused its input in one line that contains `why`.
    #[track_caller]
    pub(crate) fn refused(self, why: &str) {
        let Ran { code, stderr, .. } = &self;
        let line = stderr.strip_prefix("error: ").and_then(|rest| rest.strip_suffix('\n'));
        let one_line = line.is_some_and(|line| !line.contains('\n') && line.contains(why));
        assert!(*code == Some(2) && one_line, "expected {why:?}: {self:?}");
    }
}
