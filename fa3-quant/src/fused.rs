//! Rotary embedding, incoherent processing and quantization in one pass over memory (§3.3).

use fa3_types::{Sequences, Shape};
use ndarray::ArrayView4;

use crate::head::head;
use crate::{Granularity, Incoherent, QuantError, Quantized, Rope, RowIndex};

/// What happens to a tensor on its way to e4m3: rotation, then transform, then quantization.
///
/// Every row is read once. The rows that share a scale stay in a scratch buffer between the search for the largest
/// magnitude and the encoding. With [`Granularity::Block`] that is a few thousand numbers, which is why the paper can
/// attach all this to the rotary embedding "with no additional slow down".
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Preparation<'a> {
    /// Rotation of each row by its position.
    pub rotation: Option<Rotation<'a>>,
    /// Random orthogonal transform of each row; give Q and K the same one.
    pub incoherent: Option<&'a Incoherent>,
    /// What shares a scale.
    pub granularity: Granularity,
}

/// Rotary embedding with the positions that it needs.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// The rotation.
    pub rope: &'a Rope,
    /// The position of each sequence's first row.
    pub first_positions: &'a [usize],
}

impl<'a> Preparation<'a> {
    /// Quantization alone.
    pub fn new(granularity: Granularity) -> Preparation<'a> {
        Preparation { rotation: None, incoherent: None, granularity }
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
    pub fn quantize(&self, x: ArrayView4<'_, f32>, sequences: &Sequences) -> Result<Quantized, QuantError> {
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
    /// As [`Preparation::quantize`].
    pub fn quantize_rows(
        &self,
        shape: Shape,
        sequences: &Sequences,
        read: impl Fn(RowIndex, &mut [f32]) + Sync,
    ) -> Result<Quantized, QuantError> {
        self.check(shape.head_dim, sequences)?;
        Quantized::from_rows(shape, sequences, self.granularity, |at, values| {
            read(at, values);
            if let Some(Rotation { rope, first_positions }) = self.rotation {
                rope.apply(values, first_positions[at.sequence] + at.row);
            }
            if let Some(incoherent) = self.incoherent {
                incoherent.apply(values);
            }
        })
    }

    fn check(&self, head_dim: usize, sequences: &Sequences) -> Result<(), QuantError> {
        if let Some(Rotation { rope, first_positions }) = self.rotation {
            let (given, sequences) = (first_positions.len(), sequences.count());
            if given != sequences {
                return Err(QuantError::PositionCount { given, sequences });
            }
            let rotary_dim = rope.rotary_dim();
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;
    use crate::RopeStyle;
    use crate::testing::tensor;

    const SHAPE: Shape = Shape { batch: 1, seqlen: 90, heads: 3, head_dim: 48 };
    const GRANULARITIES: [Granularity; 3] =
        [Granularity::Tensor, Granularity::Head, Granularity::Block { rows: 16 }];

    fn sequences() -> Sequences {
        Sequences::packed(&[0, 40, 40, 85]).unwrap().with_used(&[33, 0, 45]).unwrap()
    }

    #[test]
    fn one_pass_gives_what_three_passes_give() {
        let (x, sequences) = (tensor(SHAPE, 1), sequences());
        let incoherent = Incoherent::new(48, 7);
        for style in [RopeStyle::Interleaved, RopeStyle::HalfSplit] {
            let rope = Rope::new(style, 32, 10_000.0).unwrap();
            let first_positions = [100, 0, 3];
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
                let fused = Preparation {
                    rotation: Some(Rotation { rope: &rope, first_positions: &first_positions }),
                    incoherent: Some(&incoherent),
                    granularity,
                };
                let fused = fused.quantize(x.view(), &sequences).unwrap();
                let expected = Preparation::new(granularity).quantize(separate.view(), &sequences).unwrap();
                assert_eq!(fused, expected);
            }
        }
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
        let rotation = |first_positions| Some(Rotation { rope: &rope, first_positions });
        let too_large = QuantError::RotaryDimTooLarge { rotary_dim: 64, head_dim: 48 };
        rejects(Preparation { rotation: rotation(&[0, 0, 0]), ..plain }, too_large);
        let count = QuantError::PositionCount { given: 1, sequences: 3 };
        rejects(Preparation { rotation: rotation(&[0]), ..plain }, count);
        let incoherent = Incoherent::new(64, 7);
        let transform = QuantError::TransformDim { given: 64, expected: 48 };
        rejects(Preparation { incoherent: Some(&incoherent), ..plain }, transform);
        rejects(Preparation::new(Granularity::Block { rows: 0 }), QuantError::EmptyBlock);
    }
}
