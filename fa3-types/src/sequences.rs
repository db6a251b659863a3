//! How the sequences of a batch lie in their tensor, as planning may know it.

/// The sequences of Q, or of K and V: dense (batch, seqlen, …), or packed one after the other into (1, total, …).
///
/// It says nothing of lengths, which are data: `cu_seqlens` says where packed sequences begin, `seqused` how many rows
/// of each are in use. A GPU reads both from its own memory, and the host has them as [`SequenceRows`]. Problems and
/// plans are the same for all lengths.
///
/// [`SequenceRows`]: crate::SequenceRows
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Sequences {
    layout: Layout,
    used: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Layout {
    Dense { batch: usize, seqlen: usize },
    Packed { count: usize, longest: Option<usize> },
}

impl Sequences {
    /// `batch` sequences of `seqlen` rows each.
    pub fn dense(batch: usize, seqlen: usize) -> Sequences {
        Sequences { layout: Layout::Dense { batch, seqlen }, used: false }
    }

    /// `count` sequences packed into one tensor.
    pub fn packed(count: usize) -> Sequences {
        Sequences { layout: Layout::Packed { count, longest: None }, used: false }
    }

    /// Gives a hint of the longest packed sequence's rows. It decides how a problem is computed. A wrong one costs
    /// speed, and changes no result beyond its rounding. Dense sequences need none.
    #[must_use]
    pub fn longest(mut self, rows: usize) -> Sequences {
        if let Layout::Packed { longest, .. } = &mut self.layout {
            *longest = Some(rows);
        }
        self
    }

    /// Says that only the first rows of each sequence are in use, as many as `seqused` says.
    #[must_use]
    pub fn used(self) -> Sequences {
        Sequences { used: true, ..self }
    }

    /// Number of sequences.
    pub fn count(self) -> usize {
        match self.layout {
            Layout::Dense { batch: count, .. } | Layout::Packed { count, .. } => count,
        }
    }

    /// Whether the sequences are packed into a tensor of batch 1.
    pub fn is_packed(self) -> bool {
        matches!(self.layout, Layout::Packed { .. })
    }

    /// Whether `seqused` says how many rows of each sequence are in use.
    pub fn has_used(self) -> bool {
        self.used
    }

    /// Rows of a dense sequence.
    pub fn seqlen(self) -> Option<usize> {
        match self.layout {
            Layout::Dense { seqlen, .. } => Some(seqlen),
            Layout::Packed { .. } => None,
        }
    }

    /// About the rows of the longest sequence, if the tensor has `rows`: the hint, or the mean where there is none.
    pub(crate) fn longest_of(self, rows: usize) -> usize {
        match self.layout {
            Layout::Dense { batch: 0, .. } => 0,
            Layout::Dense { seqlen, .. } => seqlen,
            Layout::Packed { count, longest } => longest.unwrap_or(rows.div_ceil(count.max(1))).min(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planning_knows_no_lengths() {
        let dense = Sequences::dense(3, 5);
        assert_eq!((dense.count(), dense.seqlen(), dense.longest_of(5)), (3, Some(5), 5));
        assert_eq!((dense.longest(1), Sequences::dense(0, 5).longest_of(5)), (dense, 0));
        let packed = Sequences::packed(3);
        assert_eq!((packed.count(), packed.seqlen(), packed.longest_of(100)), (3, None, 34));
        assert_eq!([60, 200].map(|hint| packed.longest(hint).longest_of(100)), [60, 100]);
        assert_eq!(Sequences::packed(0).longest_of(7), 7);
        assert!(packed.used().has_used() && !packed.has_used());
    }
}
