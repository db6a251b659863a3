//! The effect of each instruction on the machine.

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

/// How a warp continues after an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    /// The warp executes the next instruction.
    Next,
    /// The warp executes the next instruction after the other warps had a turn, because a poll found nothing.
    Poll,
    /// The warp stays where it is: it waits, or it has been moved on already.
    Stay,
}
