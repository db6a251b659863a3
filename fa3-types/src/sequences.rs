//! Where each sequence of a batch lies in its tensor, and how long it is.

use crate::{Lengths, ProblemError};

/// The sequences of Q, or of K and V: dense (batch, seqlen, …) or packed one after the other into
/// (1, total, …), either with an optional number of rows in use ("seqused") per sequence.
///
/// Rows of a sequence past its used length exist in memory and take no part in attention.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sequences {
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

impl Sequences {
    /// `batch` sequences of `seqlen` rows each.
    pub fn dense(batch: usize, seqlen: usize) -> Sequences {
        Sequences { layout: Layout::Dense { batch, seqlen }, used: None }
    }

    /// Sequences packed into one tensor: number i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`.
    ///
    /// # Errors
    /// `cu_seqlens` must have at least one entry, start at 0 and never fall.
    pub fn packed(cu_seqlens: &[i32]) -> Result<Sequences, ProblemError> {
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
        // Nothing below 0 is left: the list starts there and never falls.
        let cu_seqlens = cu_seqlens.iter().map(|&row| row as usize).collect();
        Ok(Sequences { layout: Layout::Packed { cu_seqlens }, used: None })
    }

    /// Sequences of these lengths, packed one after the other.
    ///
    /// ```
    /// use fa3_types::Sequences;
    /// assert_eq!(Sequences::packed_lengths(&[3, 0, 4]), Sequences::packed(&[0, 3, 3, 7])?);
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    pub fn packed_lengths(lengths: &[usize]) -> Sequences {
        let ends = lengths.iter().scan(0, |end: &mut usize, &length| {
            *end = end.saturating_add(length);
            Some(*end)
        });
        let cu_seqlens = std::iter::once(0).chain(ends).collect();
        Sequences { layout: Layout::Packed { cu_seqlens }, used: None }
    }

    /// Uses only the first `used[i]` rows of sequence i.
    ///
    /// # Errors
    /// One entry a sequence, each between 0 and the sequence's rows.
    pub fn with_used(self, used: &[i32]) -> Result<Sequences, ProblemError> {
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
        let used = Some(checked.collect::<Result<Vec<_>, _>>()?);
        Ok(Sequences { used, ..self })
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

    /// The first sequence of which only a part takes part in attention, if there is one.
    pub fn first_in_part(&self) -> Option<usize> {
        let used = self.used.as_ref()?;
        (0..used.len()).find(|&index| used[index] != self.capacity(index))
    }

    /// Where sequence `index` starts in its tensor: (index in the batch dimension, first row).
    pub fn start(&self, index: usize) -> (usize, usize) {
        match &self.layout {
            Layout::Dense { .. } => (index, 0),
            Layout::Packed { cu_seqlens } => (0, cu_seqlens[index]),
        }
    }

    /// The longest [`Sequences::len`].
    pub fn max_len(&self) -> usize {
        match (&self.layout, &self.used) {
            (Layout::Dense { batch: 0, .. }, None) => 0,
            (Layout::Dense { seqlen, .. }, None) => *seqlen,
            _ => (0..self.count()).map(|index| self.len(index)).max().unwrap_or(0),
        }
    }

    /// The rows that the layout needs of its tensor: seqlen, or the last of cu_seqlens.
    pub(crate) fn rows_needed(&self) -> usize {
        match &self.layout {
            Layout::Dense { seqlen, .. } => *seqlen,
            Layout::Packed { cu_seqlens } => cu_seqlens[cu_seqlens.len() - 1],
        }
    }

    /// The lengths of sequence `index` when `self` holds the queries and `keys` the keys.
    pub(crate) fn lengths(&self, keys: &Sequences, index: usize) -> Lengths {
        Lengths { q: self.len(index), k: keys.len(index) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dense_sequences() {
        let sequences = Sequences::dense(3, 5);
        assert_eq!((sequences.count(), sequences.len(2), sequences.start(2)), (3, 5, (2, 0)));
        let used = sequences.with_used(&[5, 0, 2]).unwrap();
        assert_eq!([0, 1, 2].map(|i| used.len(i)), [5, 0, 2]);
        assert_eq!((used.capacity(1), used.max_len()), (5, 5));
        assert_eq!((used.first_in_part(), Sequences::dense(usize::MAX, 5).first_in_part()), (Some(1), None));
        assert_eq!([(0, 5), (usize::MAX, 5)].map(|(n, len)| Sequences::dense(n, len).max_len()), [0, 5]);
    }

    #[test]
    fn packed_sequences() {
        let sequences = Sequences::packed(&[0, 3, 3, 7]).unwrap();
        assert_eq!([0, 1, 2].map(|i| sequences.len(i)), [3, 0, 4]);
        assert_eq!([0, 1, 2].map(|i| sequences.start(i)), [(0, 0), (0, 3), (0, 3)]);
        assert_eq!((sequences.count(), sequences.max_len(), sequences.rows_needed()), (3, 4, 7));
        assert_eq!(Sequences::packed(&[0]).unwrap().max_len(), 0);
    }

    #[test]
    fn bad_cu_seqlens_are_rejected() {
        assert_eq!(Sequences::packed(&[]), Err(ProblemError::CuSeqlensEmpty));
        assert_eq!(Sequences::packed(&[1, 2]), Err(ProblemError::CuSeqlensStart { given: 1 }));
        let falls = ProblemError::CuSeqlensFalls { index: 2, from: 5, to: 4 };
        assert_eq!(Sequences::packed(&[0, 5, 4]), Err(falls));
        let negative = ProblemError::CuSeqlensFalls { index: 1, from: 0, to: -1 };
        assert_eq!(Sequences::packed(&[0, -1]), Err(negative));
    }

    #[test]
    fn bad_seqused_is_rejected() {
        let sequences = Sequences::dense(2, 4);
        let count = ProblemError::SequsedCount { given: 1, sequences: 2 };
        assert_eq!(sequences.clone().with_used(&[4]), Err(count));
        let long = ProblemError::SequsedRange { index: 1, given: 5, capacity: 4 };
        assert_eq!(sequences.clone().with_used(&[4, 5]), Err(long));
        let negative = ProblemError::SequsedRange { index: 0, given: -1, capacity: 4 };
        assert_eq!(sequences.with_used(&[-1, 4]), Err(negative));
    }
}
