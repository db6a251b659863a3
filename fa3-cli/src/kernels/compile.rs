//! Compilers of PTX, and their reports on a kernel.

use std::error::Error;
use std::iter;
use std::time::Duration;

use fa3_cuda::JitReport;
use fa3_cuda::host::{Device, HostError};
use fa3_ir::Ptx;

use crate::tools::{Assembled, NoTool, Ptxas};

/// A compiler of PTX.
#[derive(Debug)]
pub(super) enum Compiler {
    Ptxas(Ptxas),
    Driver(Device),
}

#[derive(Debug)]
pub(super) struct Compiled {
    /// Registers per thread at entry.
    registers: u32,
    /// The compiler's report, or `None` if the kernel comes from the driver's cache.
    pub(super) report: Option<JitReport>,
    time: Duration,
}

impl Compiler {
    /// ptxas, or why it is missing; with `gpu`, also the driver of GPU 0.
    pub(super) fn installed(gpu: bool) -> Result<Vec<Result<Compiler, NoTool>>, HostError> {
        let driver = gpu.then(|| Device::open(0)).transpose()?;
        let ptxas = Ptxas::find().map(Compiler::Ptxas);
        Ok(iter::once(ptxas).chain(driver.map(Compiler::Driver).map(Ok)).collect())
    }

    pub(super) fn compile(&self, ptx: &Ptx) -> Result<Compiled, Box<dyn Error>> {
        match self {
            Compiler::Ptxas(ptxas) => {
                let Assembled { report, time, cubin: _ } = ptxas.assemble(ptx)?;
                Ok(Compiled { registers: report.registers, report: Some(report), time })
            }
            Compiler::Driver(device) => {
                let function = device.compile(ptx)?;
                let report = function.report().cloned();
                Ok(Compiled { registers: function.registers(), report, time: function.compile_time() })
            }
        }
    }

    /// The compiler's name and version.
    pub(super) fn describe(&self) -> String {
        match self {
            Compiler::Ptxas(ptxas) => format!("ptxas {}", ptxas.0.describe()),
            Compiler::Driver(device) => format!("driver of {device}"),
        }
    }
}

impl Compiled {
    /// The table's cells: registers, bytes spilled, warnings and milliseconds.
    pub(super) fn cells(&self) -> [String; 4] {
        let of_report = |number: fn(&JitReport) -> usize| {
            self.report.as_ref().map_or_else(|| "?".to_owned(), |report| number(report).to_string())
        };
        [
            self.registers.to_string(),
            of_report(|report| (report.spill_store_bytes + report.spill_load_bytes) as usize),
            of_report(|report| report.warnings.len()),
            format!("{:.0}", 1e3 * self.time.as_secs_f64()),
        ]
    }
}
