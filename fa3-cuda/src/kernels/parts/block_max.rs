//! The maximum of a number over all threads of a role.

use fa3_ir::lang::*;

/// Shared memory and a barrier for maxima, one after the other.
pub(crate) struct BlockMax<'k> {
    builder: &'k Builder,
    warps: u32,
    /// A number a warp, twice: while some threads still read one maximum, others write the next.
    slots: Region,
    met: fa3_ir::Barrier,
    /// Where those of the next maximum begin.
    turn: Var<'k, B32>,
}

impl<'k> BlockMax<'k> {
    /// Of `warps` warps, an even number.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, warps: u32) -> BlockMax<'k> {
        let slots = b.region("maxima", 8 * warps, 16);
        BlockMax { builder: b, warps, slots, met: b.barrier("maxima", 32 * warps), turn: b.var("turn", 0) }
    }

    /// The maximum of `x`, which is not NaN, in all threads.
    #[track_caller]
    pub(crate) fn of(&self, x: V<'k, F32>) -> V<'k, F32> {
        let b = self.builder;
        let x = [16, 8, 4, 2, 1].into_iter().fold(x, |x, lanes| x.max(x.shfl_bfly(lanes)));
        let slots = self.turn.now() + b.address(self.slots);
        b.once_per_warp(|| b.store((b.tid() >> 5).mad(4, slots), x));
        b.sync(self.met);
        let at = |warp: u32| slots.at(4 * warp as i32);
        let all: Vec<_> = match self.warps % 4 {
            0 => (0..self.warps).step_by(4).flat_map(|warp| b.load_vector::<F32, 4>(at(warp))).collect(),
            _ => (0..self.warps).step_by(2).flat_map(|warp| b.load_vector::<F32, 2>(at(warp))).collect(),
        };
        self.turn.set(b.value(4 * self.warps) - self.turn.now());
        largest(&all)
    }
}

/// The largest of some numbers; of a number and NaN, that is the number. Four chains of maxima hide each other's
/// latency and take few registers.
#[track_caller]
pub(crate) fn largest<'k>(x: &[V<'k, F32>]) -> V<'k, F32> {
    let mut chains = x[..4.min(x.len())].to_vec();
    for (index, &x) in x.iter().enumerate().skip(4) {
        chains[index % 4] = chains[index % 4].max(x);
    }
    while let [first, .., last] = chains[..] {
        chains[0] = first.max(last);
        chains.pop();
    }
    chains[0]
}
