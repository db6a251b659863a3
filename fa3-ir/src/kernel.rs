//! A kernel as data: parameters, launch facts, shared memory, barriers, roles, statements.

use std::ops::Range;
use std::panic::Location;

use crate::{BoxShape, Condition, Inst, SmemPlan, ValueInfo, VerifyError};

/// Where in the kernel's Rust source a statement was built.
pub type Source = &'static Location<'static>;

/// A kernel. All fields are public, so that tests can break it; [`crate::verify()`] says whether it is sound.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The name of its entry, a PTX identifier.
    pub name: String,
    /// How it must be launched.
    pub launch: Launch,
    /// Its parameters, in order.
    pub params: Vec<ParamInfo>,
    /// Its registers; a [`crate::Value`] is an index.
    pub values: Vec<ValueInfo>,
    /// Its dynamic shared memory.
    pub smem: SmemPlan,
    /// Its named barriers; a [`crate::Barrier`] is an index.
    pub barriers: Vec<BarrierInfo>,
    /// Code that every warp runs first.
    pub prologue: Block,
    /// Code that the warps of each role run after the prologue. Without roles the prologue is everything.
    pub roles: Vec<RoleBody>,
    /// Mistakes that the builder found while the kernel grew, such as violations of V-25 to V-29.
    pub misuse: Vec<VerifyError>,
}

/// How a kernel must be launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Launch {
    /// Threads of a CTA, in one dimension.
    pub threads: u32,
    /// CTAs of a cluster, in one dimension; 1 means no clusters.
    pub cluster: u32,
    /// CTAs per SM for which registers must suffice.
    pub per_sm: u32,
}

impl Launch {
    /// CTAs of `threads` threads, no clusters.
    pub fn threads(threads: u32) -> Launch {
        Launch { threads, cluster: 1, per_sm: 1 }
    }

    /// Groups the CTAs into clusters of `cluster`.
    #[must_use]
    pub fn cluster(self, cluster: u32) -> Launch {
        Launch { cluster, ..self }
    }

    /// Puts `per_sm` CTAs on an SM, if shared memory suffices.
    #[must_use]
    pub fn per_sm(self, per_sm: u32) -> Launch {
        Launch { per_sm, ..self }
    }

    /// Warps of a CTA.
    pub fn warps(self) -> u32 {
        self.threads / 32
    }

    /// Registers of a thread at entry, as ptxas allots them: an equal share of the SM's 65536 registers among whole
    /// warpgroups, rounded down to a multiple of 8.
    pub fn entry_registers(self) -> u32 {
        (65536 / self.per_sm.max(1) / self.threads.clamp(1, 1024).next_multiple_of(128)).min(256) / 8 * 8
    }
}

/// A parameter: an index into [`Kernel::params`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Param(pub u32);

/// A declared parameter.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ParamInfo {
    /// Its name, a PTX identifier.
    pub name: String,
    /// Its kind.
    pub kind: ParamKind,
}

/// Kind of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ParamKind {
    /// 32 bits.
    U32,
    /// 64 bits.
    U64,
    /// A binary32.
    F32,
    /// The address of an array in global memory.
    Pointer(Elem),
    /// A tensor map, 128 bytes aligned to 64, whose copies move this box.
    TensorMap(BoxShape),
}

/// Element types of arrays in global memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say it")]
pub enum Elem {
    U8,
    U32,
    U64,
    F32,
    F16,
    Bf16,
    E4m3,
}

impl Elem {
    /// Size of an element in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Elem::U8 | Elem::E4m3 => 1,
            Elem::F16 | Elem::Bf16 => 2,
            Elem::U32 | Elem::F32 => 4,
            Elem::U64 => 8,
        }
    }
}

/// A named barrier: an index into [`Kernel::barriers`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Barrier(pub u32);

/// A declared named barrier.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BarrierInfo {
    /// Its name.
    pub name: String,
    /// Its hardware number, 1 to 15. 0 is the barrier of the whole CTA.
    pub id: u32,
    /// Threads that arrive or wait per generation.
    pub threads: u32,
}

/// Some warps of a CTA, with a common task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Role {
    /// Its name, a PTX identifier.
    pub name: String,
    /// Its warps.
    pub warps: Range<u32>,
    /// Registers per thread, from the CTA's pool: 24 to 256 in steps of 8. `None` keeps the number at entry.
    pub registers: Option<u32>,
}

impl Role {
    /// A role that keeps the registers that it has at entry.
    pub fn new(name: &str, warps: Range<u32>) -> Role {
        Role { name: name.to_owned(), warps, registers: None }
    }

    /// Sets the registers per thread.
    #[must_use]
    pub fn registers(self, registers: u32) -> Role {
        Role { registers: Some(registers), ..self }
    }
}

/// Code that some of the warps run after the prologue.
#[derive(Clone, Debug, PartialEq)]
pub struct RoleBody {
    /// Its name, a PTX identifier.
    pub name: String,
    /// The warps that have it.
    pub warps: Range<u32>,
    /// The statements that they run.
    pub block: Block,
    /// Where it was declared.
    pub source: Source,
}

/// Statements that run in order.
pub type Block = Vec<Stmt>;

/// A statement.
#[derive(Clone, Debug, PartialEq)]
pub struct Stmt {
    /// Its effect.
    pub node: Node,
    /// Where it was built.
    pub source: Source,
}

/// Effect of a statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// An instruction.
    Inst {
        /// The lanes that execute it; all if `None`.
        guard: Option<Condition>,
        /// The instruction.
        inst: Inst,
    },
    /// A branch.
    If {
        /// The condition.
        condition: Condition,
        /// Whether all lanes of a warp agree. If not, no instruction of the branches may need the whole warp.
        uniform: bool,
        /// The statements that run where the condition holds.
        then: Block,
        /// The statements that run where it does not hold.
        otherwise: Block,
    },
    /// Repeats its body until a [`Node::Break`].
    Loop {
        /// The body.
        body: Block,
    },
    /// Leaves the innermost loop where the condition holds. All lanes of a warp agree on the condition.
    Break {
        /// The condition.
        condition: Condition,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest setmaxnreg.dec that ptxas 13.5 assembles shows how many registers it assumes at entry.
    #[test]
    fn registers_at_entry_are_those_of_ptxas() {
        let entry = |threads| Launch::threads(threads).entry_registers();
        let threads = [128, 256, 288, 320, 352, 384, 416, 448, 480, 512, 1024];
        assert_eq!(threads.map(entry), [256, 256, 168, 168, 168, 168, 128, 128, 128, 128, 64]);
        assert_eq!([0, u32::MAX].map(entry), [256, 64]);
    }
}
