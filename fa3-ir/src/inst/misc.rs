//! The register pool, dependent launches, trap.

use crate::Inst;
use crate::inst::Access;
use crate::lang::Builder;

/// Instructions without a family of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are the operands of the PTX instruction that the variant names")]
pub enum MiscInst {
    /// `setmaxnreg.{inc,dec}`: waits for registers in the CTA's pool and takes them, or returns registers to it.
    SetMaxRegisters { increase: bool, registers: u32 },
    /// `griddepcontrol.wait`: waits until the preceding grids have finished and their writes are visible.
    GridDependencyWait,
    /// `griddepcontrol.launch_dependents`: the next grid may be scheduled.
    LaunchDependents,
    /// `trap`.
    Trap,
}

impl MiscInst {
    /// Whether the instruction is `.aligned`.
    pub(crate) fn is_collective(&self) -> bool {
        matches!(self, MiscInst::SetMaxRegisters { .. })
    }

    pub(crate) fn visit(&self, see: &mut dyn FnMut(Access)) {
        if let MiscInst::SetMaxRegisters { increase: _, registers: given } = *self {
            see(Access::Limit { what: "setmaxnreg", given, min: 24, max: 256, multiple: 8 });
        }
    }

    pub(crate) fn text(&self) -> String {
        match self {
            MiscInst::SetMaxRegisters { increase, registers } => {
                let which = if *increase { "inc" } else { "dec" };
                format!("setmaxnreg.{which}.sync.aligned.u32 {registers}")
            }
            MiscInst::GridDependencyWait => "griddepcontrol.wait".to_owned(),
            MiscInst::LaunchDependents => "griddepcontrol.launch_dependents".to_owned(),
            MiscInst::Trap => "trap".to_owned(),
        }
    }
}

/// The register pool, dependent launches, trap.
impl Builder {
    /// Keeps `registers` per thread and returns the others to the CTA's pool.
    #[track_caller]
    pub fn set_max_registers_down(&self, registers: u32) {
        self.push(Inst::Misc(MiscInst::SetMaxRegisters { increase: false, registers }));
    }

    /// Waits until the CTA's pool has `registers` per thread, and takes them. The new registers are undefined.
    #[track_caller]
    pub fn set_max_registers_up(&self, registers: u32) {
        self.push(Inst::Misc(MiscInst::SetMaxRegisters { increase: true, registers }));
    }

    /// Waits until the grids that this one depends on have finished.
    #[track_caller]
    pub fn grid_dependency_wait(&self) {
        self.push(Inst::Misc(MiscInst::GridDependencyWait));
    }

    /// Lets the grids that depend on this one be scheduled.
    #[track_caller]
    pub fn launch_dependents(&self) {
        self.push(Inst::Misc(MiscInst::LaunchDependents));
    }

    /// Stops the kernel with an error.
    #[track_caller]
    pub fn trap(&self) {
        self.push(Inst::Misc(MiscInst::Trap));
    }
}
