//! Rounds of a loop, whose number says which slot of each ring is next.

use crate::lang::{B32, V, Var};

/// The number of a round, which counts from 0. Whoever fills or empties a slot of several rings in every round needs no
/// registers for the stage and the parity of each. The loop counts; a ring that waits twice in a round waits for the
/// same slot.
#[derive(Clone, Copy, Debug)]
pub struct Rounds<'k> {
    count: Var<'k, B32>,
    late: u32,
}

impl<'k> Rounds<'k> {
    /// Those that a variable counts.
    pub fn of(count: Var<'k, B32>) -> Rounds<'k> {
        Rounds { count, late: 0 }
    }

    /// The same so many rounds late: in round `late` of the loop the first one.
    pub fn late(self, rounds: u32) -> Rounds<'k> {
        Rounds { late: self.late + rounds, ..self }
    }

    /// The number of this round.
    #[track_caller]
    pub(super) fn now(self) -> V<'k, B32> {
        if self.late == 0 { self.count.get() } else { self.count.get() - self.late }
    }

    /// The parity of a phase that takes so many rounds, a power of 2, if that of the first one is `initial`.
    #[track_caller]
    pub(super) fn parity(self, rounds: u32, initial: u32) -> V<'k, B32> {
        let parity = (self.now() >> rounds.ilog2()) & 1;
        if initial == 0 { parity } else { parity ^ initial }
    }
}
