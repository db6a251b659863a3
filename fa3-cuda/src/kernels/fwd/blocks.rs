//! The blocks of keys that a tile visits, from the last to the first, and which of them need the mask.

use fa3_ir::{B32, Builder, Pred, V};
use fa3_sched::KvRange;

use super::FwdSpec;

/// A tile's blocks.
pub(super) struct Blocks {
    kv: KvRange<V<B32>>,
    /// How many there are.
    pub(super) count: V<B32>,
    /// Keys of a block.
    keys: u32,
    /// Whether the mask has a left side, a right side.
    left: bool,
    right: bool,
}

/// One of them.
pub(super) struct Block {
    /// Its first key.
    pub(super) key: V<B32>,
    /// Whether some row may not see all of it.
    pub(super) masked: bool,
    /// Whether no other is visited after it.
    pub(super) last: V<Pred>,
}

impl Blocks {
    /// Those of a tile with this range.
    #[track_caller]
    pub(super) fn of(b: &mut Builder, spec: &FwdSpec, kv: KvRange<V<B32>>) -> Blocks {
        let (left, right) = spec.mask.reach();
        let count = b.sub(kv.end, kv.first);
        Blocks { kv, count, keys: spec.tile.tile_n, left: left.is_some(), right: right.is_some() }
    }

    /// The block that is visited after `step` others. It may need the mask, for all that is known.
    #[track_caller]
    pub(super) fn at(&self, b: &mut Builder, step: u32) -> Block {
        let block = b.sub(self.kv.end, step + 1);
        self.block(b, block, true)
    }

    #[track_caller]
    fn block(&self, b: &mut Builder, index: V<B32>, masked: bool) -> Block {
        Block { key: b.mul(index, self.keys), masked, last: b.eq_b32(index, self.kv.first) }
    }

    /// Runs `body` for every block but the first `from`. It is built up to three times: for blocks at the mask's right side
    /// (and the end of the keys, which only the very first reaches), for those that all rows see, and for those at the left side.
    #[track_caller]
    pub(super) fn for_each(&self, b: &mut Builder, from: u32, mut body: impl FnMut(&mut Builder, Block)) {
        let KvRange { first: _, unmasked_first, unmasked_end, end } = self.kv;
        let right = b.sub(end, unmasked_end);
        let left = b.sub(end, unmasked_first);
        let mut phase = |b: &mut Builder, steps: (V<B32>, V<B32>), masked: bool| {
            b.for_each(steps, 1, |b, step| {
                let after = b.sub(end, step);
                let block = b.sub(after, 1);
                let block = self.block(b, block, masked);
                body(b, block);
            });
        };
        if self.right || from == 0 {
            let start = b.mov_b32(from);
            phase(b, (start, right), true);
        }
        let start = b.max_u32(right, from);
        phase(b, (start, left), false);
        if self.left {
            let start = b.max_u32(left, from);
            phase(b, (start, self.count), true);
        }
    }
}
