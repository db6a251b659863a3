//! Blocks of rows of Q, one for each CTA, in sequences of one length or in sequences of a table.

use fa3_ir::lang::*;
use fa3_sched::{Decoder, Lens, Order, Tile};
use fa3_types::Mask;

use super::table::{PaddedRows, Table};
use crate::kernels::params::{Form, InKernel, Pass, Side};

/// The numbers of a launch that give the rows of each CTA.
#[derive(Clone, Copy)]
pub(crate) enum RowBlocks<S: Side> {
    /// Blocks of sequences of one length.
    Equal {
        /// Rows of Q.
        seqlen: S::U32,
        /// The numbering of blocks.
        decoder: Decoder<S::U32>,
    },
    /// Blocks of sequences of a table. Several CTAs share each block.
    Listed {
        /// The table, with the positions of padded rows.
        table: Table<S>,
        /// CTAs of a block: a power of two.
        parts: u32,
    },
}

/// The part of the blocks that a kernel's code depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsForm {
    /// Sequences are of one length, which is an argument.
    Equal,
    /// Sequences are in a table.
    Listed {
        /// CTAs of each block of the table: a power of two.
        parts: u32,
        /// The mask with every bounded side at 0, in a kernel that asks which rows see keys.
        mask: Mask,
    },
}

/// The rows of a CTA.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock<'k> {
    /// Sequence of the rows.
    pub(crate) batch: V<'k, B32>,
    /// Query head of the rows.
    pub(crate) head: V<'k, B32>,
    /// First row.
    pub(crate) row: V<'k, B32>,
    /// Rows of the sequence. The first `used` rows take part in attention.
    pub(crate) rows: V<'k, B32>,
    /// Rows of the sequence that take part in attention.
    pub(crate) used: V<'k, B32>,
    /// The row's place in memory and in padded arrays, if the sequence is in a table.
    pub(crate) listed: Option<ListedBlock<'k>>,
}

/// The rows of a CTA whose sequence is in a table.
#[derive(Clone, Copy)]
pub(crate) struct ListedBlock<'k> {
    /// The sequence's first row: absolute in a packed tensor, 0 in a dense one.
    pub(crate) first: V<'k, B32>,
    /// The position of the sequence's first row in padded arrays.
    pub(crate) place: V<'k, B32>,
    /// Number of rows of the sequence that see no key: the first rows.
    pub(crate) without_keys: V<'k, B32>,
}

impl RowBlocks<Form> {
    /// The parameters that a kernel declares for its blocks, which are numbered in `order`.
    pub(crate) fn form(form: RowsForm, order: Order) -> RowBlocks<Form> {
        match form {
            RowsForm::Equal => RowBlocks::Equal { seqlen: (), decoder: Form::decoder(order) },
            RowsForm::Listed { parts, mask } => {
                RowBlocks::Listed { table: Table::form(order, mask, Some(PaddedRows::OfBlocks)), parts }
            }
        }
    }
}

impl<A: Side> RowBlocks<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> RowBlocks<B> {
        match self {
            RowBlocks::Equal { seqlen, decoder } => RowBlocks::Equal {
                seqlen: by.u32("seqlen", seqlen),
                decoder: decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
            },
            RowBlocks::Listed { table, parts } => RowBlocks::Listed { table: table.pass(by), parts },
        }
    }
}

impl<'k> RowBlocks<InKernel<'k>> {
    /// Runs `body` with the `count` rows of the CTA, if the CTA has rows.
    #[track_caller]
    pub(crate) fn run(&self, b: &'k Builder, count: u32, body: impl FnOnce(RowBlock<'k>)) {
        match self {
            RowBlocks::Equal { seqlen, decoder } => {
                let Tile { m_block, head, batch } = decoder.decode(b.cta_x());
                let (rows, used) = (*seqlen, *seqlen);
                body(RowBlock { batch, head, row: m_block * count, rows, used, listed: None });
            }
            RowBlocks::Listed { table, parts } => {
                let number = b.cta_x() >> parts.ilog2();
                b.if_uniform(number.lt(table.tiles(b)), || {
                    let (record, place) = table.record(b, number);
                    let at = table.locate(number, &record);
                    let part = b.cta_x() & (parts - 1);
                    body(RowBlock {
                        batch: record.sequence,
                        head: at.head,
                        row: at.m_block.mad(table.tiling.tile_m(), part * count),
                        rows: record.q_rows,
                        used: record.q_len,
                        listed: place.map(|place| ListedBlock {
                            first: record.q_row,
                            place,
                            without_keys: table
                                .tiling
                                .rows_without_keys(Lens { q: record.q_len, k: record.k_len }),
                        }),
                    });
                });
            }
        }
    }
}

impl<'k> RowBlock<'k> {
    /// The index of a row in its tensor: absolute in a packed tensor, within the batch entry of a dense one.
    #[track_caller]
    pub(crate) fn in_memory(&self, row: V<'k, B32>) -> V<'k, B32> {
        self.listed.map_or(row, |listed| listed.first + row)
    }

    /// The indices of a row in padded arrays: sequence, head and row. With a table, the arrays have one sequence.
    #[track_caller]
    pub(crate) fn place(&self, row: V<'k, B32>) -> [V<'k, B32>; 3] {
        match self.listed {
            None => [self.batch, self.head, row],
            Some(listed) => [row.constant(0), self.head, listed.place + row],
        }
    }
}
