//! Effect of each instruction on the machine.

mod barrier;
mod bulk;
mod cluster;
mod copy;
mod fence;
mod global;
mod load;
mod mbarrier;
mod mem;
mod misc;
mod observe;
pub(crate) mod operand;
mod shared;
mod step;
mod tensor;
mod warp;
pub(crate) mod wgmma;

pub(crate) use shared::SharedPlace;

/// How a warp goes on after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// To the next one.
    Next,
    /// To the next one, after the others had a turn: what it asked for was not there.
    Poll,
    /// It waits, or somebody has moved it on already.
    Stay,
}
