//! Maxima over all threads of a CTA, or of a cluster of two CTAs.

use fa3_ir::lang::*;

use crate::kernels::parts::over_warp::over_warp;

/// Shared memory and a barrier, by which maxima are computed one after another.
pub(super) struct BlockMax<'k> {
    builder: &'k Builder,
    warps: u32,
    /// One word per warp, twice: while some threads still read one maximum, others write the next.
    slots: Region,
    met: Met<'k>,
}

/// The barrier at which all threads meet.
enum Met<'k> {
    /// The threads of a CTA meet at a named barrier.
    Here {
        barrier: fa3_ir::Barrier,
        /// Offset of the slots of the next maximum.
        offset: Var<'k, B32>,
    },
    /// The threads of two CTAs meet at mbarriers. Each CTA gets the words of both CTAs.
    Across {
        /// Two mbarriers, which maxima use in turn. A phase completes when the CTA's warps have arrived and the other
        /// CTA's words have come.
        told: Region,
        /// The addresses of the other CTA's slots and mbarriers.
        theirs: [U32<'k>; 2],
        /// The index of the next maximum.
        number: Var<'k, B32>,
    },
}

impl<'k> BlockMax<'k> {
    /// Declares shared memory for maxima over `warps` warps of each CTA, an even number.
    #[track_caller]
    pub(super) fn declare(b: &'k Builder, warps: u32) -> BlockMax<'k> {
        let cluster = b.launch().cluster;
        let slots = b.region("maxima", 8 * warps * cluster, 16);
        let met = match cluster {
            1 => Met::Here { barrier: b.barrier("maxima", 32 * warps), offset: b.var("offset", 0) },
            _ => {
                let told = b.mbarriers("maxima told", 2, warps);
                let other = b.cluster_cta_rank() ^ 1;
                let theirs = [slots, told].map(|region| b.map_address(region, other));
                Met::Across { told, theirs, number: b.var("number", 0) }
            }
        };
        BlockMax { builder: b, warps, slots, met }
    }

    /// The maximum of `x` over all threads, in each thread. `x` is not NaN.
    #[track_caller]
    pub(super) fn of(&self, x: V<'k, F32>) -> V<'k, F32> {
        let x = over_warp(x, |x, y| x.max(y));
        match &self.met {
            Met::Here { barrier, offset } => self.over_cta(x, *barrier, *offset),
            Met::Across { told, theirs, number } => self.over_both(x, *told, *theirs, *number),
        }
    }

    /// The maximum of the numbers `x` of a CTA's warps.
    #[track_caller]
    fn over_cta(&self, x: V<'k, F32>, barrier: fa3_ir::Barrier, offset: Var<'k, B32>) -> V<'k, F32> {
        let b = self.builder;
        let slots = offset.now() + b.address(self.slots);
        b.once_per_warp(|| b.store((b.tid() >> 5).mad(4, slots), x));
        b.sync(barrier);
        let all = self.read(slots, self.warps);
        offset.set(b.value(4 * self.warps) - offset.now());
        largest(&all)
    }

    /// The maximum over all warps of two CTAs. A warp that stores a word for the other CTA has waited for the previous
    /// maximum. So all threads of both CTAs have read the maximum before that, and its slots are free.
    #[track_caller]
    fn over_both(
        &self,
        x: V<'k, F32>,
        told: Region,
        [their_slots, their_told]: [U32<'k>; 2],
        number: Var<'k, B32>,
    ) -> V<'k, F32> {
        let (b, warp) = (self.builder, self.builder.tid() >> 5);
        let half = number.now() & 1;
        let (first, phase) = (half * (8 * self.warps), half * 8);
        let (slots, told) = (first + b.address(self.slots), phase + b.address(told));
        let [mine, theirs] = [warp.mad(4, slots), (warp + self.warps).mad(4, first + their_slots)];
        let their_told = phase + their_told;
        b.once_per_warp(|| {
            b.store(mine, x);
            b.store_async(theirs, x, their_told);
            b.mbarrier_arrive_expect(told, 4);
        });
        b.mbarrier_wait(told, (number.now() >> 1) & 1);
        let all = self.read(slots, 2 * self.warps);
        number.set(number.now() + 1);
        largest(&all)
    }

    /// Reads the first `count` slots.
    #[track_caller]
    fn read(&self, slots: U32<'k>, count: u32) -> Vec<V<'k, F32>> {
        let (b, at) = (self.builder, |slot: u32| slots.at(4 * slot as i32));
        match count % 4 {
            0 => (0..count).step_by(4).flat_map(|slot| b.load_vector::<F32, 4>(at(slot))).collect(),
            _ => (0..count).step_by(2).flat_map(|slot| b.load_vector::<F32, 2>(at(slot))).collect(),
        }
    }
}

/// The largest of some numbers. It is NaN only if all are NaN. Four chains of maxima hide each other's latency and take
/// few registers.
#[track_caller]
pub(super) fn largest<'k>(x: &[V<'k, F32>]) -> V<'k, F32> {
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
