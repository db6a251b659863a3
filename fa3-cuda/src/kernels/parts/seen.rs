//! Which keys of a block of lists exist: copying warps say so, and consumers hide the scores of all others.
//!
//! The copying warps store a word for each key beside the block. A consumer warp reads two neighbouring words in each
//! lane, and two ballots make bits of them:
//!
//! ```text
//! lane               0      1      2            31
//! keys              0, 1   2, 3   4, 5  ..    62, 63
//!
//! a thread's keys in a fragment   8 i + 2 (lane mod 4) and the next one: bits 4 i + lane mod 4 of the two ballots
//! ```

use std::cell::RefCell;

use fa3_ir::lang::*;

use super::pages::NOWHERE;

/// Warps of a CTA that copy rows.
pub(crate) const COPIERS: u32 = 3;

/// Keys of which a warp reads words at once.
const AT_ONCE: u32 = 64;

/// The pipeline of words from the copying warps to consumers.
pub(crate) struct Seen<'k>(&'k Builder, Pipeline<'k, 1>);

/// A copying warp's end of the pipeline.
pub(crate) struct SeenProducer<'k>(&'k Builder, Producer<'k, 1>);

/// A consumer's end of the pipeline.
pub(crate) struct SeenConsumer<'k>(&'k Builder, RefCell<Consumer<'k, 1>>);

/// Bits of the keys of a block that exist: for each 64 keys, bit 4 i is for the first and for the second of a thread's
/// keys of each eight, and the last number has all bits of all keys if all exist.
pub(crate) struct SeenKeys<'k> {
    words: Vec<[U32<'k>; 2]>,
    are_all: V<'k, Pred>,
}

impl<'k> Seen<'k> {
    /// Declares the pipeline, for blocks of `keys` keys, which `consumers` warps read.
    #[track_caller]
    pub(crate) fn declare(b: &'k Builder, keys: u32, [stages, consumers]: [u32; 2]) -> Seen<'k> {
        let words = TileShape::new(Elem::U32, keys / 4, 4);
        Seen(b, b.stored_pipeline("seen", stages, [COPIERS, consumers], [("seen", words)]))
    }

    #[track_caller]
    pub(crate) fn producer_by(&self, rounds: Rounds<'k>) -> SeenProducer<'k> {
        SeenProducer(self.0, self.1.producer_by(rounds))
    }

    #[track_caller]
    pub(crate) fn consumer(&self) -> SeenConsumer<'k> {
        SeenConsumer(self.0, RefCell::new(self.1.consumer()))
    }
}

impl<'k> SeenProducer<'k> {
    /// Says which keys of the next block exist: each thread has a few keys' numbers in the block and their rows of
    /// memory, which are [`NOWHERE`] if they do not exist. Numbers beyond the block are left out.
    #[track_caller]
    pub(super) fn store(&mut self, rows: impl Iterator<Item = (U32<'k>, U32<'k>)>) {
        let b = self.0;
        let stage = self.1.acquire();
        let [tile] = stage.tiles();
        let (keys, words) = (4 * tile.shape().rows, tile.element(0, 0));
        for (key, row) in rows {
            b.guarded(key.lt(keys), || b.store(key.mad(4, words), row));
        }
        stage.commit_unfenced();
    }
}

impl<'k> SeenConsumer<'k> {
    /// Waits until it is known which keys of the next block exist.
    #[track_caller]
    pub(crate) fn wait(&self) -> SeenKeys<'k> {
        let b = self.0;
        let stage = self.1.borrow_mut().wait();
        let keys = 4 * stage.tile().shape().rows;
        let words = b.lane_id().mad(8, stage.tile().element(0, 0));
        let ballots = (0..keys / AT_ONCE).map(|nth| {
            let rows: [U32<'k>; 2] = b.load_vector(words.at(4 * (AT_ONCE * nth) as i32));
            rows.map(|row| row.ne(NOWHERE).ballot())
        });
        let ballots: Vec<_> = ballots.collect();
        stage.release_unfenced();
        let all = ballots.iter().flatten().copied().reduce(|all, word| all & word);
        let are_all = all.unwrap_or_else(|| b.value(u32::MAX)).eq(u32::MAX);
        let first = b.lane_id() & 3;
        SeenKeys {
            words: ballots.into_iter().map(|words| words.map(|word| word >> first)).collect(),
            are_all,
        }
    }
}

impl<'k> SeenKeys<'k> {
    /// Hides the scores of keys that do not exist.
    #[track_caller]
    pub(crate) fn hide(&self, s: &mut Frag<'k>) {
        let b = s.builder();
        b.if_uniform(!self.are_all, || {
            s.map_in_place(|score, at| {
                let word = self.words[(at.col / AT_ONCE) as usize][(at.col % 2) as usize];
                let bit = 1 << (at.col % AT_ONCE / 8 * 4);
                (word & bit).ne(0).select(score, f32::NEG_INFINITY)
            });
        });
    }
}
