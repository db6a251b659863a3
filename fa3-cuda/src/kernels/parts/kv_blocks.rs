//! The KV blocks that a tile visits, in descending or ascending order. Some of them need the mask.

use fa3_ir::lang::*;
use fa3_sched::{FastDiv, KvRange, num_ranges};
use fa3_types::Mask;

use super::block_column::BlockColumn;
use super::block_words::BlockWords;
use super::intervals::load_words;
use super::seen::SeenKeys;

/// The KV blocks that a tile visits.
pub(crate) struct KvBlocks<'k> {
    builder: &'k Builder,
    kv: KvRange<U32<'k>>,
    /// Number of blocks.
    pub(crate) count: U32<'k>,
    /// Number of keys of a block.
    keys: u32,
    /// Whether blocks consist of list entries, of which no mask hides any.
    are_listed: bool,
    /// Number of keys of a piece, if blocks are told that they begin a piece.
    piece: Option<FastDiv<U32<'k>>>,
    /// Whether every block needs the mask.
    are_masked: bool,
    /// Whether the mask has a left side, and whether it has a right side.
    left: bool,
    right: bool,
    /// The shared-memory address of the tile's ranges, and the number of ranges, under a mask of intervals.
    ranges: Option<(U32<'k>, u32)>,
    /// The words that say which of the blocks are visited. The last one is.
    words: Option<BlockWords<'k>>,
}

/// A KV block.
pub(crate) struct KvBlock<'k> {
    /// The block's first key.
    pub(crate) key: U32<'k>,
    /// Whether the mask may hide some key of the block from some row.
    pub(crate) masked: bool,
    /// Whether the block is the last one that the tile visits.
    pub(crate) last: V<'k, Pred>,
    /// Whether the warpgroup's rows see the block, if each warpgroup has its own list.
    pub(crate) own: Option<V<'k, Pred>>,
    /// Which of a tile's blocks of keys see the block, if it is a block of rows and each warpgroup has its own list.
    pub(crate) columns: Option<U32<'k>>,
    /// Which of its keys exist, if keys are listed and this is known already.
    pub(crate) seen: Option<SeenKeys<'k>>,
    /// Whether a tile visits it first of a piece, if blocks are in pieces of a fixed size: the last block of the piece,
    /// or the first one in a list.
    pub(crate) begins_piece: Option<V<'k, Pred>>,
}

impl<'k> KvBlocks<'k> {
    /// The blocks that a tile visits, given their range `kv`, `keys` keys per block, and the mask.
    #[track_caller]
    pub(crate) fn of(b: &'k Builder, kv: KvRange<U32<'k>>, keys: u32, mask: Mask) -> KvBlocks<'k> {
        let (left, right) = mask.reach();
        let count = kv.end - kv.first;
        // Intervals may hide keys on either side. Blocks do not hide some of their keys.
        let both = mask.bounds().is_some();
        let (left, right) = (both || left.is_some(), both || right.is_some());
        KvBlocks {
            builder: b,
            kv,
            count,
            keys,
            are_listed: false,
            piece: None,
            are_masked: false,
            left,
            right,
            ranges: None,
            words: None,
        }
    }

    /// The blocks in the ranges at shared-memory address `at`, if there is one. `kv` then counts steps.
    pub(crate) fn in_ranges(self, at: Option<U32<'k>>, mask: Mask) -> KvBlocks<'k> {
        let count = mask.intervals().map_or(0, |form| num_ranges(form.of_row.count()) as u32);
        KvBlocks { ranges: at.map(|at| (at, count)), ..self }
    }

    /// The blocks that these words show.
    pub(crate) fn with_words(self, words: Option<BlockWords<'k>>) -> KvBlocks<'k> {
        KvBlocks { words, ..self }
    }

    /// These blocks, all of which need the mask.
    pub(crate) fn all_masked(self) -> KvBlocks<'k> {
        KvBlocks { are_masked: true, ..self }
    }

    /// These blocks, of which the intervals hide keys from `key` on alone. The mask beside them is `mask`.
    #[track_caller]
    pub(crate) fn masked_from(self, key: U32<'k>, mask: Mask) -> KvBlocks<'k> {
        let keys = FastDiv::new(self.keys).map(|number| self.builder.value(number));
        let unmasked_end = self.kv.unmasked_end.min(keys.quotient(key)).max(self.kv.unmasked_first);
        let (left, _) = mask.reach();
        KvBlocks { kv: KvRange { unmasked_end, ..self.kv }, left: left.is_some(), ..self }
    }

    /// These blocks, which consist of list entries if `are_listed`.
    pub(crate) fn listed(self, are_listed: bool) -> KvBlocks<'k> {
        KvBlocks { are_listed, ..self }
    }

    /// These blocks, in pieces of `piece` keys, which are counted from the first key.
    pub(crate) fn in_pieces(self, piece: Option<FastDiv<U32<'k>>>) -> KvBlocks<'k> {
        KvBlocks { piece, ..self }
    }

    /// The block that is visited after `step` other blocks. It counts as masked, because it may need the mask.
    #[track_caller]
    pub(crate) fn at(&self, step: u32) -> KvBlock<'k> {
        if let Some((at, _)) = self.ranges {
            let [_, _, top, count] = load_words(self.builder, at);
            return self.step(self.builder.value(step), [top, count], true);
        }
        self.block(self.kv.end - (step + 1), true)
    }

    #[track_caller]
    fn block(&self, index: U32<'k>, masked: bool) -> KvBlock<'k> {
        let masked = masked && !self.are_listed;
        let begins_piece = self.piece.map(|piece| {
            // A list is visited from its first block on.
            let end = if self.are_listed { self.kv.end - 1 - index } else { index + 1 };
            piece.div_rem(end * self.keys).1.eq(0)
        });
        let (key, first) = (index * self.keys, self.kv.first);
        let last = match self.words {
            None => index.eq(first),
            Some(words) => words.end_below(index, first).le(first),
        };
        KvBlock { key, masked, last, own: None, columns: None, seen: None, begins_piece }
    }

    /// The block of step `step`, in a range whose top is `top`, of a tile that visits `count` blocks.
    #[track_caller]
    fn step(&self, step: U32<'k>, [top, count]: [U32<'k>; 2], masked: bool) -> KvBlock<'k> {
        KvBlock {
            key: (top - step) * self.keys,
            masked,
            last: (step + 1).eq(count),
            own: None,
            columns: None,
            seen: None,
            begins_piece: None,
        }
    }

    /// Runs `body` for every block but the first `from`, range by range. With `are_told_apart`, `body` is built twice:
    /// once for blocks that need the mask, and once for the others.
    #[track_caller]
    fn for_each_range(
        &self,
        (at, ranges): (U32<'k>, u32),
        from: u32,
        are_told_apart: bool,
        mut body: impl FnMut(KvBlock<'k>),
    ) {
        let b = self.builder;
        let next = b.var("step", from);
        b.for_each((0, ranges), 1, |number| {
            let [masked_end, plain_end, top, count] = load_words(b, number.mad(16, at));
            let parts = [are_told_apart.then_some((masked_end, true)), Some((plain_end, false))];
            for (end, masked) in parts.into_iter().flatten() {
                b.repeat(|| {
                    b.break_if(next.now().ge(end));
                    let step = next.get();
                    body(self.step(step, [top, count], masked));
                    next.set(step + 1);
                });
            }
        });
    }

    /// Runs `body` for every block that `words` show, but the first `from`. With `are_told_apart`, `body` is built up
    /// to three times, as for other blocks.
    #[track_caller]
    fn for_each_seen(
        &self,
        words: BlockWords<'k>,
        from: u32,
        are_told_apart: bool,
        mut body: impl FnMut(KvBlock<'k>),
    ) {
        let (b, KvRange { first, unmasked_first, unmasked_end, end }) = (self.builder, self.kv);
        let end = if from == 0 { end } else { words.end_below(end - 1, first) };
        let next = b.var("end", end);
        let all = [(self.right || from == 0, unmasked_end), (true, unmasked_first), (self.left, first)];
        let parts = all.into_iter().zip([true, false, true]);
        let parts = parts.filter(|((is_there, _), masked)| if are_told_apart { *is_there } else { !masked });
        for ((_, bound), masked) in parts {
            let bound = if are_told_apart { bound } else { first };
            b.repeat(|| {
                let end = next.get();
                b.break_if(end.le(bound));
                let following = words.end_below(end - 1, first);
                next.set(following);
                let (key, last) = ((end - 1) * self.keys, following.le(first));
                body(KvBlock {
                    key,
                    masked,
                    last,
                    own: words.is_own(end),
                    columns: None,
                    seen: None,
                    begins_piece: None,
                });
            });
        }
    }

    /// The first key of the block that is visited first, if there is one.
    #[track_caller]
    pub(crate) fn first_key(&self) -> U32<'k> {
        if self.words.is_some() { (self.kv.end - 1) * self.keys } else { self.at(0).key }
    }

    /// Runs `body`, which applies no mask, for every block but the first `from`. Blocks must be in ranges, or words
    /// show them.
    #[track_caller]
    pub(crate) fn for_each_unmasked(&self, from: u32, body: impl FnMut(KvBlock<'k>)) {
        if let Some(words) = self.words {
            return self.for_each_seen(words, from, false, body);
        }
        let ranges = self.ranges.expect("blocks are in ranges");
        self.for_each_range(ranges, from, false, body);
    }

    /// Runs `body` for every block, or for the blocks that `column` shows, in ascending order. It is built up to three
    /// times: for blocks at the mask's left side, for blocks that all rows see, and for blocks at the right side and at
    /// the keys' end.
    #[track_caller]
    pub(crate) fn for_each_upwards(
        &self,
        column: Option<BlockColumn<'k>>,
        mut body: impl FnMut(KvBlock<'k>),
    ) {
        let KvRange { first, unmasked_first, unmasked_end, end } = self.kv;
        let mut phase = |blocks: (U32<'k>, U32<'k>), masked: bool| {
            let body = |index| {
                let columns = column.and_then(|column| column.each(index));
                body(KvBlock { columns, ..self.block(index, masked) });
            };
            match column {
                None => self.builder.for_each(blocks, 1, body),
                Some(column) => column.for_each(blocks, body),
            }
        };
        if self.left {
            phase((first, unmasked_first), true);
        }
        phase((unmasked_first, unmasked_end), false);
        phase((unmasked_end, end), true);
    }

    /// Runs `body` for every block but the first `from`, in descending order. It is built up to three times: for blocks
    /// at the mask's right side and at the keys' end (which only the first block reaches), for blocks that all rows
    /// see, and for blocks at the left side.
    #[track_caller]
    pub(crate) fn for_each(&self, from: u32, mut body: impl FnMut(KvBlock<'k>)) {
        if let Some(ranges) = self.ranges {
            return self.for_each_range(ranges, from, true, body);
        }
        if let Some(words) = self.words {
            return self.for_each_seen(words, from, true, body);
        }
        let KvRange { first: _, unmasked_first, unmasked_end, end } = self.kv;
        let mut phase = |steps: (U32<'k>, U32<'k>), masked: bool| {
            self.builder.for_each(steps, 1, |step| body(self.block(end - step - 1, masked)));
        };
        if self.are_masked {
            return phase((self.builder.copy(from), self.count), true);
        }
        let (right, left) = (end - unmasked_end, end - unmasked_first);
        if self.right || from == 0 {
            phase((self.builder.copy(from), right), true);
        }
        phase((right.max(from), left), false);
        if self.left {
            phase((left.max(from), self.count), true);
        }
    }
}
