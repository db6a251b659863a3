//! The message about a work tile, which the producer sends to the other warps of its CTA (CUTLASS: `WorkTileInfo`).

use fa3_ir::lang::*;
use fa3_sched::{KvRange, SeqLens, Tiling};

use super::geometry::{Varlen, WorkTile};

/// A word of the message, by its index. A word has 4 bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    Batch,
    QRow,
    KRow,
    QLen,
    KLen,
    QRows,
    Head,
    Row,
    KvFirst,
    KvUnmaskedFirst,
    KvUnmaskedEnd,
    KvEnd,
    /// The word that only some schedulers send: [`Varlen::padded_row`] or [`WorkTile::out`].
    Extra,
}

/// A work tile of a sequence that is looked up in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct WorkTileInfo<T> {
    pub(super) batch: T,
    pub(super) q_row: T,
    pub(super) k_row: T,
    pub(super) lens: SeqLens<T>,
    pub(super) q_rows: T,
    pub(super) head: T,
    pub(super) row: T,
    pub(super) kv: KvRange<T>,
}

impl Word {
    /// The words that every message has, in their order.
    pub(super) const ALL: [Word; 12] = [
        Word::Batch,
        Word::QRow,
        Word::KRow,
        Word::QLen,
        Word::KLen,
        Word::QRows,
        Word::Head,
        Word::Row,
        Word::KvFirst,
        Word::KvUnmaskedFirst,
        Word::KvUnmaskedEnd,
        Word::KvEnd,
    ];

    /// Offset of the word in bytes.
    pub(super) fn offset(self) -> i32 {
        4 * self as i32
    }
}

impl<'k> WorkTileInfo<U32<'k>> {
    /// Passes each word of the message to `store`.
    #[track_caller]
    pub(super) fn store(self, store: impl Fn(Word, U32<'k>)) {
        let WorkTileInfo { batch, q_row, k_row, lens, q_rows, head, row, kv } = self;
        let KvRange { first, unmasked_first, unmasked_end, end } = kv;
        let words = [batch, q_row, k_row, lens.q, lens.k, q_rows, head, row];
        let words = words.into_iter().chain([first, unmasked_first, unmasked_end, end]);
        Word::ALL.into_iter().zip(words).for_each(|(word, value)| store(word, value));
    }

    /// Passes the words of the last message, which follows all work tiles, to `store`. Its tile has no rows.
    #[track_caller]
    pub(super) fn store_end(zero: impl Fn() -> U32<'k>, has_extra: bool, store: impl Fn(Word, U32<'k>)) {
        let words = Word::ALL.into_iter().chain(has_extra.then_some(Word::Extra));
        words.for_each(|word| store(word, zero()));
    }

    /// Makes the message of the words that `load` gives.
    #[track_caller]
    pub(super) fn load(load: impl Fn(Word) -> U32<'k>) -> WorkTileInfo<U32<'k>> {
        let [batch, q_row, k_row, q_len, k_len, q_rows, head, row, first, unmasked_first, unmasked_end, end] =
            Word::ALL.map(load);
        let (lens, kv) =
            (SeqLens { q: q_len, k: k_len }, KvRange { first, unmasked_first, unmasked_end, end });
        WorkTileInfo { batch, q_row, k_row, lens, q_rows, head, row, kv }
    }

    /// The work tile that the message describes.
    #[track_caller]
    pub(super) fn work(self, tiling: &Tiling<U32<'k>>) -> WorkTile<'k> {
        let WorkTileInfo { batch, q_row, k_row, lens, q_rows, head, row, kv } = self;
        let varlen = Some(Varlen { q_row, q_rows, k_row, padded_row: None });
        let kv_head = tiling.kv_head(head);
        WorkTile { batch, head, kv_head, lens, row, kv, ranges: None, out: None, varlen }
    }
}
