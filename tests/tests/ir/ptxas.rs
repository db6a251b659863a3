//! The PTX of a kernel, and the report of ptxas on it, if ptxas is installed.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};

use fa3_cuda::JitReport;
use fa3_ir::{Kernel, Ptx, ptx};
use fa3_tests::lock::{NoTool, Ptxas};

static PTXAS: LazyLock<Result<Ptxas, NoTool>> = LazyLock::new(Ptxas::find);
/// Number for the next file name. Tests run in parallel, so each file needs its own.
static SERIAL: AtomicU32 = AtomicU32::new(0);

/// Assembles a kernel. Without ptxas, prints a note and returns `None`.
///
/// # Panics
/// If the kernel is not sound, if ptxas rejects it, or if it reports serialization or injected instructions (C75xx).
pub(crate) fn assemble(kernel: &Kernel) -> Option<JitReport> {
    let ptx = emitted(kernel);
    let ptxas = PTXAS.as_ref().map_err(|none| println!("skipped: {none}")).ok()?;
    let name = format!("{}-{}", kernel.name, SERIAL.fetch_add(1, Ordering::Relaxed));
    let report = ptxas.assemble(&name, &[&ptx.text]).reports.remove(0);
    let serializes = |code| (7500..7600).contains(&code);
    assert!(!report.warnings.iter().filter_map(|warning| warning.code).any(serializes), "{name}: {report}");
    Some(report)
}

/// The instruction lines of a kernel's PTX, without the declarations and the `ret`.
pub(crate) fn body(kernel: &Kernel) -> Vec<String> {
    let text = emitted(kernel).text;
    assert!(text.is_ascii());
    let statements = text.lines().skip_while(|line| *line != "{").map(str::trim);
    let of_interest = |line: &&str| !line.starts_with(".reg") && !["{", "}", "ret;"].contains(line);
    statements.filter(of_interest).map(str::to_owned).collect()
}

fn emitted(kernel: &Kernel) -> Ptx {
    ptx::emit(kernel).unwrap_or_else(|errors| panic!("{errors}"))
}
