//! Pieces of keys that a CTA merges in its main loop, where splits have a fixed size.

use std::fmt;

use super::{CtaTile, REGISTER_RESERVE};
use crate::DeviceLimits;

/// How a kernel merges the pieces of its tiles ([`SplitKeys::Fixed`](super::SplitKeys::Fixed)): each consumer keeps O
/// of the pieces so far beside the accumulators of its piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// Keys of a piece, a multiple of the tile's keys per block.
    pub keys: u32,
    /// The place of O of the pieces so far.
    pub running: RunningO,
}

/// The place of O of the pieces so far. Each thread has its own part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunningO {
    /// Registers, as many as O itself takes.
    Registers,
    /// Shared memory.
    Shared,
    /// The CTA's part of the workspace.
    Workspace,
}

impl RunningO {
    /// The first of these places that has room beside a tile of one column group, wherever its keys are.
    pub(super) fn of(tile: &CtaTile, limits: &DeviceLimits) -> RunningO {
        let accumulators = tile.accumulators();
        let needed = accumulators.total() + accumulators.o + REGISTER_RESERVE;
        if needed <= tile.registers_of(1, true).consumer.min(255) {
            return RunningO::Registers;
        }
        if tile.smem().total() + tile.bytes_of_o() <= limits.smem_bytes {
            RunningO::Shared
        } else {
            RunningO::Workspace
        }
    }
}

impl CtaTile {
    /// Bytes of a tile of O in f32.
    pub fn bytes_of_o(&self) -> u32 {
        self.tile_m.saturating_mul(self.head_dim_v).saturating_mul(4)
    }
}

impl fmt::Display for RunningO {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RunningO::Registers => "registers",
            RunningO::Shared => "shared memory",
            RunningO::Workspace => "the workspace",
        })
    }
}
