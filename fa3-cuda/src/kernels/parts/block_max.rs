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
        let pair = |index: u32| -> [V<'k, F32>; 2] { b.load_vector(slots.at(8 * index as i32)) };
        let all = (0..self.warps / 2).flat_map(pair).collect();
        self.turn.set(b.value(4 * self.warps) - self.turn.now());
        largest(all)
    }
}

/// The largest of some numbers, in as few rounds as can be. Of a number and NaN, that is the number.
#[track_caller]
pub(crate) fn largest(mut x: Vec<V<'_, F32>>) -> V<'_, F32> {
    while x.len() > 1 {
        x = x
            .chunks(2)
            .map(|pair| pair.iter().copied().reduce(|a, b| a.max(b)).expect("a chunk has one"))
            .collect();
    }
    x[0]
}
