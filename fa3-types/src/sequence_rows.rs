//! The rows of each sequence of a batch: data.

use crate::{ProblemError, Sequences};

/// The rows of each sequence of Q, or of K and V, on the host: the values of `cu_seqlens` and `seqused`.
///
/// Rows of a sequence past its used length exist in memory and take no part in attention.
///
/// ```
/// use fa3_types::SequenceRows;
///
/// let rows = SequenceRows::packed(&[0, 3, 3, 7])?.with_used(&[2, 0, 4])?;
/// assert_eq!([0, 1, 2].map(|i| (rows.start(i), rows.len(i))), [((0, 0), 2), ((0, 3), 0), ((0, 3), 4)]);
/// # Ok::<(), fa3_types::ProblemError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SequenceRows {
    layout: Layout,
    used: Option<Vec<usize>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Layout {
    Dense {
        batch: usize,
        seqlen: usize,
    },
    /// Sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
    Packed {
        cu_seqlens: Vec<usize>,
    },
}

impl SequenceRows {
    /// `batch` sequences of `seqlen` rows each.
    pub fn dense(batch: usize, seqlen: usize) -> SequenceRows {
        SequenceRows { layout: Layout::Dense { batch, seqlen }, used: None }
    }

    /// Sequences packed into one tensor: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
    ///
    /// # Errors
    /// `cu_seqlens` must have at least one entry, start at 0 and never decrease.
    pub fn packed(cu_seqlens: &[i32]) -> Result<SequenceRows, ProblemError> {
        let first = *cu_seqlens.first().ok_or(ProblemError::CuSeqlensEmpty)?;
        if first != 0 {
            return Err(ProblemError::CuSeqlensStart { given: first });
        }
        for (i, pair) in cu_seqlens.windows(2).enumerate() {
            let (from, to) = (pair[0], pair[1]);
            if to < from {
                return Err(ProblemError::CuSeqlensFalls { index: i + 1, from, to });
            }
        }
        // No entry is negative: the list starts at 0 and never decreases.
        let cu_seqlens = cu_seqlens.iter().map(|&row| row as usize).collect();
        Ok(SequenceRows { layout: Layout::Packed { cu_seqlens }, used: None })
    }

    /// Sequences of these lengths, packed one after the other.
    ///
    /// ```
    /// use fa3_types::SequenceRows;
    /// assert_eq!(SequenceRows::packed_lengths(&[3, 0, 4]), SequenceRows::packed(&[0, 3, 3, 7])?);
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    pub fn packed_lengths(lengths: &[usize]) -> SequenceRows {
        let ends = lengths.iter().scan(0, |end: &mut usize, &length| {
            *end = end.saturating_add(length);
            Some(*end)
        });
        let cu_seqlens = std::iter::once(0).chain(ends).collect();
        SequenceRows { layout: Layout::Packed { cu_seqlens }, used: None }
    }

    /// The sequences of a tensor of `batch` x `seqlen` rows from a call's lists: packed with `cu_seqlens`, otherwise of
    /// `seqlen` rows each; with `seqused` only the first rows of each are in use.
    ///
    /// # Errors
    /// The errors of [`SequenceRows::packed`] and [`SequenceRows::with_used`].
    pub fn listed(
        batch: usize,
        seqlen: usize,
        cu_seqlens: Option<&[i32]>,
        seqused: Option<&[i32]>,
    ) -> Result<SequenceRows, ProblemError> {
        let rows = match cu_seqlens {
            Some(cu_seqlens) => SequenceRows::packed(cu_seqlens)?,
            None => SequenceRows::dense(batch, seqlen),
        };
        match seqused {
            Some(seqused) => rows.with_used(seqused),
            None => Ok(rows),
        }
    }

    /// Uses only the first `used[i]` rows of sequence i. If `used` covers all rows, nothing changes.
    ///
    /// # Errors
    /// `used` must have one entry for each sequence, between 0 and the sequence's rows.
    pub fn with_used(self, used: &[i32]) -> Result<SequenceRows, ProblemError> {
        if used.len() != self.count() {
            return Err(ProblemError::SequsedCount { given: used.len(), sequences: self.count() });
        }
        let checked = used.iter().enumerate().map(|(index, &given)| {
            let capacity = self.capacity(index);
            match usize::try_from(given) {
                Ok(len) if len <= capacity => Ok(len),
                _ => Err(ProblemError::SequsedRange { index, given, capacity }),
            }
        });
        let used = checked.collect::<Result<Vec<_>, _>>()?;
        let in_part = used.iter().enumerate().any(|(index, &used)| used < self.capacity(index));
        Ok(SequenceRows { used: in_part.then_some(used), ..self })
    }

    /// The sequences without their lengths, as planning knows them. The longest one is the hint.
    pub fn sequences(&self) -> Sequences {
        let sequences = match &self.layout {
            Layout::Dense { batch, seqlen } => Sequences::dense(*batch, *seqlen),
            Layout::Packed { .. } => Sequences::packed(self.count()).longest(self.max_capacity()),
        };
        if self.used.is_some() { sequences.used() } else { sequences }
    }

    /// The values of `cu_seqlens`. Dense sequences get the values that they would have if packed.
    pub fn cu_seqlens(&self) -> Vec<i32> {
        let ends = (0..self.count()).scan(0, |end, index| {
            *end += self.capacity(index);
            Some(*end)
        });
        std::iter::once(0).chain(ends).map(|row| row as i32).collect()
    }

    /// The values of `seqused`: all rows unless set.
    pub fn seqused(&self) -> Vec<i32> {
        (0..self.count()).map(|index| self.len(index) as i32).collect()
    }

    /// Number of sequences.
    pub fn count(&self) -> usize {
        match &self.layout {
            Layout::Dense { batch, .. } => *batch,
            Layout::Packed { cu_seqlens } => cu_seqlens.len() - 1,
        }
    }

    /// Whether the sequences are packed into a tensor of batch 1.
    pub fn is_packed(&self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// Rows that sequence `index` has in memory.
    pub fn capacity(&self, index: usize) -> usize {
        match &self.layout {
            Layout::Dense { seqlen, .. } => *seqlen,
            Layout::Packed { cu_seqlens } => cu_seqlens[index + 1] - cu_seqlens[index],
        }
    }

    /// Rows of sequence `index` that take part in attention.
    pub fn len(&self, index: usize) -> usize {
        self.used.as_ref().map_or_else(|| self.capacity(index), |used| used[index])
    }

    /// Where sequence `index` starts in its tensor: (index in the batch dimension, first row).
    pub fn start(&self, index: usize) -> (usize, usize) {
        match &self.layout {
            Layout::Dense { .. } => (index, 0),
            Layout::Packed { cu_seqlens } => (0, cu_seqlens[index]),
        }
    }

    /// The longest [`SequenceRows::len`].
    pub fn max_len(&self) -> usize {
        match &self.used {
            Some(used) => used.iter().copied().max().unwrap_or(0),
            None => self.max_capacity(),
        }
    }

    fn max_capacity(&self) -> usize {
        match &self.layout {
            Layout::Dense { batch: 0, .. } => 0,
            Layout::Dense { seqlen, .. } => *seqlen,
            Layout::Packed { cu_seqlens } => {
                cu_seqlens.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0)
            }
        }
    }

    /// The rows that the layout needs in its tensor: seqlen, or the last entry of cu_seqlens.
    pub fn end(&self) -> usize {
        match &self.layout {
            Layout::Dense { seqlen, .. } => *seqlen,
            Layout::Packed { cu_seqlens } => cu_seqlens[cu_seqlens.len() - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_sequences() {
        let rows = SequenceRows::dense(3, 5);
        assert_eq!((rows.count(), rows.len(2), rows.start(2)), (3, 5, (2, 0)));
        let used = rows.clone().with_used(&[5, 0, 2]).unwrap();
        assert_eq!([0, 1, 2].map(|i| used.len(i)), [5, 0, 2]);
        assert_eq!((used.capacity(1), used.max_len()), (5, 5));
        assert_eq!((used.seqused(), used.cu_seqlens()), (vec![5, 0, 2], vec![0, 5, 10, 15]));
        assert_eq!(used.sequences(), Sequences::dense(3, 5).used());
        assert_eq!(rows.clone().with_used(&[5; 3]).unwrap(), rows);
        assert_eq!([(0, 5), (usize::MAX, 5)].map(|(n, len)| SequenceRows::dense(n, len).max_len()), [0, 5]);
    }

    #[test]
    fn packed_sequences() {
        let rows = SequenceRows::packed(&[0, 3, 3, 7]).unwrap();
        assert_eq!([0, 1, 2].map(|i| rows.len(i)), [3, 0, 4]);
        assert_eq!([0, 1, 2].map(|i| rows.start(i)), [(0, 0), (0, 3), (0, 3)]);
        assert_eq!((rows.count(), rows.max_len(), rows.end()), (3, 4, 7));
        assert_eq!((rows.cu_seqlens(), rows.seqused()), (vec![0, 3, 3, 7], vec![3, 0, 4]));
        assert_eq!(rows.sequences(), Sequences::packed(3).longest(4));
        assert_eq!(SequenceRows::packed(&[0]).unwrap().max_len(), 0);
    }

    #[test]
    fn bad_cu_seqlens_are_rejected() {
        assert_eq!(SequenceRows::packed(&[]), Err(ProblemError::CuSeqlensEmpty));
        assert_eq!(SequenceRows::packed(&[1, 2]), Err(ProblemError::CuSeqlensStart { given: 1 }));
        let falls = ProblemError::CuSeqlensFalls { index: 2, from: 5, to: 4 };
        assert_eq!(SequenceRows::packed(&[0, 5, 4]), Err(falls));
        let negative = ProblemError::CuSeqlensFalls { index: 1, from: 0, to: -1 };
        assert_eq!(SequenceRows::packed(&[0, -1]), Err(negative));
    }

    #[test]
    fn bad_seqused_is_rejected() {
        let rows = SequenceRows::dense(2, 4);
        let count = ProblemError::SequsedCount { given: 1, sequences: 2 };
        assert_eq!(rows.clone().with_used(&[4]), Err(count));
        let long = ProblemError::SequsedRange { index: 1, given: 5, capacity: 4 };
        assert_eq!(rows.clone().with_used(&[4, 5]), Err(long));
        let negative = ProblemError::SequsedRange { index: 0, given: -1, capacity: 4 };
        assert_eq!(rows.with_used(&[-1, 4]), Err(negative));
    }
}
