//! Trace of a cluster: the actions and waits of its warps, each in its own order. A [`crate::Timeline`] is made from
//! it.
//!
//! A trace has no times. Where warps of different roles meet, both name the same [`Gate`]: one warp signals it, the
//! other waits for it. A gate is complete when all signals that the trace has for it were given.

mod recorder;

use std::collections::BTreeMap;
use std::fmt;

use fa3_ir::{LaneOp, WgmmaType};

use crate::Line;

pub(crate) use recorder::Recorder;

/// Trace of a grid's first cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The kernel's name.
    pub kernel: String,
    /// Its warps, in the order of CTAs.
    pub warps: Vec<WarpTrace>,
    /// The factors of each line's products; `None` if they differ.
    pub products: BTreeMap<Line, Option<Factors>>,
}

/// The factors of a product. Their names are the regions of shared memory in which they lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Factors {
    /// The left factor; `None` if it is in registers.
    pub a: Option<String>,
    /// The right factor.
    pub b: String,
}

/// For example `Q Kᵀ`.
impl fmt::Display for Factors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.a.as_deref().unwrap_or("registers"), self.b)
    }
}

/// Trace of a warp.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarpTrace {
    /// The rank of its CTA in the cluster.
    pub cta: u32,
    /// Its number in the CTA.
    pub warp: u32,
    /// Its role; the kernel's name if it has no roles.
    pub role: String,
    /// Its records in program order.
    pub records: Vec<TraceRecord>,
}

/// An action of a warp, or several equal ones in a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// The action.
    pub action: Action,
    /// The line of the kernel's source that caused it.
    pub line: Line,
}

/// An action of a warp.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each variant's documentation names its fields")]
pub enum Action {
    /// Executes `count` instructions in a unit, one after the other.
    Issue { pipe: Pipe, count: u32 },
    /// Accesses shared memory, whose banks are busy for `wavefronts` cycles. If it `loads`, it has a result.
    Shared { wavefronts: u32, loads: bool },
    /// Accesses global memory, `bytes` bytes over all lanes. If it `loads`, it has a result.
    Global { bytes: u32, loads: bool },
    /// Reads a result of the accesses so far.
    Use,
    /// Does its part of a matrix product of 64 x `n` x [`WgmmaType::k`], with A in registers or in shared memory. The
    /// product begins when all warps of its warpgroup have come to it.
    Product { ty: WgmmaType, n: u32, a_in_registers: bool },
    /// Commits the group of its products.
    Commit,
    /// Waits until at most `pending` groups of its products are unfinished.
    Wait { pending: u32 },
    /// Begins a copy of `bytes` bytes from global to shared memory, which signals gates when the data are there.
    Load { bytes: u32, signals: Vec<Gate> },
    /// Begins a copy of `bytes` bytes from shared to global memory, or an addition.
    Store { bytes: u32 },
    /// Commits the group of its stores.
    StoreCommit,
    /// Waits until at most `pending` groups of its stores are unfinished or, if `read`, still have to read shared
    /// memory.
    StoreWait { pending: u32, read: bool },
    /// Begins copies of 16 bytes a lane to shared memory (cp.async), `bytes` bytes together.
    CopyAsync { bytes: u32 },
    /// Commits the group of these copies.
    CopyAsyncCommit,
    /// Waits until at most `pending` groups of these copies are unfinished.
    CopyAsyncWait { pending: u32 },
    /// Lets these copies signal a gate `count` times, once per lane, when they are complete.
    CopyAsyncSignal { gate: Gate, count: u32 },
    /// Signals a gate `count` times, once per lane.
    Signal { gate: Gate, count: u32 },
    /// Waits until a gate is complete.
    Await(Gate),
}

impl Action {
    /// Merges the next action into this one, if the next one only continues it. Returns whether it did.
    fn absorb(&mut self, next: &Action) -> bool {
        match (self, next) {
            (Action::Issue { pipe, count }, Action::Issue { pipe: other, count: more }) if pipe == other => {
                *count += more;
                true
            }
            (Action::Signal { gate, count }, Action::Signal { gate: other, count: more })
            | (
                Action::CopyAsyncSignal { gate, count },
                Action::CopyAsyncSignal { gate: other, count: more },
            ) if gate == other => {
                *count += more;
                true
            }
            _ => false,
        }
    }
}

/// An event that warps wait for. Each gate is used once. CTAs are named by their ranks in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "each variant's documentation names its fields")]
pub enum Gate {
    /// A phase of the mbarrier at an offset of a CTA's shared memory, after `phase` other phases.
    Mbarrier { cta: u32, offset: u32, phase: u32 },
    /// A generation of a CTA's named barrier with hardware number `id`, after `generation` other generations.
    Barrier { cta: u32, id: u32, generation: u32 },
    /// A generation of the cluster's barrier, after `generation` other generations.
    Cluster { generation: u32 },
}

/// The units that execute instructions. Each of the four partitions of an SM has one of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Pipe {
    /// Sums and products of floating-point numbers.
    Float,
    /// Integers, logic, comparisons, minima and maxima.
    Integer,
    /// Conversions of numbers.
    Convert,
    /// Exponentials, logarithms, reciprocals, roots.
    Special,
    /// Branches, fences, votes: they cost only the instruction itself.
    Control,
}

impl Pipe {
    /// The unit that executes an operation, and its number of instructions; `None` for copies from register to
    /// register, which the assembler removes.
    pub fn of(op: LaneOp) -> Option<(Pipe, u32)> {
        let mnemonic = op.ptx().split(' ').next().unwrap_or_default();
        let mut parts = mnemonic.split('.');
        let (name, ty) = (parts.next().unwrap_or_default(), parts.next_back().unwrap_or_default());
        // Integers of 64 bits are pairs; the wide product of two halves is one instruction.
        let count = if matches!(ty, "u64" | "b64" | "s64") && name != "cvt" { 2 } else { 1 };
        let float = matches!(ty, "f32" | "f16x2" | "bf16x2");
        match name {
            "mov" => None,
            "ex2" | "lg2" | "rcp" | "rsqrt" | "sqrt" | "tanh" => Some((Pipe::Special, 1)),
            "cvt" => Some((Pipe::Convert, 1)),
            "add" | "sub" | "mul" | "fma" if float => Some((Pipe::Float, 1)),
            _ => Some((Pipe::Integer, count)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_have_the_units_that_the_programming_guide_counts_them_to() {
        for (op, pipe) in [
            (LaneOp::FmaF32, Some((Pipe::Float, 1))),
            (LaneOp::MulBf16x2, Some((Pipe::Float, 1))),
            (LaneOp::MaxF32, Some((Pipe::Integer, 1))),
            (LaneOp::MadU32, Some((Pipe::Integer, 1))),
            (LaneOp::AddU64, Some((Pipe::Integer, 2))),
            (LaneOp::MadWideU32, Some((Pipe::Integer, 1))),
            (LaneOp::GtF32, Some((Pipe::Integer, 1))),
            (LaneOp::Ex2, Some((Pipe::Special, 1))),
            (LaneOp::Bf16x2OfF32, Some((Pipe::Convert, 1))),
            (LaneOp::UnpackB32, None),
        ] {
            assert_eq!(Pipe::of(op), pipe, "{op:?}");
        }
    }
}
