//! The table as plain code: what the kernel that writes it must write.

use super::{Arrays, CHUNK, ClampedRows, HEADER, Plan, Record, Side};
use crate::Lens;

/// The contents of the arrays of lengths. Those that a plan does not have are empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Values<'a> {
    /// Where sequences of Q begin, and where the last one ends.
    pub cu_seqlens_q: &'a [i32],
    /// Where sequences of K and V begin, and where the last one ends.
    pub cu_seqlens_k: &'a [i32],
    /// Rows of Q that take part, of each sequence.
    pub seqused_q: &'a [i32],
    /// Rows of K and V that take part, of each sequence.
    pub seqused_k: &'a [i32],
    /// Rows of memory before each sequence of K and V.
    pub leftpad_k: &'a [i32],
}

/// An array of the wrong length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{array} has {given} entries, not {expected}")]
#[allow(missing_docs, reason = "the message above names its fields")]
pub struct ValuesError {
    pub array: &'static str,
    pub given: usize,
    pub expected: usize,
}

impl Plan {
    /// The table of sequences of these lengths, without the unused end: header, records, and the record of each row
    /// block that there is.
    ///
    /// # Errors
    /// [`ValuesError`].
    pub fn table(&self, values: &Values<'_>) -> Result<Vec<u32>, ValuesError> {
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

    /// First places of sequences in arrays that pad them to whole row blocks, in rows; that of the rows behind all of
    /// them last.
    ///
    /// # Errors
    /// [`ValuesError`].
    pub fn first_places(&self, values: &Values<'_>) -> Result<Vec<u32>, ValuesError> {
        self.check(values)?;
        let mut records = self.records(values);
        records.sort_by_key(|record| record.sequence);
        Ok(records.iter().map(|record| self.cut().rows(record.first_block)).collect())
    }

    /// The records in the order of the table, that of the rows behind all sequences among them.
    fn records(&self, values: &Values<'_>) -> Vec<Record<u32>> {
        let numbers: Vec<u32> = (0..self.count()).collect();
        let chunks = numbers.chunks(CHUNK as usize).flat_map(|chunk| {
            let mut chunk: Vec<Record<u32>> = chunk.iter().map(|&i| self.record(values, i)).collect();
            // Equal ones stay in their order.
            chunk.sort_by_key(|record| {
                let len = Lens { q: record.q_len, k: record.k_len };
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

    /// The record of a sequence, not yet at its place.
    fn record(&self, values: &Values<'_>, sequence: u32) -> Record<u32> {
        let q = rows_of(self.q(), [values.cu_seqlens_q, values.seqused_q, &[]], sequence as usize);
        let arrays = [values.cu_seqlens_k, values.seqused_k, values.leftpad_k];
        let k = rows_of(self.k(), arrays, sequence as usize);
        Record::new(q, k, self.cut().blocks(q.rows), sequence)
    }

    /// The record of the rows of Q behind all sequences, not yet at its place.
    fn behind(&self, values: &Values<'_>) -> Record<u32> {
        let q = match values.cu_seqlens_q.last() {
            Some(end) => ClampedRows::behind(end.cast_unsigned(), self.q().rows as u32),
            None => ClampedRows::dense(0),
        };
        Record::new(q, ClampedRows::dense(0), self.cut().blocks(q.rows), self.count())
    }

    fn check(&self, values: &Values<'_>) -> Result<(), ValuesError> {
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
            Some((array, given, expected)) => Err(ValuesError { array, given, expected }),
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
