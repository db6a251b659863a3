//! Every kernel of the catalogue, for every dtype that it takes, in ptxas's opinion.

use std::ffi::OsString;
use std::fs;
use std::process::{Command, Stdio};

use fa3_cuda::host::JitReport;
use fa3_cuda::kernels::catalogue;
use fa3_ir::{Ptx, ptx};

/// What the ptxas of `$PTXAS` or of the path says of a kernel. `None` if there is none.
fn assemble(ptx: &Ptx, name: &str) -> Option<String> {
    let ptxas = std::env::var_os("PTXAS").unwrap_or_else(|| OsString::from("ptxas"));
    let path = std::env::temp_dir().join(format!("fa3-cuda-{}-{name}.ptx", std::process::id()));
    fs::write(&path, &ptx.text).unwrap();
    let mut command = Command::new(ptxas);
    command.args(["-arch=sm_90a", "-v", "-o", "/dev/null"]).arg(&path).stdin(Stdio::null());
    let output = command.output();
    fs::remove_file(&path).unwrap();
    let output = output.ok()?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{name}: {said}");
    Some(said)
}

#[test]
fn kernels_assemble_without_spills_and_warnings() {
    for entry in catalogue::ALL {
        for job in entry.jobs().unwrap() {
            let name = format!("{}-{}", entry.name, job.arrays[0].elem);
            let ptx = ptx::emit(&job.kernel).unwrap_or_else(|errors| panic!("{name}: {errors:?}"));
            let Some(said) = assemble(&ptx, &name) else {
                println!("skipped: no ptxas");
                return;
            };
            let report = JitReport::parse(&said).unwrap_or_else(|| panic!("{name}: {said}"));
            // Registers that setmaxnreg gives to roles are not in this number; those at entry are.
            let entry_registers = job.kernel.launch.entry_registers();
            assert!(report.is_clean() && report.registers <= entry_registers, "{name}: {report}");
            println!("{name}: {report}");
        }
    }
}
