//! Rotary embedding, incoherent processing and quantization in one pass over memory (§3.3).

use fa3_types::{SequenceRows, Shape};
use ndarray::ArrayView4;

use crate::head::head;
use crate::{Granularity, Incoherent, QuantError, Quantized, RopeTable, RowIndex};

/// Preparation of a tensor for e4m3: rotation, then transform, then quantization.
///
/// Every row is read once. The rows that share a scale stay in a scratch buffer between the search for the largest
/// magnitude and the encoding. With [`Granularity::Block`] these are a few thousand numbers. So the paper can attach
/// quantization to the rotary embedding "with no additional slow down".
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Preparation<'a> {
    /// Rotation of each row by its position.
    pub rotation: Option<Rotation<'a>>,
    /// Random orthogonal transform of each row; give Q and K the same transform.
    pub incoherent: Option<&'a Incoherent>,
    /// The elements that share a scale.
    pub granularity: Granularity,
    /// The given scale, if any. Numbers beyond 448 times this scale saturate.
    pub scale: Option<f32>,
}

/// Rotary embedding with its positions.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// The cosines and sines of all positions.
    pub table: &'a RopeTable,
    /// The positions of the rows. A row whose position is outside of the table becomes NaN.
    pub positions: RowPositions<'a>,
}

/// The positions of rows.
#[derive(Clone, Copy, Debug)]
pub enum RowPositions<'a> {
    /// The position of each sequence's first row, from which the positions of its other rows count up.
    First(&'a [usize]),
    /// A position for every row of a tensor (batch, seqlen), in the order of memory. A negative position is outside of
    /// any table.
    Each(&'a [i32]),
}

impl<'a> Preparation<'a> {
    /// Quantization without rotation and transform.
    pub fn new(granularity: Granularity) -> Preparation<'a> {
        Preparation { rotation: None, incoherent: None, granularity, scale: None }
    }

    /// Quantization by a given scale.
    pub fn with_scale(scale: f32) -> Preparation<'a> {
        Preparation { scale: Some(scale), ..Preparation::new(Granularity::Tensor) }
    }

    /// Rotates each row first.
    #[must_use]
    pub fn rotation(self, rotation: Rotation<'a>) -> Preparation<'a> {
        Preparation { rotation: Some(rotation), ..self }
    }

    /// Transforms each row before it is quantized; give Q and K the same transform.
    #[must_use]
    pub fn incoherent(self, transform: &'a Incoherent) -> Preparation<'a> {
        Preparation { incoherent: Some(transform), ..self }
    }

    /// Prepares a tensor (batch, seqlen, heads, head_dim), batch 1 for packed sequences.
    ///
    /// # Errors
    /// If the sequences do not lie within the tensor, the rotation or the transform does not fit its head
    /// dimension, or a block has no rows: see [`QuantError`].
    pub fn quantize(
        &self,
        x: ArrayView4<'_, f32>,
        sequences: &SequenceRows,
    ) -> Result<Quantized, QuantError> {
        let (batch, seqlen, heads, head_dim) = x.dim();
        self.quantize_rows(Shape { batch, seqlen, heads, head_dim }, sequences, |at, row| {
            let (batch, first) = sequences.start(at.sequence);
            let source = head(x, batch, at.head);
            row.iter_mut().zip(source.row(first + at.row)).for_each(|(to, from)| *to = *from);
        })
    }

    /// Prepares a tensor of this shape whose rows come from `read`, called once for each row in use.
    ///
    /// # Errors
    /// The errors of [`Preparation::quantize`].
    pub fn quantize_rows(
        &self,
        shape: Shape,
        sequences: &SequenceRows,
        read: impl Fn(RowIndex, &mut [f32]) + Sync,
    ) -> Result<Quantized, QuantError> {
        self.check(shape, sequences)?;
        Quantized::from_rows(shape, sequences, self.granularity, self.scale, |at, values| {
            read(at, values);
            if let Some(Rotation { table, positions }) = self.rotation {
                table.apply(values, position(positions, shape, sequences, at));
            }
            if let Some(incoherent) = self.incoherent {
                incoherent.apply(values);
            }
        })
    }

    fn check(&self, shape: Shape, sequences: &SequenceRows) -> Result<(), QuantError> {
        let head_dim = shape.head_dim;
        if let Some(Rotation { table, positions }) = self.rotation {
            let rows = shape.batch * shape.seqlen;
            match positions {
                RowPositions::First(first) if first.len() != sequences.count() => {
                    let (given, sequences) = (first.len(), sequences.count());
                    return Err(QuantError::PositionCount { given, sequences });
                }
                RowPositions::Each(each) if each.len() != rows => {
                    return Err(QuantError::PositionRows { given: each.len(), rows });
                }
                RowPositions::First(_) | RowPositions::Each(_) => {}
            }
            let rotary_dim = table.rotary_dim();
            if rotary_dim > head_dim {
                return Err(QuantError::RotaryDimTooLarge { rotary_dim, head_dim });
            }
        }
        match self.incoherent.map(Incoherent::head_dim) {
            Some(given) if given != head_dim => Err(QuantError::TransformDim { given, expected: head_dim }),
            _ => Ok(()),
        }
    }
}

/// The position of a row. A negative position becomes a number outside of any table.
fn position(positions: RowPositions<'_>, shape: Shape, sequences: &SequenceRows, at: RowIndex) -> usize {
    match positions {
        RowPositions::First(first) => first[at.sequence] + at.row,
        RowPositions::Each(each) => {
            let (batch, first) = sequences.start(at.sequence);
            usize::try_from(each[batch * shape.seqlen + first + at.row]).unwrap_or(usize::MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;
    use crate::testing::tensor;
    use crate::{Rope, RopeStyle};

    const SHAPE: Shape = Shape { batch: 1, seqlen: 90, heads: 3, head_dim: 48 };
    const GRANULARITIES: [Granularity; 3] =
        [Granularity::Tensor, Granularity::Head, Granularity::Block { rows: 16 }];

    fn sequences() -> SequenceRows {
        SequenceRows::packed(&[0, 40, 40, 85]).unwrap().with_used(&[33, 0, 45]).unwrap()
    }

    #[test]
    fn one_pass_gives_what_three_passes_give() {
        let (x, sequences) = (tensor(SHAPE, 1), sequences());
        let incoherent = Incoherent::new(48, 7);
        for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
            let rope = Rope::new(style, 32, 10_000.0).unwrap();
            let (table, first_positions) = (rope.table(200), [100, 0, 3]);
            let mut each = [-1; 90];
            for (sequence, first) in first_positions.into_iter().enumerate() {
                let start = sequences.start(sequence).1;
                (0..sequences.len(sequence)).for_each(|row| each[start + row] = (first + row) as i32);
            }
            let mut separate = x.clone();
            for (sequence, position) in first_positions.into_iter().enumerate() {
                let first = sequences.start(sequence).1;
                for (row, head) in (0..sequences.len(sequence)).flat_map(|row| (0..3).map(move |h| (row, h)))
                {
                    let mut values: Vec<f32> = (0..48).map(|d| x[[0, first + row, head, d]]).collect();
                    rope.apply(&mut values, position + row);
                    incoherent.apply(&mut values);
                    (0..48).for_each(|d| separate[[0, first + row, head, d]] = values[d]);
                }
            }
            for granularity in GRANULARITIES {
                let expected = Preparation::new(granularity).quantize(separate.view(), &sequences).unwrap();
                for positions in [RowPositions::First(&first_positions), RowPositions::Each(&each)] {
                    let rotation = Rotation { table: &table, positions };
                    let fused = Preparation::new(granularity).rotation(rotation).incoherent(&incoherent);
                    assert_eq!(fused.quantize(x.view(), &sequences).unwrap(), expected);
                }
            }
        }
    }

    #[test]
    fn rows_at_no_position_are_nan_and_leave_their_neighbours_alone() {
        let shape = Shape { seqlen: 4, ..SHAPE };
        let (x, sequences) = (tensor(shape, 1), SequenceRows::dense(1, 4));
        let table = Rope::new(RopeStyle::HalfSplit, 32, 10_000.0).unwrap().table(10);
        let rotation = Rotation { table: &table, positions: RowPositions::Each(&[3, -1, 10, 4]) };
        let quantized = Preparation::new(Granularity::Head).rotation(rotation).quantize(x.view(), &sequences);
        let quantized = quantized.unwrap();
        for ((_, row, ..), code) in quantized.codes().indexed_iter() {
            assert_eq!(code.is_nan(), [1, 2].contains(&row));
        }
        assert!(quantized.scales().values().iter().all(|&scale| scale > 0.0 && scale < 1.0));
    }

    #[test]
    fn a_given_scale_is_kept_and_larger_numbers_saturate() {
        let (mut x, sequences) = (tensor(SHAPE, 1), SequenceRows::dense(1, 90));
        (x[[0, 3, 1, 4]], x[[0, 5, 1, 4]]) = (-1e30, f32::INFINITY);
        let quantized = Preparation::with_scale(0.25).quantize(x.view(), &sequences).unwrap();
        assert_eq!(quantized.scales().values(), [0.25]);
        assert_eq!(quantized.codes()[[0, 3, 1, 4]].to_f32(), -448.0);
        assert!(quantized.codes()[[0, 5, 1, 4]].is_nan());
        let near = crate::E4m3::from_f32(x[[0, 7, 2, 9]] / 0.25);
        assert_eq!(quantized.codes()[[0, 7, 2, 9]], near);
    }

    #[test]
    fn every_row_in_use_is_read_once_and_no_other() {
        let (sequences, incoherent) = (sequences(), Incoherent::new(48, 7));
        for granularity in GRANULARITIES {
            let reads = Mutex::new(BTreeMap::new());
            let preparation = Preparation { incoherent: Some(&incoherent), ..Preparation::new(granularity) };
            let read = |at: RowIndex, row: &mut [f32]| {
                *reads.lock().unwrap().entry(at).or_insert(0) += 1;
                row.fill(1.0);
            };
            preparation.quantize_rows(SHAPE, &sequences, read).unwrap();
            let in_use = |sequence| {
                let rows = 0..sequences.len(sequence);
                rows.flat_map(move |row| (0..3).map(move |head| (RowIndex { sequence, row, head }, 1)))
            };
            let expected: BTreeMap<RowIndex, i32> = (0..3).flat_map(in_use).collect();
            assert_eq!(reads.into_inner().unwrap(), expected);
        }
    }

    #[test]
    fn bad_requests_are_rejected() {
        let (x, sequences) = (tensor(SHAPE, 1), sequences());
        let rope = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0).unwrap();
        let rejects = |preparation: Preparation<'_>, expected: QuantError| {
            assert_eq!(preparation.quantize(x.view(), &sequences).unwrap_err(), expected);
        };
        let plain = Preparation::new(Granularity::Head);
        let table = rope.table(100);
        let rotation = |first| Some(Rotation { table: &table, positions: RowPositions::First(first) });
        let too_large = QuantError::RotaryDimTooLarge { rotary_dim: 64, head_dim: 48 };
        rejects(Preparation { rotation: rotation(&[0, 0, 0]), ..plain }, too_large);
        let count = QuantError::PositionCount { given: 1, sequences: 3 };
        rejects(Preparation { rotation: rotation(&[0]), ..plain }, count);
        let each = Some(Rotation { table: &table, positions: RowPositions::Each(&[0; 89]) });
        let rows = QuantError::PositionRows { given: 89, rows: 90 };
        rejects(Preparation { rotation: each, ..plain }, rows);
        rejects(Preparation::with_scale(0.0), QuantError::Scale { index: 0, given: 0.0 });
        let incoherent = Incoherent::new(64, 7);
        let transform = QuantError::TransformDim { given: 64, expected: 48 };
        rejects(Preparation { incoherent: Some(&incoherent), ..plain }, transform);
        rejects(Preparation::new(Granularity::Block { rows: 0 }), QuantError::EmptyBlock);
    }
}
