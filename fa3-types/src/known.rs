//! A problem with host-side lengths.

use std::fmt;
use std::iter;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::mask::keys_of_row;
use crate::{
    IntervalRows, Lengths, Mask, Problem, ProblemError, ScoreFunction, SequenceRows, Sequences, TensorName,
};

/// A problem, the rows of its sequences and, under a mask of intervals, the intervals of its rows: all that attention
/// on the host needs. It dereferences to the [`Problem`], which is all that planning needs.
///
/// ```
/// use fa3_types::{Dtype, ProblemSpec, SequenceRows};
///
/// let rows = SequenceRows::packed(&[0, 3, 10])?;
/// let problem = ProblemSpec::packed(Dtype::F16, (4, 2), 64, &rows, &rows).causal().with_rows(rows.clone(), rows)?;
/// assert_eq!((problem.lengths(1).q, problem.q().shape.seqlen), (7, 10));
/// # Ok::<(), fa3_types::ProblemError>(())
/// ```
#[derive(Clone, Debug)]
pub struct KnownProblem {
    problem: Problem,
    rows_q: SequenceRows,
    rows_k: SequenceRows,
    intervals: Option<IntervalRows>,
    score: Option<ScoreFunction>,
}

impl KnownProblem {
    /// Adds the rows of a problem's sequences to it.
    ///
    /// # Errors
    /// [`ProblemError::OtherSequences`] if the rows belong to another problem, [`ProblemError::CuSeqlensEnd`] if they
    /// do not lie within the tensors, [`ProblemError::UnknownIntervals`] if the mask is one of intervals,
    /// [`ProblemError::UnknownScore`] if there is a function of scores, whose values are given apart.
    pub fn new(
        problem: Problem,
        rows_q: SequenceRows,
        rows_k: SequenceRows,
    ) -> Result<KnownProblem, ProblemError> {
        match problem.mask().intervals() {
            Some(_) => Err(ProblemError::UnknownIntervals),
            None => KnownProblem::of(problem, [rows_q, rows_k], None),
        }
    }

    /// Adds the rows of a problem's sequences to it, and the bounds of its intervals, in the order of their tensor
    /// ([`Intervals`](crate::Intervals)).
    ///
    /// ```
    /// use fa3_types::{Dtype, Intervals, KnownProblem, Mask, ProblemSpec, SequenceRows};
    ///
    /// // Two sequences of 2 and 3 rows. In each the last row sees the first key, and other rows see no key.
    /// let rows = SequenceRows::packed(&[0, 2, 5])?;
    /// let spec = ProblemSpec::packed(Dtype::F16, (4, 2), 64, &rows, &rows);
    /// let form = Intervals::of_shape([1, 1, 5, 2], spec.q.shape)?;
    /// let problem = spec.mask(Mask::of_intervals(form)).validate()?;
    /// let bounds = [0, 0, 0, 1, 0, 0, 0, 0, 0, 1];
    /// let problem = KnownProblem::with_intervals(problem, rows.clone(), rows, bounds)?;
    /// assert!(problem.allows([1, 3, 2], 0) && !problem.allows([1, 3, 1], 0));
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`KnownProblem::new`], except the one of the mask. [`ProblemError::NoIntervals`] if the mask has
    /// none, [`ProblemError::IntervalsCount`] if the number of bounds is wrong.
    pub fn with_intervals(
        problem: Problem,
        rows_q: SequenceRows,
        rows_k: SequenceRows,
        bounds: impl Into<Arc<[i32]>>,
    ) -> Result<KnownProblem, ProblemError> {
        let mask = problem.mask();
        let form = mask.intervals().ok_or(ProblemError::NoIntervals { mask })?;
        let intervals = IntervalRows::new(form, problem.q().shape, bounds)?;
        KnownProblem::of(problem, [rows_q, rows_k], Some(intervals))
    }

    fn of(
        problem: Problem,
        [rows_q, rows_k]: [SequenceRows; 2],
        intervals: Option<IntervalRows>,
    ) -> Result<KnownProblem, ProblemError> {
        let sides = [
            (TensorName::Q, problem.seqs_q(), problem.q().shape.seqlen, &rows_q),
            (TensorName::K, problem.seqs_k(), problem.k().shape.seqlen, &rows_k),
        ];
        for (tensor, sequences, seqlen, rows) in sides {
            let facts = |of: Sequences| (of.count(), of.seqlen(), of.has_used(), of.is_cache());
            if facts(sequences) != facts(rows.sequences()) {
                return Err(ProblemError::OtherSequences { tensor });
            }
            if rows.end() > seqlen {
                return Err(ProblemError::CuSeqlensEnd { tensor, given: rows.end(), rows: seqlen });
            }
        }
        match problem.score() {
            Some(_) => Err(ProblemError::UnknownScore),
            None => Ok(KnownProblem { problem, rows_q, rows_k, intervals, score: None }),
        }
    }

    /// This problem with a function of scores, in place of any other one.
    ///
    /// ```
    /// use fa3_types::{Dtype, Feature, ProblemSpec, ScoreFunction, Shape};
    ///
    /// let shape = Shape { batch: 1, seqlen: 64, heads: 2, head_dim: 64 };
    /// let distance = ScoreFunction::parse("s + (k - q) / 8", [])?;
    /// let problem = ProblemSpec::dense(Dtype::F16, shape, shape).known()?.with_score(&distance);
    /// assert!(problem.features().any(|feature| feature == Feature::Score));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_score(self, function: &ScoreFunction) -> KnownProblem {
        let problem = self.problem.scored(function.form().clone());
        KnownProblem { problem, score: Some(function.clone()), ..self }
    }

    /// The function of scores, if the problem has one.
    pub fn score_function(&self) -> Option<&ScoreFunction> {
        self.score.as_ref()
    }

    /// The intervals of rows, if the mask is one of intervals.
    pub fn intervals(&self) -> Option<&IntervalRows> {
        self.intervals.as_ref()
    }

    /// The keys that query row `row` of a sequence and a head sees under a mask of intervals, as disjoint ranges in
    /// order; `None` if the mask is not one of intervals. Rows and keys are counted from 0 within the sequence.
    ///
    /// # Panics
    /// If the tensor has no such row.
    pub fn intervals_of_row(&self, at @ [sequence, _, row]: [usize; 3]) -> Option<Vec<Range<usize>>> {
        let seen = keys_of_row(self.mask(), row, self.lengths(sequence));
        let cut = |keys: Range<usize>| {
            let start = keys.start.clamp(seen.start, seen.end);
            start..keys.end.clamp(start, seen.end)
        };
        self.bounds_of_row(at).map(|ranges| ranges.into_iter().map(cut).collect())
    }

    /// The intervals of a row.
    fn bounds_of_row(&self, [sequence, head, row]: [usize; 3]) -> Option<Vec<Range<usize>>> {
        let (intervals, len) = (self.intervals.as_ref()?, self.lengths(sequence));
        if let Some(is_causal) = intervals.is_causal(sequence) {
            let mask = if is_causal { Mask::Causal } else { Mask::None };
            return Some(vec![keys_of_row(mask, row, len)]);
        }
        let (entry, first) = self.rows_q.start(sequence);
        if let Some(words) = intervals.words([entry, first + row]) {
            let has_bit = |new: usize| words.get(new / 32).is_some_and(|word| word >> (new % 32) & 1 == 1);
            // New key i is key len.k - len.q + i, if the sequence has this key.
            let seen =
                (0..len.q).filter(|&new| has_bit(new)).filter_map(|new| (new + len.k).checked_sub(len.q));
            let older = 0..len.k.saturating_sub(len.q);
            return Some(iter::once(older).chain(seen.map(|key| key..key + 1)).collect());
        }
        let at = [entry, head, first + row];
        if let Some((words, side)) = intervals.block_words(at) {
            let has_bit =
                |block: &usize| words.get(block / 32).is_some_and(|word| word >> (block % 32) & 1 == 1);
            let blocks = (0..len.k.div_ceil(side)).filter(has_bit);
            let keys = |block: usize| block * side..((block + 1) * side).min(len.k);
            return Some(blocks.map(keys).collect());
        }
        Some(intervals.of_row(at, len.k).into())
    }

    /// Whether query row `row` of a sequence and a head sees key `key`. Rows are counted from 0 within the sequence.
    pub fn allows(&self, at @ [sequence, _, row]: [usize; 3], key: usize) -> bool {
        let len = self.lengths(sequence);
        if row >= len.q {
            return false;
        }
        let is_in_one = |ranges: Vec<Range<usize>>| ranges.iter().any(|keys| keys.contains(&key));
        self.mask().allows(row, key, len) && self.bounds_of_row(at).is_none_or(is_in_one)
    }

    /// The rows of the sequences of Q and O.
    pub fn rows_q(&self) -> &SequenceRows {
        &self.rows_q
    }

    /// The rows of the sequences of K and V.
    pub fn rows_k(&self) -> &SequenceRows {
        &self.rows_k
    }

    /// Query and key lengths of sequence `index`.
    pub fn lengths(&self, index: usize) -> Lengths {
        Lengths { q: self.rows_q.len(index), k: self.rows_k.len(index) }
    }

    /// [`Problem::padded`], with these rows.
    #[must_use]
    pub fn padded(&self) -> KnownProblem {
        KnownProblem { problem: self.problem.padded(), ..self.clone() }
    }

    /// [`Problem::joined`], with these rows.
    #[must_use]
    pub fn joined(&self) -> KnownProblem {
        KnownProblem { problem: self.problem.joined(), ..self.clone() }
    }
}

impl Deref for KnownProblem {
    type Target = Problem;

    fn deref(&self) -> &Problem {
        &self.problem
    }
}

impl fmt::Display for KnownProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.problem.describe(f, (self.rows_q.count() == 1).then(|| self.lengths(0)))
    }
}

impl Problem {
    /// The problem with its lengths, if the shapes of its dense sequences determine them.
    ///
    /// # Errors
    /// [`ProblemError::UnknownLengths`] if sequences are packed, have `seqused`, or are in a cache.
    pub fn known(&self) -> Result<KnownProblem, ProblemError> {
        let [rows_q, rows_k] = self.dense_rows()?;
        KnownProblem::new(self.clone(), rows_q, rows_k)
    }

    /// The rows of Q and of K, if the shapes of dense sequences determine them.
    fn dense_rows(&self) -> Result<[SequenceRows; 2], ProblemError> {
        let rows = |tensor, sequences: Sequences| match sequences.seqlen() {
            Some(seqlen) if sequences.are_equal() => Ok(SequenceRows::dense(sequences.count(), seqlen)),
            _ => Err(ProblemError::UnknownLengths { tensor }),
        };
        Ok([rows(TensorName::Q, self.seqs_q())?, rows(TensorName::K, self.seqs_k())?])
    }

    /// The problem with the bounds of its intervals, in the order of their tensor ([`Intervals`](crate::Intervals)), if
    /// the shapes of its dense sequences determine its lengths. For others see [`KnownProblem::with_intervals`].
    ///
    /// ```
    /// use fa3_types::{Dtype, Intervals, Mask, ProblemSpec, Shape};
    ///
    /// // Two documents of three keys each; all heads have the same intervals.
    /// let shape = Shape { batch: 1, seqlen: 6, heads: 4, head_dim: 64 };
    /// let mask = Mask::of_intervals(Intervals::of_shape([1, 1, 6, 2], shape)?);
    /// let problem = ProblemSpec::dense(Dtype::F16, shape, shape).mask(mask).validate()?;
    /// let problem = problem.known_intervals([0, 3, 0, 3, 0, 3, 3, 6, 3, 6, 3, 6])?;
    /// assert!(problem.allows([0, 2, 1], 2) && !problem.allows([0, 2, 1], 3));
    /// # Ok::<(), fa3_types::ProblemError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`KnownProblem::with_intervals`], and [`ProblemError::UnknownLengths`].
    pub fn known_intervals(&self, bounds: impl Into<Arc<[i32]>>) -> Result<KnownProblem, ProblemError> {
        let [rows_q, rows_k] = self.dense_rows()?;
        KnownProblem::with_intervals(self.clone(), rows_q, rows_k, bounds)
    }
}
