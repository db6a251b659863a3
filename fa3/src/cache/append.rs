//! Appends to a cache, and rotations, on the CPU.

use std::collections::HashMap;

use fa3_types::{QueryPositions, SequenceRows};
use ndarray::{Array4, ArrayView4, ArrayViewMut4, Axis};

use super::new_rows::Rotation;
use super::{CacheError, Held};
use crate::Scalar;
use crate::cpu::rows::{widen, write};

impl Held {
    /// The entry of the cache, and the row there, of new row `row` of a sequence.
    fn place(&self, sequence: usize, row: usize) -> (usize, usize) {
        let (entries, _) = self.pages.of(sequence);
        let (at, page_rows) = (self.used[sequence] + row, self.capacity / self.pages.each);
        (entries[at / page_rows], at % page_rows)
    }

    /// Checks that no two of these new rows go to one place.
    pub(super) fn check_places(&self, rows: &SequenceRows) -> Result<(), CacheError> {
        let mut taken = HashMap::new();
        for (second, row) in numbered(rows) {
            let (entry, row) = self.place(second, row);
            if let Some(first) = taken.insert((entry, row), second) {
                return Err(CacheError::SamePlace { first, second, entry, row });
            }
        }
        Ok(())
    }

    /// Puts rows of `new` (batch, seqlen, heads, columns) into K or V, rotated if there is a rotation.
    pub(super) fn append<T: Scalar>(
        &self,
        new: ArrayView4<'_, T>,
        rows: &SequenceRows,
        rotation: Option<&Rotation<'_>>,
        mut cache: ArrayViewMut4<'_, T>,
    ) {
        let mut buffer = vec![0.0; new.len_of(Axis(3))];
        for (sequence, row) in numbered(rows) {
            let ((batch, first), (entry, at)) = (rows.start(sequence), self.place(sequence, row));
            let from = new.index_axis(Axis(0), batch).index_axis_move(Axis(0), first + row);
            let mut to = cache.view_mut().index_axis_move(Axis(0), entry).index_axis_move(Axis(0), at);
            let Some(rotation) = rotation else {
                to.assign(&from);
                continue;
            };
            for (from, to) in from.rows().into_iter().zip(to.rows_mut()) {
                widen(from, &mut buffer);
                rotation.table.apply(&mut buffer, rotation.base[sequence] + row);
                write(to, &buffer);
            }
        }
    }
}

impl Rotation<'_> {
    /// Checks that the tables have the positions of all rows.
    pub(super) fn check(&self, rows: &SequenceRows, positions: QueryPositions) -> Result<(), CacheError> {
        let last = |sequence: usize| match (rows.len(sequence), positions) {
            (0, _) => None,
            (_, QueryPositions::First) => Some(self.base[sequence]),
            (rows, QueryPositions::Each) => Some(self.base[sequence] + rows - 1),
        };
        let positions = self.table.positions();
        let beyond = |sequence| Some((sequence, last(sequence).filter(|&last| last >= positions)?));
        match (0..rows.count()).find_map(beyond) {
            Some((sequence, last)) => Err(CacheError::Position { sequence, last, positions }),
            None => Ok(()),
        }
    }

    /// The rows of sequences, rotated; others as they are.
    pub(super) fn rotated<T: Scalar>(
        &self,
        x: ArrayView4<'_, T>,
        rows: &SequenceRows,
        positions: QueryPositions,
    ) -> Array4<T> {
        let mut rotated = x.to_owned();
        let mut buffer = vec![0.0; x.len_of(Axis(3))];
        for (sequence, row) in numbered(rows) {
            let (batch, first) = rows.start(sequence);
            let behind = if positions == QueryPositions::Each { row } else { 0 };
            let heads = rotated.view_mut().index_axis_move(Axis(0), batch);
            for row in heads.index_axis_move(Axis(0), first + row).rows_mut() {
                widen(row.view(), &mut buffer);
                self.table.apply(&mut buffer, self.base[sequence] + behind);
                write(row, &buffer);
            }
        }
        rotated
    }
}

/// The rows of all sequences: a sequence, and a row's number in it.
fn numbered(rows: &SequenceRows) -> impl Iterator<Item = (usize, usize)> {
    (0..rows.count()).flat_map(|sequence| (0..rows.len(sequence)).map(move |row| (sequence, row)))
}
