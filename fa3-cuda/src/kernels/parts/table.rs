//! The table of a launch's sequences: from a tile's number to its work, by two loads that depend on each other.

use fa3_ir::lang::*;
use fa3_sched::packed::{HEADER, Located, Record, Sections, locate};
use fa3_sched::{KvRange, Lens, Longest, Tiling};
use fa3_types::Mask;

use super::geometry::{Listed, Work};
use crate::kernels::params::{Form, InKernel, Pass, Side};

/// Words of a work, as it is sent from one warp to others.
pub(crate) const WORDS: i32 = 12;

/// Bytes of a word.
const WORD: u32 = 4;

/// A table in memory, and the numbers of a launch that turn its records into work.
#[derive(Clone, Copy)]
pub(crate) struct Table<S: Side> {
    /// Its address.
    pub(crate) address: S::Pointer,
    /// How many sequences it has; a record more.
    pub(crate) sequences: S::U32,
    /// How heads are numbered.
    pub(crate) sections: Sections<S::U32>,
    /// How matrices are cut.
    pub(crate) tiling: Tiling<S::U32>,
    /// Where the longest tiles of a sequence are.
    pub(crate) longest: Longest,
}

impl Table<Form> {
    /// The form of all launches with this mask.
    pub(crate) fn form(longest: Longest, mask: Mask) -> Table<Form> {
        Table {
            address: Elem::U32,
            sequences: (),
            sections: Sections::new(1, 1).map_named(&mut |_, _| ()),
            tiling: Tiling::new(1, 1, 1, mask).map(|_| ()),
            longest,
        }
    }
}

impl<A: Side> Table<A> {
    /// Goes over its numbers.
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> Table<B> {
        Table {
            address: by.pointer("table", self.address),
            sequences: by.u32("sequences", self.sequences),
            sections: self.sections.map_named(&mut |name: &str, number| by.u32(name, number)),
            tiling: self.tiling.map_named(&mut |name: &str, number| by.u32(name, number)),
            longest: self.longest,
        }
    }
}

impl<'k> Table<InKernel<'k>> {
    /// Loads how many tiles there are.
    #[track_caller]
    pub(crate) fn tiles(&self, b: &'k Builder) -> V<'k, B32> {
        self.sections.tiles(b.load(self.address))
    }

    /// Looks up tile `number`, which must be one of the table's. Gives the words of its work to `write`, each with its
    /// number, as soon as they are known.
    #[track_caller]
    pub(crate) fn look_up(&self, b: &'k Builder, number: V<'k, B32>, write: impl Fn(i32, V<'k, B32>)) {
        let (records, bytes) = ((HEADER * WORD) as i32, Record::<u32>::WORDS * WORD);
        // Behind all records are the numbers of those that row blocks have.
        let numbers = (self.sequences + 1).mad_wide(bytes, self.address);
        let at: V<'k, B32> = b.load(self.sections.block(number).mad_wide(WORD, numbers).at(records));
        let at = at.mad_wide(bytes, self.address);
        let [[q_row, q_rows, q_len, k_row], [k_len, first_block, blocks, sequence]] =
            [0, 16].map(|half| b.load_vector(at.at(records + half)));
        let record = Record { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence };
        for (word, number) in [sequence, q_row, k_row, q_len, k_len, q_rows].into_iter().zip(0..) {
            write(number, word);
        }
        let Located { m_block, head } = locate(number, &record, &self.sections, self.longest);
        write(6, head);
        write(7, m_block * self.tiling.tile_m());
        let kv = self.tiling.kv_range(m_block, Lens { q: q_len, k: k_len });
        for (word, number) in [kv.first, kv.unmasked_first, kv.unmasked_end, kv.end].into_iter().zip(8..) {
            write(number, word);
        }
    }

    /// The work of which `read` gives each word, by its number.
    #[track_caller]
    pub(crate) fn work(&self, read: impl Fn(i32) -> V<'k, B32>) -> Work<V<'k, B32>> {
        let [batch, q_row, k_row, q_len, k_len, q_rows, head, row, first, unmasked_first, unmasked_end, end] =
            std::array::from_fn::<_, { WORDS as usize }, _>(|number| read(number as i32));
        Work {
            batch,
            head,
            kv_head: self.tiling.kv_head(head),
            lens: Lens { q: q_len, k: k_len },
            row,
            kv: KvRange { first, unmasked_first, unmasked_end, end },
            listed: Some(Listed { q_row, q_rows, k_row }),
        }
    }
}
