//! The table of packed sequences (varlen): one CTA writes it, and attention kernels look up their tiles in it
//! ([`fa3_sched::packed`]). The host never reads lengths, so a captured graph runs with any lengths.
//!
//! ```text
//! lengths of a sequence ──► cost of its ──► place among all: ──► record
//!                           longest tile    rank and first
//!                                           row block       ──► row block to record, by a search
//! ```
//!
//! Each thread has one sequence. If there are more sequences than threads, the CTA takes them chunk by chunk.

mod firsts;
mod params;
mod program;
mod ranking;
mod spec;

use fa3_ir::lang::*;
use fa3_sched::SeqLens;
use fa3_sched::packed::{CHUNK, ClampedRows, HEADER, SequenceRecord, sort_key};

use self::firsts::Firsts;
use self::params::Params;
use self::ranking::Ranking;
use super::KernelSpec;
use super::params::{Declare, InKernel};

pub(crate) use params::TilesOf;
pub use program::program;
pub(crate) use program::{arrays, step};
pub use spec::Spec;

/// Bytes of a record.
const RECORD: u32 = 4 * SequenceRecord::<u32>::WORDS;

impl KernelSpec for Spec {
    fn kernel(&self) -> Kernel {
        Kernel::build("schedule", Launch::threads(self.threads), |b| {
            let writer = TableWriter {
                builder: b,
                threads: self.threads,
                params: self.form().pass(&mut Declare(b)),
                ranking: Ranking::declare(b, self.threads),
                firsts: Firsts::declare(b, self.threads),
            };
            b.launch_dependents();
            b.grid_dependency_wait();
            writer.write();
        })
    }
}

/// A CTA that writes the table.
struct TableWriter<'k> {
    builder: &'k Builder,
    threads: u32,
    params: Params<InKernel<'k>>,
    ranking: Ranking<'k>,
    firsts: Firsts<'k>,
}

impl<'k> TableWriter<'k> {
    /// Writes the whole table.
    #[track_caller]
    fn write(&self) {
        let (b, count) = (self.builder, self.params.count);
        // This load is issued before the loads of the sequences, so that it overlaps them.
        let end = self.params.side_q().end(b, count);
        let blocks = b.var("blocks", 0);
        b.for_each((0, count), self.threads, |first| blocks.set(self.chunk(first, blocks.get())));

        let of_sequences = blocks.get();
        let nothing = ClampedRows::dense(b.value(0));
        let behind = end.map_or(nothing, |end| ClampedRows::behind(end, self.params.rows_q));
        let behind = SequenceRecord::new(behind, nothing, self.params.cut.blocks(behind.rows), count)
            .placed(of_sequences, self.params.capacity);
        let all = of_sequences + behind.blocks;
        let is_first = b.tid().eq(0);
        self.store_record(is_first, count, &behind);
        self.store_first(is_first, &behind);
        let zero = b.value(0);
        b.guarded(is_first, || b.store_vector(self.params.table.at(0), [all, zero, zero, zero]));
        self.fill(of_sequences, all, |_| count);
    }

    /// Writes the records and row blocks of the sequences from `first` on, one sequence per thread. `begin` row blocks
    /// come before theirs. Gives the number of all row blocks so far.
    #[track_caller]
    fn chunk(&self, first: U32<'k>, begin: U32<'k>) -> U32<'k> {
        let (b, params) = (self.builder, &self.params);
        let sequence = first + b.tid();
        let is_there = sequence.lt(params.count);
        // A thread without a sequence reads the last sequence, but counts no rows, and has the smallest key.
        let read = sequence.min(params.count - 1);
        let q = params.side_q().of_sequence(b, read, is_there);
        let k = params.side_k().of_sequence(b, read, is_there);
        let record = SequenceRecord::new(q, k, params.cut.blocks(q.rows), sequence);
        let cost = params.cut.cost(SeqLens { q: q.len, k: k.len });
        // The number is clamped, so that the sum over all threads fits 32 bits.
        let blocks = record.blocks.min(params.capacity);
        let place = self.ranking.of(sort_key(cost, b.tid()), blocks);
        let [first_block, end] = self.firsts.number(place, blocks, [begin, params.capacity]);
        let record = record.placed(first_block, params.capacity);
        self.store_record(is_there, first + place.rank, &record);
        self.store_first(is_there, &record);
        self.fill(begin, end, |block| first + self.firsts.search(block));
        end
    }

    /// Stores record `number` where `is_there` is true.
    #[track_caller]
    fn store_record(&self, is_there: V<'k, Pred>, number: U32<'k>, record: &SequenceRecord<U32<'k>>) {
        let at = number.mad_wide(RECORD, self.params.table);
        let words = record.words();
        self.builder.guarded(is_there, || {
            for (half, words) in (0..).zip(words.as_chunks::<4>().0) {
                self.builder.store_vector(at.at(4 * HEADER as i32 + 16 * half), *words);
            }
        });
    }

    /// Stores the position of a sequence's first row in padded arrays, if the kernel has that array and `is_there`.
    #[track_caller]
    fn store_first(&self, is_there: V<'k, Pred>, record: &SequenceRecord<U32<'k>>) {
        if let Some(firsts) = self.params.firsts {
            let place = self.params.cut.rows(record.first_block);
            self.builder.guarded(is_there, || self.builder.store(record.sequence.mad_wide(4, firsts), place));
        }
    }

    /// Writes, for each row block from `begin` to `end`, the index of its record.
    #[track_caller]
    fn fill(&self, begin: U32<'k>, end: U32<'k>, record_of: impl Fn(U32<'k>) -> U32<'k>) {
        let b = self.builder;
        let array = self.params.count.mad_wide(RECORD, self.params.table);
        // The searches of one thread overlap. A large CTA has enough threads to overlap one search of each.
        let at_once = (CHUNK / self.threads).clamp(1, 4);
        b.for_each((begin, end), at_once * self.threads, |first| {
            let blocks = (0..at_once).map(|part| first + b.tid() + part * self.threads);
            let records: Vec<_> = blocks.map(|block| (block, record_of(block))).collect();
            for (block, record) in records {
                let at = block.mad_wide(4, array);
                b.guarded(block.lt(end), || b.store(at.at((4 * HEADER + RECORD) as i32), record));
            }
        });
    }
}
