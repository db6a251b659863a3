//! Runs ptxas, if it is installed.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use fa3_ir::{Kernel, ptx};

/// File number, because tests run in parallel.
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// The log of ptxas about an assembled kernel.
pub(crate) struct Report(String);

impl Report {
    /// Whether ptxas spilled no register.
    pub(crate) fn spills_nothing(&self) -> bool {
        self.0.contains("0 bytes spill stores, 0 bytes spill loads")
    }
}

/// Assembles `kernel` for sm_90a with ptxas from `$PTXAS` or the path. If there is none, prints a note and returns
/// `None`.
///
/// # Panics
/// If the kernel is not sound, if ptxas rejects it, or if it reports serialization or injected instructions (C75xx).
pub(crate) fn assemble(kernel: &Kernel) -> Option<Report> {
    let ptx = ptx::emit(kernel).unwrap_or_else(|errors| panic!("{}", listed(&errors)));
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| "ptxas".into());
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name = format!("fa3-ir-{}-{serial}.ptx", std::process::id());
    let path = std::env::temp_dir().join(name);
    std::fs::File::create(&path).unwrap().write_all(ptx.text.as_bytes()).unwrap();
    let mut command = Command::new(ptxas);
    command.args(["-arch=sm_90a", "-v", "-o", "/dev/null"]).arg(&path).stdin(Stdio::null());
    let output = command.output();
    std::fs::remove_file(&path).unwrap();
    let Ok(output) = output else {
        println!("skipped: no ptxas");
        return None;
    };
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("C75"), "{said}\n{}", numbered(&ptx.text));
    Some(Report(said))
}

/// The instruction lines of a kernel's PTX, without the declarations and the `ret`.
pub(crate) fn body(kernel: &Kernel) -> Vec<String> {
    let ptx = ptx::emit(kernel).unwrap_or_else(|errors| panic!("{}", listed(&errors)));
    assert!(ptx.text.is_ascii());
    let statements = ptx.text.lines().skip_while(|line| *line != "{").map(str::trim);
    let of_interest = |line: &&str| !line.starts_with(".reg") && !["{", "}", "ret;"].contains(line);
    statements.filter(of_interest).map(str::to_owned).collect()
}

fn listed(errors: &[fa3_ir::VerifyError]) -> String {
    errors.iter().map(|error| format!("{error}\n")).collect()
}

fn numbered(text: &str) -> String {
    text.lines().enumerate().map(|(index, line)| format!("{:4} {line}\n", index + 1)).collect()
}
