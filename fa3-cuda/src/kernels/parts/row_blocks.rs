//! Blocks of rows of Q, one for each CTA, in sequences of one length or in sequences of a table.

use fa3_ir::lang::*;
use fa3_sched::{Decoder, Order, SeqLens, TileCoord};
use fa3_types::Mask;

use super::table::{PaddedRows, Table};
use crate::kernels::params::{Form, InKernel, Pass, Side};

/// The numbers of a launch that give the rows of each CTA.
#[derive(Clone, Copy)]
pub(crate) enum RowBlocks<S: Side> {
    /// Blocks of sequences of one length.
    Dense {
        /// Number of rows of Q.
        seqlen: S::U32,
        /// The numbering of blocks.
        decoder: Decoder<S::U32>,
    },
    /// Blocks of sequences of a table. Several CTAs share each block.
    Varlen {
        /// The table, with the positions of padded rows.
        table: Table<S>,
        /// Number of CTAs that share a block: a power of two.
        parts: u32,
    },
}

/// The form of the blocks, on which a kernel's code depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowsForm {
    /// Sequences are of one length, which is an argument.
    Dense,
    /// Sequences are in a table.
    Varlen {
        /// Number of CTAs that share a block of the table: a power of two.
        parts: u32,
        /// The mask with every bounded side at 0, in a kernel that must know which rows see keys.
        mask: Mask,
    },
}

/// The block of rows of a CTA.
#[derive(Clone, Copy)]
pub(crate) struct RowBlock<'k> {
    /// The sequence that the rows belong to.
    pub(crate) batch: U32<'k>,
    /// The query head that the rows belong to.
    pub(crate) head: U32<'k>,
    /// The index of the first row of the block in its sequence.
    pub(crate) row: U32<'k>,
    /// Number of rows of the sequence.
    pub(crate) rows: U32<'k>,
    /// Number of the sequence's rows, from the first on, that take part in attention.
    pub(crate) used: U32<'k>,
    /// The place of the sequence in memory and in padded arrays, if the sequence is in a table.
    pub(crate) varlen: Option<VarlenBlock<'k>>,
}

/// The place of a sequence of a table.
#[derive(Clone, Copy)]
pub(crate) struct VarlenBlock<'k> {
    /// The sequence's first row: absolute in a packed tensor, 0 in a dense one.
    pub(crate) first: U32<'k>,
    /// The position of the sequence's first row in padded arrays.
    pub(crate) padded_row: U32<'k>,
    /// Number of keys of the sequence.
    pub(crate) keys: U32<'k>,
    /// Number of rows of the sequence that see no key. They are its first rows.
    pub(crate) without_keys: U32<'k>,
}

impl RowBlocks<Form> {
    /// The parameters that a kernel declares for its blocks, which are numbered in `order`.
    pub(crate) fn form(form: RowsForm, order: Order) -> RowBlocks<Form> {
        match form {
            RowsForm::Dense => RowBlocks::Dense { seqlen: (), decoder: Form::decoder(order) },
            RowsForm::Varlen { parts, mask } => {
                RowBlocks::Varlen { table: Table::form(order, mask, Some(PaddedRows::OfBlocks)), parts }
            }
        }
    }
}

impl<A: Side> RowBlocks<A> {
    #[track_caller]
    pub(crate) fn pass<B: Side>(self, by: &mut impl Pass<A, B>) -> RowBlocks<B> {
        match self {
            RowBlocks::Dense { seqlen, decoder } => RowBlocks::Dense {
                seqlen: by.u32("seqlen", seqlen),
                decoder: decoder.map_named(&mut |name: &str, number| by.u32(name, number)),
            },
            RowBlocks::Varlen { table, parts } => RowBlocks::Varlen { table: table.pass(by), parts },
        }
    }
}

impl<'k> RowBlocks<InKernel<'k>> {
    /// Runs `body` with the `count` rows of the CTA, if the CTA has rows.
    #[track_caller]
    pub(crate) fn run(&self, b: &'k Builder, count: u32, body: impl FnOnce(RowBlock<'k>)) {
        match self {
            RowBlocks::Dense { seqlen, decoder } => {
                let TileCoord { m_block, head, batch } = decoder.decode(b.cta_x());
                let (rows, used) = (*seqlen, *seqlen);
                body(RowBlock { batch, head, row: m_block * count, rows, used, varlen: None });
            }
            RowBlocks::Varlen { table, parts } => {
                let number = b.cta_x() >> parts.ilog2();
                b.if_uniform(number.lt(table.tiles(b)), || {
                    let (record, padded_row) = table.record(b, number);
                    let at = table.locate(number, &record);
                    let part = b.cta_x() & (parts - 1);
                    body(RowBlock {
                        batch: record.sequence,
                        head: at.head,
                        row: at.m_block.mad(table.tiling.tile_m(), part * count),
                        rows: record.q_rows,
                        used: record.q_len,
                        varlen: padded_row.map(|padded_row| VarlenBlock {
                            first: record.q_row,
                            padded_row,
                            keys: record.k_len,
                            without_keys: table
                                .tiling
                                .rows_without_keys(SeqLens { q: record.q_len, k: record.k_len }),
                        }),
                    });
                });
            }
        }
    }
}

impl<'k> RowBlock<'k> {
    /// The index of a row in its tensor: absolute in a packed tensor, within the batch entry in a dense tensor.
    #[track_caller]
    pub(crate) fn in_memory(&self, row: U32<'k>) -> U32<'k> {
        self.varlen.map_or(row, |varlen| varlen.first + row)
    }

    /// The sequence, head and row in padded arrays of a row. With a table, these arrays hold all sequences as one.
    #[track_caller]
    pub(crate) fn padded_row(&self, row: U32<'k>) -> [U32<'k>; 3] {
        match self.varlen {
            None => [self.batch, self.head, row],
            Some(varlen) => [row.constant(0), self.head, varlen.padded_row + row],
        }
    }
}
