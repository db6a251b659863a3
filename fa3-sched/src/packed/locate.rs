//! Finds the row block and head of a tile by its number, given the record of its sequence.

use super::SequenceRecord;
use crate::{FastDiv, Int, Longest};

/// How the heads of a sequence are numbered: in sections of equal size, one section's tiles after another's.
///
/// K and V of a section's heads stay in the L2 cache while its tiles run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections<T> {
    heads: FastDiv<T>,
    section: FastDiv<T>,
}

/// A tile within its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceTile<T> {
    /// The block of tile_m rows within the sequence.
    pub m_block: T,
    /// The query head.
    pub head: T,
}

impl Sections<u32> {
    /// Sections of `section` query heads, which must divide `heads`.
    ///
    /// # Panics
    /// If `section` does not divide `heads`.
    pub fn new(heads: u32, section: u32) -> Sections<u32> {
        assert!(section > 0 && heads.is_multiple_of(section), "sections of {section} of {heads} heads");
        Sections { heads: FastDiv::new(heads), section: FastDiv::new(section) }
    }
}

impl<T> Sections<T> {
    /// Applies `f` to each number of this value, by name, in a fixed order.
    pub fn map_named<U>(self, f: &mut impl FnMut(&str, T) -> U) -> Sections<U> {
        Sections {
            heads: self.heads.map_named("table_heads", f),
            section: self.section.map_named("table_section", f),
        }
    }
}

impl<T: Int> Sections<T> {
    /// The row block, counted over all sequences, whose record the kernel reads for tile `number`. The tile itself may
    /// be another row block of that sequence.
    pub fn block(&self, number: T) -> T {
        self.heads.quotient(number)
    }

    /// Number of tiles of `blocks` row blocks.
    pub fn tiles(&self, blocks: T) -> T {
        blocks * self.heads.divisor()
    }
}

/// Tile `number`, in the sequence with this `record`. The tiles of a section of heads go from one end of the sequence
/// to the other, starting from `longest`. For each row block, they go through all heads of the section.
pub fn locate<T: Int>(
    number: T,
    record: &SequenceRecord<T>,
    sections: &Sections<T>,
    longest: Longest,
) -> SequenceTile<T> {
    let within = number.sub_sat(sections.tiles(record.first_block));
    let of_section = record.blocks.at_least(number.lit(1)) * sections.section.divisor();
    let section = within.div(of_section);
    let (block, head) = sections.section.div_rem(within.sub_sat(section * of_section));
    let m_block = match longest {
        Longest::First => block,
        Longest::Last => record.blocks.sub_sat(block + number.lit(1)),
    };
    SequenceTile { m_block, head: section * sections.section.divisor() + head }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record(first_block: u32, blocks: u32) -> SequenceRecord<u32> {
        SequenceRecord { q_row: 0, q_rows: 0, q_len: 0, k_row: 0, k_len: 0, first_block, blocks, sequence: 0 }
    }

    proptest! {
        /// Each row block of each head is one tile, and the tile's index leads to the record of its sequence.
        #[test]
        fn tiles_are_all_row_blocks_of_all_heads(
            blocks in proptest::collection::vec(0_u32..9, 1..6), section in 1_u32..5, sections in 1_u32..4,
            longest in prop_oneof![Just(Longest::First), Just(Longest::Last)],
        ) {
            let heads = section * sections;
            let by = Sections::new(heads, section);
            let mut first = 0;
            let records: Vec<_> = blocks.iter().map(|&blocks| {
                first += blocks;
                record(first - blocks, blocks)
            }).collect();
            let mut found = Vec::new();
            for number in 0..by.tiles(first) {
                let block = by.block(number);
                let at = records.iter().position(|r| (r.first_block..r.first_block + r.blocks).contains(&block));
                let at = at.unwrap();
                let SequenceTile { m_block, head } = locate(number, &records[at], &by, longest);
                found.push((at, m_block, head));
            }
            let mut all: Vec<_> = blocks.iter().enumerate().flat_map(|(at, &blocks)| {
                (0..blocks).flat_map(move |m_block| (0..heads).map(move |head| (at, m_block, head)))
            }).collect();
            // The heads of a section come before the heads of the next section.
            prop_assert!(found.windows(2).all(|two| (two[0].0, two[0].2 / section) <= (two[1].0, two[1].2 / section)));
            found.sort_unstable();
            all.sort_unstable();
            prop_assert_eq!(found, all);
        }
    }
}
