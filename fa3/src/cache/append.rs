//! Appends to a cache, and rotations, on the CPU.

use std::collections::HashMap;

use fa3_types::{AppendSpec, AppendedRows, QueryPositions, SequenceRows};
use ndarray::{Array4, ArrayView2, ArrayView4, ArrayViewMut4, Axis};

use super::new_rows::Rotation;
use super::{CacheError, CacheView, CacheViewMut, Held, NewRows};
use crate::attention::contiguous;
use crate::cpu::rows::{widen, write};
use crate::{Error, Scalar};

/// New rows and their places in a cache, after validation.
pub(super) struct Appending<'n> {
    /// The rows of the cache before the append, and pages for the new rows.
    held: Held,
    /// The new rows of each sequence.
    rows: SequenceRows,
    /// The rotation of new keys and of queries.
    pub(super) rotation: Option<Rotation<'n>>,
}

impl<T: Scalar> CacheViewMut<'_, T> {
    /// Appends new rows on the CPU, without attention. The cache is unchanged if there is an error.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn append(&mut self, new: &NewRows<'_, T>) -> Result<(), Error> {
        let (rows, view) = (new.rows()?, self.view());
        let [k_new, v_new] = new.tensors().map(|x| contiguous(&x));
        let [k_cache, v_cache] = [&view.k, &view.v].map(contiguous);
        let of_new = rows.sequences();
        let appended = AppendedRows { k_new, v_new, new: of_new, k_cache, v_cache, cache: view.sequences(0) };
        let mut spec = AppendSpec::new(appended);
        spec.rotary = new.rotary_spec()?;
        spec.validate()?;
        Appending::new(&view, new, rows)?.write(new, [None; 2], self);
        Ok(())
    }
}

impl<'n> Appending<'n> {
    /// Places the new rows of each sequence of the cache.
    ///
    /// # Errors
    /// The first invalid list, a row without a place, two rows with one place, or a position outside of the tables.
    pub(super) fn new<T: Scalar, C>(
        cache: &CacheView<'_, C>,
        new: &NewRows<'n, T>,
        rows: SequenceRows,
    ) -> Result<Appending<'n>, CacheError> {
        let held = cache.held(|sequence| rows.len(sequence))?;
        let rotation = new.rotation(&held.used)?;
        if let Some(rotation) = &rotation {
            rotation.check(&rows, QueryPositions::Each)?;
        }
        let appending = Appending { held, rows, rotation };
        appending.check_places()?;
        Ok(appending)
    }

    /// The rows of the cache, with the new rows.
    pub(super) fn held_after(&self) -> Held {
        let after = |lens: &[usize]| lens.iter().enumerate().map(|(i, len)| len + self.rows.len(i)).collect();
        Held { lens: after(&self.held.lens), used: after(&self.held.used), ..self.held.clone() }
    }

    /// Writes the new rows, divided by their scales, if any, and adds the number of new rows to each sequence's length.
    pub(super) fn write<T: Scalar, C: Scalar>(
        &self,
        new: &NewRows<'_, T>,
        [of_k, of_v]: [Option<ArrayView2<'_, f32>>; 2],
        cache: &mut CacheViewMut<'_, C>,
    ) {
        self.write_to(new.k, self.rotation.as_ref(), of_k, cache.k.view_mut());
        self.write_to(new.v, None, of_v, cache.v.view_mut());
        self.count_in(cache);
    }

    /// Adds the number of new rows to each sequence's length.
    pub(super) fn count_in<C>(&self, cache: &mut CacheViewMut<'_, C>) {
        for (sequence, used) in cache.cache_seqlens.iter_mut().enumerate() {
            // The sum is at most the capacity, which is below 2^31 in a valid problem.
            *used = (self.held.used[sequence] + self.rows.len(sequence)) as i32;
        }
    }

    /// Checks that no two of the new rows share a place.
    fn check_places(&self) -> Result<(), CacheError> {
        let mut taken = HashMap::new();
        for (second, row) in numbered(&self.rows) {
            let (entry, row) = self.place(second, row);
            if let Some(first) = taken.insert((entry, row), second) {
                return Err(CacheError::SamePlace { first, second, entry, row });
            }
        }
        Ok(())
    }

    /// The cache entry, and the row in it, of new row `row` of a sequence.
    fn place(&self, sequence: usize, row: usize) -> (usize, usize) {
        self.held.place(sequence, self.held.lens[sequence] + row)
    }

    /// Writes rows of `new` (batch, seqlen, heads, columns) to K or V.
    fn write_to<T: Scalar, C: Scalar>(
        &self,
        new: ArrayView4<'_, T>,
        rotation: Option<&Rotation<'_>>,
        scales: Option<ArrayView2<'_, f32>>,
        mut cache: ArrayViewMut4<'_, C>,
    ) {
        let mut buffer = vec![0.0; new.len_of(Axis(3))];
        for (sequence, row) in numbered(&self.rows) {
            let ((batch, first), (entry, at)) = (self.rows.start(sequence), self.place(sequence, row));
            let from = new.index_axis(Axis(0), batch).index_axis_move(Axis(0), first + row);
            let mut to = cache.view_mut().index_axis_move(Axis(0), entry).index_axis_move(Axis(0), at);
            for (head, (from, to)) in from.rows().into_iter().zip(to.rows_mut()).enumerate() {
                widen(from, &mut buffer);
                if let Some(rotation) = rotation {
                    rotation.table.apply(&mut buffer, rotation.base[sequence] + row);
                }
                if C::DTYPE != T::DTYPE {
                    // Only rows whose type is not the cache's are divided by scales.
                    let scale = scales.map_or(1.0, |scales| scales[[sequence, head]]);
                    buffer.iter_mut().for_each(|x| *x = T::from_f32(*x).to_f32() / scale);
                }
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

    /// A copy of `x` in which the rows of the sequences are rotated.
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

/// The rows of all sequences, as pairs of a sequence and a row index within the sequence.
fn numbered(rows: &SequenceRows) -> impl Iterator<Item = (usize, usize)> {
    (0..rows.count()).flat_map(|sequence| (0..rows.len(sequence)).map(move |row| (sequence, row)))
}
