//! Interval masks for tests: kinds of masks, problems with them, and the family of kernels that support them. Other
//! families test the code that these kernels share with them.

use crate::Trial;
use crate::mutate::{Target, interval_targets};
use crate::{bwd, fwd};
use fa3_types::{Intervals, IntervalsOfRow, KnownProblem, Mask, ProblemSpec, SequenceRows};

pub(crate) fn trials(seed: u64) -> Vec<Trial> {
    let of_blocks = fwd::blocks::trials(seed).into_iter().chain(bwd::blocks::trials(seed));
    fwd::intervals::trials(seed).into_iter().chain(of_blocks).chain(bwd::intervals::trials(seed)).collect()
}

pub(crate) fn targets() -> Vec<Target> {
    let of_bounds = interval_targets().into_iter().chain(bwd::intervals::targets());
    of_bounds.chain(bwd::blocks::targets()).collect()
}

pub(crate) fn small() -> Vec<Trial> {
    let of_blocks = fwd::blocks::small().into_iter().chain(bwd::blocks::small());
    fwd::intervals::small().into_iter().chain(of_blocks).chain(bwd::intervals::small()).collect()
}

/// A kind of interval mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Causal within documents of some length.
    Documents,
    /// The first keys (attention sink) and a causal window.
    SinkAndWindow,
    /// Two distant spans. Their bounds differ from row to row.
    FarApart,
    /// Two intervals that meet at a key that differs from row to row.
    Meeting,
    /// Every key. The end of the interval lies beyond the last key.
    Everything,
    /// No key in the first rows and in every fifth row.
    Holes,
    /// Random bounds, some of them invalid.
    Random,
    /// Two of three sequences are causal, and the others see every key.
    Causal,
    /// Random bits of new keys, also of keys that the sequence does not have. It has no gradients.
    Tree,
}

/// The problem of these sequences under a mask of this kind, if there is one. `own` says whether sequences and heads
/// have their own intervals.
///
/// # Panics
/// If the problem is invalid.
pub(crate) fn under(
    kind: Option<Kind>,
    spec: ProblemSpec,
    rows: [SequenceRows; 2],
    own: (bool, bool),
) -> KnownProblem {
    let [rows_q, rows_k] = rows;
    match kind {
        None => spec.with_rows(rows_q, rows_k).expect("the caller's problem is valid"),
        Some(kind) => kind.of_sequences(spec, [rows_q, rows_k], own.0, own.1),
    }
}

impl Kind {
    /// Every kind.
    pub const ALL: [Kind; 9] = [
        Kind::Documents,
        Kind::SinkAndWindow,
        Kind::FarApart,
        Kind::Meeting,
        Kind::Everything,
        Kind::Holes,
        Kind::Random,
        Kind::Causal,
        Kind::Tree,
    ];

    /// All kinds but trees.
    pub(crate) const WITH_GRADIENTS: &[Kind] = Kind::ALL.split_at(Kind::ALL.len() - 1).0;

    /// The form of such a mask of `sequences` sequences.
    pub(crate) fn form(self, sequences: usize, per_sequence: bool, per_head: bool) -> Intervals {
        let of_row = match self {
            Kind::Documents | Kind::Everything | Kind::Holes => IntervalsOfRow::One,
            Kind::SinkAndWindow | Kind::FarApart | Kind::Meeting | Kind::Random => IntervalsOfRow::Two,
            // No problem has numbers of no sequences.
            Kind::Causal if sequences == 0 => IntervalsOfRow::One,
            Kind::Causal => return Intervals::of_causal(sequences),
            Kind::Tree => return Intervals::of_tree(2 + sequences % 3),
        };
        Intervals { of_row, per_sequence, per_head }
    }

    /// Bounds of row `row`. `place` is the row's index among the rows of all heads and sequences.
    fn bounds(self, row: usize, keys: usize, place: usize) -> [i32; 4] {
        let (at, end) = (row as i32, keys as i32);
        let mut number = place as u64;
        let mut random = |below: usize| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((number >> 33) % below.max(1) as u64) as i32
        };
        match self {
            Kind::Documents => {
                let first = at / 37 * 37;
                [first, at + 1, 0, 0]
            }
            Kind::SinkAndWindow => [0, 3, at - 20, at + 1],
            Kind::FarApart => [end - 9 - at % 11, end - at % 3, 1 + at % 4, 20 + at % 7],
            Kind::Meeting => {
                let middle = end / 2 - at % 5;
                [at % 3 - 1, middle, middle + at % 2, i32::MAX]
            }
            Kind::Everything => [i32::MIN, i32::MAX, 0, 0],
            Kind::Holes if row < 70 || row % 5 == 1 => [at, at - 1, 0, 0],
            Kind::Holes => [end / 3 + at % 5, end - at % 9, 0, 0],
            Kind::Random => [(); 4].map(|()| match random(9) {
                0 => i32::MIN + random(5),
                1 => i32::MAX - random(5),
                2 => -random(keys),
                _ => random(keys + 5),
            }),
            Kind::Tree => [(); 4].map(|()| random(usize::MAX) ^ -random(2)),
            // One number of a sequence, in place of bounds.
            Kind::Causal => [[1, 0, -1][(row + place) % 3], 0, 0, 0],
        }
    }

    /// The problem of dense sequences under a mask of this kind. `per_sequence` and `per_head` say whether sequences
    /// and heads have their own intervals.
    ///
    /// # Panics
    /// If the problem is invalid.
    pub fn of(self, spec: ProblemSpec, per_sequence: bool, per_head: bool) -> KnownProblem {
        let rows = [spec.q, spec.k].map(|x| SequenceRows::dense(x.shape.batch, x.shape.seqlen));
        self.of_sequences(spec, rows, per_sequence, per_head)
    }

    /// The problem of these sequences under a mask of this kind. Bounds follow from a row's index and the keys in its
    /// sequence; a dense batch that shares its intervals has the bounds of the first sequence.
    ///
    /// # Panics
    /// If the problem is invalid.
    pub fn of_sequences(
        self,
        spec: ProblemSpec,
        [rows_q, rows_k]: [SequenceRows; 2],
        per_sequence: bool,
        per_head: bool,
    ) -> KnownProblem {
        let problem = spec
            .mask(Mask::of_intervals(self.form(rows_q.count(), per_sequence, per_head)))
            .validate()
            .expect("the caller's problem is valid");
        let form = problem.mask().intervals().expect("it has intervals");
        let [batch, heads, rows, numbers] = match form.shape(problem.q().shape) {
            [batch, rows, words, 1] if self == Kind::Tree => [batch, 1, rows, words],
            of_bounds => of_bounds,
        };
        // The sequence of a row, and the row's index in it. Rows behind all sequences have any bounds.
        let place = |entry: usize, row: usize| {
            let sequence = (0..rows_q.count()).rfind(|&index| rows_q.start(index) <= (entry, row));
            sequence.map_or((0, row), |index| (rows_k.len(index), row - rows_q.start(index).1))
        };
        let mut bounds = Vec::new();
        let has_rows = !matches!(form.of_row, IntervalsOfRow::Causal { .. });
        if !has_rows {
            bounds.extend((0..batch).map(|index| self.bounds(index, 0, problem.q().shape.seqlen)[0]));
        }
        let places = (0..batch * heads).flat_map(|of| (0..rows).map(move |row| (of, row)));
        for (of, row) in places.filter(|_| has_rows) {
            let (keys, row_of_sequence) = place(of / heads, row);
            // Each further head shifts its bounds by some rows.
            let numbers_of_row = self.bounds(row_of_sequence + of * 5, keys, of * rows + row);
            bounds.extend_from_slice(&numbers_of_row[..numbers]);
        }
        let known = KnownProblem::with_intervals(problem, rows_q, rows_k, bounds);
        known.expect("every row has its bounds")
    }
}
