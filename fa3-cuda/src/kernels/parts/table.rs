//! The table of a launch's sequences (varlen scheduler). Two dependent loads turn a tile index into a work tile.

use fa3_ir::BufferId;
use fa3_ir::lang::*;
use fa3_sched::packed::{HEADER, Sections, SequenceRecord, SequenceTile, Tiles, locate};
use fa3_sched::{KvRange, Longest, Order, SeqLens, Tiling};
use fa3_types::Mask;

use super::geometry::{Varlen, WorkTile};
use super::work_tile_info::{Word, WorkTileInfo};
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, copies, param, params};

/// Bytes of a word.
const WORD: u32 = 4;

/// Bytes of a record.
const RECORD: u32 = SequenceRecord::<u32>::WORDS * WORD;

/// The offset of the first record.
const RECORDS: i32 = (HEADER * WORD) as i32;

params! {
    /// A table in memory, and the numbers of a launch that turn its records into work tiles.
    struct Table {
        address: pointer = "table",
        /// Number of sequences. The table has one more record, for the rows behind the last sequence.
        sequences: u32,
        /// The order of heads.
        sections: numbers Sections,
        /// The tile sizes and the mask.
        tiling: numbers Tiling,
        /// The end of a sequence, first or last, at which the longest tiles are.
        longest: fixed Longest,
        /// The positions of rows of Q in arrays that pad each sequence to whole blocks, in kernels with such arrays.
        padded: maybe all PaddedRows,
        /// The limits of a table that a caller gives, which may hold any numbers.
        within: maybe all Within,
    }

    /// The limits to which a table's numbers are clamped, so that no table makes a kernel leave the tensors.
    struct Within {
        /// Number of row blocks for which the table has room.
        blocks: u32 = "table_blocks",
        /// Number of rows of Q and of K, over all packed sequences.
        rows_q: u32 = "table_rows_q",
        rows_k: u32 = "table_rows_k",
    }
}

copies!(Table, Within);

/// The positions of rows of Q in arrays that pad each sequence to whole blocks. No two sequences share a position.
#[derive(Clone, Copy)]
pub(crate) enum PaddedRows<S: Side> {
    /// The table's blocks are blocks of rows, and the arrays have the same blocks in the same order.
    OfBlocks,
    /// The table's blocks are blocks of keys. An array has the first position of each sequence.
    Firsts {
        /// The array, in the order of sequences.
        firsts: S::Pointer,
        /// Number of positions. Rows at later positions are left out.
        most: S::U32,
    },
}

impl Table<Form> {
    /// The parameters that all launches with this order and mask share.
    pub(crate) fn form(order: Order, mask: Mask, padded: Option<PaddedRows<Form>>) -> Table<Form> {
        let longest = match order {
            // All tiles have equal lengths.
            Order::Linear => Longest::First,
            Order::LongestFirst { section: _, longest } => longest,
        };
        Table {
            address: Elem::U32,
            sequences: (),
            sections: Sections::new(1, 1).map_named(&mut |_, _| ()),
            tiling: Tiling::new(1, 1, 1, mask).map(|_| ()),
            longest,
            padded,
            within: None,
        }
    }

    /// The parameters of a table that a caller gives.
    pub(crate) fn given(self) -> Table<Form> {
        Table { within: Some(Within { blocks: (), rows_q: (), rows_k: () }), ..self }
    }
}

impl Table<Host> {
    /// The arguments of a launch for a table.
    pub(crate) fn of(
        tiles: &Tiles,
        address: BufferId,
        tiling: Tiling<u32>,
        padded: Option<PaddedRows<Host>>,
    ) -> Table<Host> {
        let (sequences, sections, longest) = (tiles.table().count(), tiles.sections(), tiles.longest());
        Table { address, sequences, sections, tiling, longest, padded, within: None }
    }

    /// The arguments of a launch for a table that the caller gives.
    pub(crate) fn given(self, tiles: &Tiles) -> Table<Host> {
        let (blocks, sides) = (tiles.table().capacity(), [tiles.table().q(), tiles.table().k()]);
        let [rows_q, rows_k] = sides.map(|side| side.rows as u32);
        Table { within: Some(Within { blocks, rows_q, rows_k }), ..self }
    }
}

impl<A: Side> PaddedRows<A> {
    #[track_caller]
    fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> PaddedRows<B> {
        match self {
            PaddedRows::OfBlocks => PaddedRows::OfBlocks,
            PaddedRows::Firsts { firsts, most } => PaddedRows::Firsts {
                firsts: by.pointer("first_places", firsts),
                most: by.u32("padded", most),
            },
        }
    }
}

impl<'k> Table<InKernel<'k>> {
    /// Loads the number of tiles.
    #[track_caller]
    pub(crate) fn tiles(&self, b: &'k Builder) -> U32<'k> {
        let blocks = b.load(self.address);
        self.sections.tiles(self.within.map_or(blocks, |within| blocks.min(within.blocks)))
    }

    /// Loads the record of tile `number`, which must be in the table, and the padded position of its first row.
    #[track_caller]
    pub(crate) fn record(
        &self,
        b: &'k Builder,
        number: U32<'k>,
    ) -> (SequenceRecord<U32<'k>>, Option<U32<'k>>) {
        // An array behind all records has the index of the record of each row block.
        let numbers = (self.sequences + 1).mad_wide(RECORD, self.address);
        let at: U32<'k> = b.load(self.sections.block(number).mad_wide(WORD, numbers).at(RECORDS));
        self.record_at(b, self.within.map_or(at, |_| at.min(self.sequences)))
    }

    /// Loads the record `at`, and the padded position of its first row.
    #[track_caller]
    pub(crate) fn record_at(
        &self,
        b: &'k Builder,
        at: U32<'k>,
    ) -> (SequenceRecord<U32<'k>>, Option<U32<'k>>) {
        let at = at.mad_wide(RECORD, self.address);
        let [[q_row, q_rows, q_len, k_row], [k_len, first_block, blocks, sequence]] =
            [0, 16].map(|half| b.load_vector(at.at(RECORDS + half)));
        let record = SequenceRecord { q_row, q_rows, q_len, k_row, k_len, first_block, blocks, sequence };
        let record = self.within.map_or(record, |within| within.cut(record, self.sequences));
        match self.padded {
            None => (record, None),
            Some(PaddedRows::OfBlocks) => (record, Some(first_block * self.tiling.tile_m())),
            Some(PaddedRows::Firsts { firsts, most }) => {
                let padded_row = b.load(sequence.mad_wide(WORD, firsts));
                (SequenceRecord { k_len: k_len.min(most - padded_row), ..record }, Some(padded_row))
            }
        }
    }

    /// The block and the head of tile `number`, which must belong to `record`.
    #[track_caller]
    pub(crate) fn locate(&self, number: U32<'k>, record: &SequenceRecord<U32<'k>>) -> SequenceTile<U32<'k>> {
        let located = locate(number, record, &self.sections, self.longest);
        self.within.map_or(located, |within| SequenceTile {
            m_block: located.m_block.min(within.blocks),
            // The number of heads is the number of tiles of one row block.
            head: located.head.min(self.sections.tiles(number.constant(1)) - 1),
        })
    }

    /// Looks up tile `number`, which must be in the table. Passes each word of its work tile to `write` as soon as the
    /// word is known.
    #[track_caller]
    pub(super) fn look_up(&self, b: &'k Builder, number: U32<'k>, write: impl Fn(Word, U32<'k>)) {
        let (record, padded_row) = self.record(b, number);
        let SequenceRecord { q_row, q_rows, q_len, k_row, k_len, sequence, .. } = record;
        write(Word::Batch, sequence);
        write(Word::QRow, q_row);
        write(Word::KRow, k_row);
        write(Word::QLen, q_len);
        write(Word::KLen, k_len);
        write(Word::QRows, q_rows);
        if let Some(padded_row) = padded_row {
            write(Word::Extra, padded_row);
        }
        let SequenceTile { m_block, head } = self.locate(number, &record);
        write(Word::Head, head);
        write(Word::Row, m_block * self.tiling.tile_m());
        let kv = self.tiling.kv_range(m_block, SeqLens { q: q_len, k: k_len });
        write(Word::KvFirst, kv.first);
        write(Word::KvUnmaskedFirst, kv.unmasked_first);
        write(Word::KvUnmaskedEnd, kv.unmasked_end);
        write(Word::KvEnd, kv.end);
    }

    /// Tile `number`, which must be in the table, and the location of its sequence. It visits no block yet.
    #[track_caller]
    pub(super) fn tile(&self, b: &'k Builder, number: U32<'k>) -> (WorkTile<'k>, Varlen<U32<'k>>) {
        let (record, padded_row) = self.record(b, number);
        let SequenceRecord { q_row, q_rows, q_len, k_row, k_len, sequence, .. } = record;
        let SequenceTile { m_block, head } = self.locate(number, &record);
        let (row, lens) = (m_block * self.tiling.tile_m(), SeqLens { q: q_len, k: k_len });
        let varlen = Varlen { q_row, q_rows, k_row, padded_row };
        (self.work_of([sequence, head, row], lens, varlen), varlen)
    }

    /// The tile of these lengths that begins with row `row` of a sequence. It visits no block yet.
    #[track_caller]
    pub(super) fn work_of(
        &self,
        [batch, head, row]: [U32<'k>; 3],
        lens: SeqLens<U32<'k>>,
        varlen: Varlen<U32<'k>>,
    ) -> WorkTile<'k> {
        let (kv_head, zero) = (self.tiling.kv_head(head), batch.constant(0));
        let kv = KvRange { first: zero, unmasked_first: zero, unmasked_end: zero, end: zero };
        WorkTile { batch, head, kv_head, lens, row, kv, ranges: None, out: None, varlen: Some(varlen) }
    }

    /// The work tile that a message describes; `read` gives the message's words.
    #[track_caller]
    pub(super) fn work(&self, read: impl Fn(Word) -> U32<'k>) -> WorkTile<'k> {
        let work = WorkTileInfo::load(&read).work(&self.tiling);
        let padded_row = self.padded.map(|_| read(Word::Extra));
        WorkTile { varlen: work.varlen.map(|varlen| Varlen { padded_row, ..varlen }), ..work }
    }
}

impl<'k> Within<InKernel<'k>> {
    /// Clamps a record of a table of `sequences` sequences to rows that the tensors have.
    #[track_caller]
    fn cut(&self, record: SequenceRecord<U32<'k>>, sequences: U32<'k>) -> SequenceRecord<U32<'k>> {
        // There is at least one row, because a work tile without rows would end the consumers' loops. Q has a row,
        // because there is a launch.
        let q_row = record.q_row.min(self.rows_q - 1);
        let q_rows = record.q_rows.max(1).min(self.rows_q - q_row);
        let k_row = record.k_row.min(self.rows_k);
        // Rows behind all sequences see no key.
        let is_one = record.sequence.lt(sequences);
        SequenceRecord {
            q_row,
            q_rows,
            q_len: record.q_len.min(q_rows),
            k_row,
            k_len: is_one.select(record.k_len.min(self.rows_k - k_row), 0),
            first_block: record.first_block.min(self.blocks),
            blocks: record.blocks.min(self.blocks),
            sequence: record.sequence.min(sequences),
        }
    }
}

#[cfg(test)]
mod tests {
    use fa3_ir::{BufferRole, Passed, Program};
    use fa3_sched::packed::{LengthArrays, Plan, Side};
    use fa3_sim::{Mode, ProgramSimulation};
    use proptest::prelude::*;

    use super::*;
    use crate::kernels::params::{Declare, Fill, Filled};

    const TILE: [u32; 2] = [64, 32];
    const WORDS: usize = Word::ALL.len();

    /// The words of each work tile, as a kernel looks them up.
    fn in_a_kernel(table: &[u32], numbers: Table<Host>, mask: Mask, tiles: u32) -> Vec<[u32; WORDS]> {
        let longest = numbers.longest;
        let kernel = Kernel::build("work_tiles", Launch::threads(32), |b| {
            let tiles_out = b.param_pointer("work_tiles", Elem::U32);
            let order = Order::LongestFirst { section: 1, longest };
            let table = Table::form(order, mask, None).pass(&mut Declare(b));
            let at = b.cta_x().mad_wide(WORD * WORDS as u32, tiles_out);
            let is_tile = b.cta_x().lt(table.tiles(b));
            b.if_uniform(is_tile, || {
                b.once_per_warp(|| {
                    table.look_up(b, b.cta_x(), |word, value| b.store(at.at(word.offset()), value));
                });
            });
        });
        let mut program = Program::new();
        let tiles_out = program.buffer("work_tiles", Elem::U32, &[tiles, WORDS as u32], BufferRole::Output);
        let words = program.buffer("table", Elem::U32, &[table.len() as u32], BufferRole::Input);
        assert_eq!(words, numbers.address);
        let mut args = Fill(vec![("work_tiles".to_owned(), Passed::Pointer(tiles_out))]);
        _ = numbers.pass::<Filled>(&mut args);
        program.step(kernel, [tiles + 2, 1, 1], args.0);
        let bytes = table.iter().flat_map(|word| word.to_le_bytes()).collect();
        let outcome = ProgramSimulation::new(&program).mode(Mode::Fast).run(&[vec![], bytes]).unwrap();
        assert!(outcome.is_clean(), "{:?}", outcome.findings().collect::<Vec<_>>());
        let words = outcome.buffers[0].as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes);
        words.collect::<Vec<_>>().as_chunks::<WORDS>().0.to_vec()
    }

    /// The words of each work tile, as the host looks them up.
    fn on_the_host(table: &[u32], numbers: &Table<Host>, tiles: u32) -> Vec<[u32; WORDS]> {
        let (records, record_of) = table[HEADER as usize..].split_at(8 * (numbers.sequences as usize + 1));
        let words = (0..tiles).map(|number| {
            let at = record_of[numbers.sections.block(number) as usize] as usize;
            let record = SequenceRecord::from_words(records.as_chunks::<8>().0[at]);
            let SequenceTile { m_block, head } = locate(number, &record, &numbers.sections, numbers.longest);
            let SequenceRecord { q_row, q_rows, q_len, k_row, k_len, sequence, .. } = record;
            let kv = numbers.tiling.kv_range(m_block, SeqLens { q: q_len, k: k_len });
            let row = m_block * TILE[0];
            [
                sequence,
                q_row,
                k_row,
                q_len,
                k_len,
                q_rows,
                head,
                row,
                kv.first,
                kv.unmasked_first,
                kv.unmasked_end,
                kv.end,
            ]
        });
        words.collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(100))]
        #[test]
        fn kernels_look_tiles_up_as_the_host_does(
            lengths in proptest::collection::vec((0_i32..300, 0_i32..300), 0..6), (behind_q, behind_k) in (0_usize..80, 0_usize..80),
            (left, right) in (proptest::option::of(0_u32..130), proptest::option::of(0_u32..130)),
            (section, sections, group) in (1_u32..4, 1_u32..4, 1_u32..4), longest_first in any::<bool>(),
        ) {
            let ends = |of: fn(&(i32, i32)) -> i32| {
                let ends = lengths.iter().scan(0, move |end, lengths| { *end += of(lengths); Some(*end) });
                std::iter::once(0).chain(ends).collect::<Vec<i32>>()
            };
            let [cu_seqlens_q, cu_seqlens_k] = [ends(|lengths| lengths.0), ends(|lengths| lengths.1)];
            let total = |cu_seqlens: &[i32], behind| Side::packed(*cu_seqlens.last().unwrap() as usize + behind);
            let sides = [total(&cu_seqlens_q, behind_q), total(&cu_seqlens_k, behind_k)];
            let mask = Mask::window(left, right);
            let plan = Plan::new(lengths.len(), sides, TILE, mask).unwrap();
            let values = LengthArrays { cu_seqlens_q: &cu_seqlens_q, cu_seqlens_k: &cu_seqlens_k, ..LengthArrays::default() };
            let table = plan.table(&values).unwrap();
            let numbers = Table {
                address: BufferId(1),
                sequences: plan.count(),
                sections: Sections::new(section * sections, section),
                tiling: Tiling::new(TILE[0], TILE[1], group, mask),
                longest: if longest_first { Longest::First } else { Longest::Last },
                padded: None,
                within: None,
            };
            let tiles = numbers.sections.tiles(table[0]);
            let words = in_a_kernel(&table, numbers, mask, tiles);
            prop_assert_eq!(words, on_the_host(&table, &numbers, tiles));
        }

        /// Checks quotients that are whole numbers, or next to one, and others: of numbers below 2²⁴ by divisors that
        /// the host does not know.
        #[test]
        fn kernels_divide_as_the_host_does(
            pairs in proptest::collection::vec((0_u32..1 << 24, 0_u32..24, 1_u32..1 << 24, -1_i32..2), 32),
        ) {
            let pairs: Vec<[u32; 2]> = pairs.into_iter().map(|(x, bits, y, aside)| {
                let y = (y >> bits).max(1);
                [(x / y * y).saturating_add_signed(aside).min((1 << 24) - 1), y]
            }).collect();
            let kernel = Kernel::build("divide", Launch::threads(32), |b| {
                let at = b.tid().mad_wide(2 * WORD, b.param_pointer("pairs", Elem::U32));
                let [x, y]: [U32<'_>; 2] = b.load_vector(at.at(0));
                b.store(at.at(0), fa3_sched::Int::div(x, y));
            });
            let mut program = Program::new();
            let buffer = program.buffer("pairs", Elem::U32, &[32, 2], BufferRole::InOut);
            program.step(kernel, [1, 1, 1], vec![("pairs".to_owned(), Passed::Pointer(buffer))]);
            let bytes = pairs.iter().flatten().flat_map(|word| word.to_le_bytes()).collect();
            let outcome = ProgramSimulation::new(&program).run(&[bytes]).unwrap();
            for ([x, y], found) in pairs.into_iter().zip(outcome.buffers[0].as_chunks::<8>().0) {
                let quotient = u32::from_le_bytes([found[0], found[1], found[2], found[3]]);
                prop_assert_eq!(quotient, x / y, "{} / {}", x, y);
            }
        }
    }
}
