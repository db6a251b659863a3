//! Pairs of a sequence and a head, in kernels that add up what the dQ kernel has written for each of them.

use fa3_ir::lang::*;
use fa3_sched::backward::{Plan, PlanKind};
use fa3_sched::{FastDiv, Order, SeqLens, Tiling};
use fa3_types::Mask;

use super::read_sums::GROUP;
use super::scratch::Scratch;
use crate::kernels::params::{Form, Host, InKernel, Pass, Side, param, params};
use crate::kernels::parts::lookup::SequenceForm;
use crate::kernels::parts::table::{PaddedRows, Table};

params! {
    /// The pairs of a launch.
    struct Pairs {
        /// Number of query heads.
        heads: div,
        equal: maybe all EqualSequences,
        listed: maybe all Table,
    }

    /// Sequences of one length.
    struct EqualSequences {
        sequences: u32,
        seqlen_q: u32,
        seqlen_k: u32,
    }
}

/// A sequence and a head.
pub(super) struct Pair<'k> {
    pub(super) sequence: U32<'k>,
    pub(super) head: U32<'k>,
    pub(super) lens: SeqLens<U32<'k>>,
    /// Number of rows that have sums.
    pub(super) rows: U32<'k>,
    /// The index of the sequence and the head in arrays of sums, and their first group there.
    pub(super) of_head: U32<'k>,
    pub(super) first_group: U32<'k>,
}

impl Pairs<Form> {
    pub(super) fn form(sequences: SequenceForm) -> Pairs<Form> {
        let (equal, listed) = match sequences {
            SequenceForm::Dense => (Some(EqualSequences { sequences: (), seqlen_q: (), seqlen_k: () }), None),
            SequenceForm::Varlen => {
                (None, Some(Table::form(Order::Linear, Mask::None, Some(PaddedRows::OfBlocks))))
            }
        };
        Pairs { heads: Form::div(), equal, listed }
    }
}

impl Pairs<Host> {
    pub(super) fn of(plan: &Plan, scratch: &Scratch) -> Pairs<Host> {
        let forward = plan.problem().forward();
        let (equal, listed) = match plan.kind() {
            PlanKind::Dense(tiles) => {
                let (sequences, SeqLens { q, k }) = (forward.batch() as u32, tiles.lens());
                (Some(EqualSequences { sequences, seqlen_q: q, seqlen_k: k }), None)
            }
            PlanKind::Varlen(tiles) => {
                let address = scratch.tables.expect("sequences are listed").rows;
                let tiling = Tiling::new(tiles.block_rows(), 1, 1, Mask::None);
                (None, Some(Table::of(tiles.stats(), address, tiling, Some(PaddedRows::OfBlocks))))
            }
        };
        Pairs { heads: FastDiv::new(forward.heads().q() as u32), equal, listed }
    }
}

impl<'k> Pairs<InKernel<'k>> {
    /// Number of pairs.
    #[track_caller]
    pub(super) fn count(&self, b: &'k Builder) -> U32<'k> {
        let sequences = match (&self.equal, &self.listed) {
            (Some(equal), _) => equal.sequences,
            (None, Some(table)) => table.sequences,
            (None, None) => b.value(0),
        };
        sequences * self.heads.divisor()
    }

    /// The pair with this number. Without a table, pairs are numbered as in arrays of sums.
    #[track_caller]
    pub(super) fn pair(&self, b: &'k Builder, number: U32<'k>) -> Pair<'k> {
        let ((sequence, head), zero) = (self.heads.div_rem(number), b.value(0));
        if let Some(EqualSequences { seqlen_q: q, seqlen_k: k, .. }) = self.equal {
            let lens = SeqLens { q, k };
            return Pair { sequence, head, lens, rows: q, of_head: number, first_group: zero };
        }
        let table = self.listed.expect("sequences are equal or listed");
        let (record, first_row) = table.record_at(b, sequence);
        let lens = SeqLens { q: record.q_len, k: record.k_len };
        let rows = record.q_len.min(record.blocks * table.tiling.tile_m());
        let first_group = first_row.expect("the table has padded rows") >> GROUP.ilog2();
        Pair { sequence: record.sequence, head, lens, rows, of_head: head, first_group }
    }
}
