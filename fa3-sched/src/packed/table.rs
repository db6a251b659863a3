//! The varlen table as plain code: what the kernel that writes the table must write.

use super::{Arrays, CHUNK, ClampedRows, HEADER, Plan, SequenceRecord, Side};
use crate::SeqLens;

/// The contents of the length arrays. Arrays that a plan does not have are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LengthArrays<'a> {
    /// First row of each sequence of Q, and one past the last row.
    pub cu_seqlens_q: &'a [i32],
    /// First row of each sequence of K and V, and one past the last row.
    pub cu_seqlens_k: &'a [i32],
    /// Rows of each sequence of Q that take part.
    pub seqused_q: &'a [i32],
    /// Rows of each sequence of K and V that take part.
    pub seqused_k: &'a [i32],
    /// Rows of memory before each sequence of K and V.
    pub leftpad_k: &'a [i32],
}

/// An array of the wrong length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{array} has {given} entries, not {expected}")]
#[allow(missing_docs, reason = "the message above names its fields")]
pub struct LengthArraysError {
    pub array: &'static str,
    pub given: usize,
    pub expected: usize,
}

impl Plan {
    /// The table of sequences of these lengths, without the unused end: header, records, and the record of each row
    /// block.
    ///
    /// # Errors
    /// [`LengthArraysError`].
    pub fn table(&self, values: &LengthArrays<'_>) -> Result<Vec<u32>, LengthArraysError> {
        self.check(values)?;
        let records = self.records(values);
        let mut table = vec![0; HEADER as usize];
        records.iter().for_each(|record| table.extend(record.words()));
        for (number, record) in (0..).zip(&records) {
            table.extend((0..record.blocks).map(|_| number));
        }
        table[0] = records.iter().map(|record| record.blocks).sum();
        Ok(table)
    }

    /// First row of each sequence in arrays that pad sequences to whole row blocks. The last entry is for the rows
    /// after all sequences.
    ///
    /// # Errors
    /// [`LengthArraysError`].
    pub fn first_places(&self, values: &LengthArrays<'_>) -> Result<Vec<u32>, LengthArraysError> {
        self.check(values)?;
        let mut records = self.records(values);
        records.sort_by_key(|record| record.sequence);
        Ok(records.iter().map(|record| self.cut().rows(record.first_block)).collect())
    }

    /// The records in the order of the table. The last record is for the rows after all sequences.
    fn records(&self, values: &LengthArrays<'_>) -> Vec<SequenceRecord<u32>> {
        let numbers: Vec<u32> = (0..self.count()).collect();
        let chunks = numbers.chunks(CHUNK as usize).flat_map(|chunk| {
            let mut chunk: Vec<SequenceRecord<u32>> = chunk.iter().map(|&i| self.record(values, i)).collect();
            // Records of equal cost stay in their order.
            chunk.sort_by_key(|record| {
                let len = SeqLens { q: record.q_len, k: record.k_len };
                std::cmp::Reverse(self.cut().cost(len))
            });
            chunk
        });
        let mut first_block = 0;
        let placed = chunks.chain([self.behind(values)]).map(|record| {
            let record = record.placed(first_block, self.capacity());
            first_block += record.blocks;
            record
        });
        placed.collect()
    }

    /// The record of a sequence, not yet placed.
    fn record(&self, values: &LengthArrays<'_>, sequence: u32) -> SequenceRecord<u32> {
        let q = rows_of(self.q(), [values.cu_seqlens_q, values.seqused_q, &[]], sequence as usize);
        let arrays = [values.cu_seqlens_k, values.seqused_k, values.leftpad_k];
        let k = rows_of(self.k(), arrays, sequence as usize);
        SequenceRecord::new(q, k, self.cut().blocks(q.rows), sequence)
    }

    /// The record of the rows of Q after all sequences, not yet placed.
    fn behind(&self, values: &LengthArrays<'_>) -> SequenceRecord<u32> {
        let q = match values.cu_seqlens_q.last() {
            Some(end) => ClampedRows::behind(end.cast_unsigned(), self.q().rows as u32),
            None => ClampedRows::dense(0),
        };
        SequenceRecord::new(q, ClampedRows::dense(0), self.cut().blocks(q.rows), self.count())
    }

    fn check(&self, values: &LengthArrays<'_>) -> Result<(), LengthArraysError> {
        let expected = |is_there: bool, entries: u32| if is_there { entries as usize } else { 0 };
        let (count, [q, k]) = (self.count(), [self.q().arrays, self.k().arrays]);
        let cu_seqlens = |arrays: Arrays| expected(arrays.cu_seqlens, count + 1);
        let seqused = |arrays: Arrays| expected(arrays.seqused, count);
        let leftpad = |arrays: Arrays| expected(arrays.leftpad, count);
        let arrays = [
            ("cu_seqlens_q", values.cu_seqlens_q.len(), cu_seqlens(q)),
            ("cu_seqlens_k", values.cu_seqlens_k.len(), cu_seqlens(k)),
            ("seqused_q", values.seqused_q.len(), seqused(q)),
            ("seqused_k", values.seqused_k.len(), seqused(k)),
            ("leftpad_k", values.leftpad_k.len(), leftpad(k)),
        ];
        match arrays.into_iter().find(|(_, given, expected)| given != expected) {
            Some((array, given, expected)) => Err(LengthArraysError { array, given, expected }),
            None => Ok(()),
        }
    }
}

/// The rows of sequence `i`.
fn rows_of(side: Side, [cu_seqlens, seqused, leftpad]: [&[i32]; 3], i: usize) -> ClampedRows<u32> {
    let total = side.rows as u32;
    let rows = if side.arrays.cu_seqlens {
        ClampedRows::packed([cu_seqlens[i], cu_seqlens[i + 1]].map(i32::cast_unsigned), total)
    } else {
        ClampedRows::dense(total)
    };
    let rows = if side.arrays.seqused { rows.used(seqused[i].cast_unsigned()) } else { rows };
    if side.arrays.leftpad { rows.left_padded(leftpad[i].cast_unsigned()) } else { rows }
}
