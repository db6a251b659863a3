//! Scales: one for a tensor, a head or a block of rows.

use std::ops::Range;

use fa3_types::{Granularity, SequenceRows};

use crate::{E4m3, QuantError};

/// Successive rows of one head of one sequence.
#[derive(Clone)]
pub(crate) struct Panel {
    pub(crate) sequence: usize,
    pub(crate) head: usize,
    /// Rows, counted from the sequence's start.
    pub(crate) rows: Range<usize>,
}

/// The scales of a quantized tensor, x ≈ code · scale: positive, finite and normal.
///
/// The scales are stored by sequence, then head, then block, which is the order of [`Scales::values`].
#[derive(Clone, Debug, PartialEq)]
pub struct Scales {
    granularity: Granularity,
    heads: usize,
    /// The first index of each sequence in `values`.
    starts: Vec<usize>,
    values: Vec<f32>,
}

impl Scales {
    /// Takes given scales: see [`crate::Quantized::new`].
    pub(crate) fn new(
        granularity: Granularity,
        sequences: &SequenceRows,
        heads: usize,
        values: Vec<f32>,
    ) -> Result<Scales, QuantError> {
        check_granularity(granularity)?;
        let mut starts = Vec::with_capacity(sequences.count());
        let mut expected = usize::from(granularity == Granularity::Tensor);
        for sequence in 0..sequences.count() {
            starts.push(expected);
            expected += match granularity {
                Granularity::Tensor => 0,
                Granularity::Head => heads,
                Granularity::Block { rows } => heads * sequences.len(sequence).div_ceil(rows),
                Granularity::Channel => unreachable!("checked"),
            };
        }
        if values.len() != expected {
            return Err(QuantError::ScaleCount { given: values.len(), expected });
        }
        check_values(&values)?;
        Ok(Scales { granularity, heads, starts, values })
    }

    /// The elements that share a scale.
    pub fn granularity(&self) -> Granularity {
        self.granularity
    }

    /// All scales, by sequence, then head, then block.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// The scale of row `row` of head `head` of sequence `sequence`.
    ///
    /// # Panics
    /// If the row lies past the sequence's used length, where blocks have no scale.
    pub fn of(&self, sequence: usize, head: usize, row: usize) -> f32 {
        match self.granularity {
            Granularity::Tensor => self.values[0],
            Granularity::Head => self.values[self.starts[sequence] + head],
            Granularity::Block { rows } => {
                let end = self.starts.get(sequence + 1).copied().unwrap_or(self.values.len());
                let blocks = (end - self.starts[sequence]) / self.heads;
                assert!(row / rows < blocks, "row {row} of sequence {sequence} has no scale");
                self.values[self.starts[sequence] + head * blocks + row / rows]
            }
            Granularity::Channel => unreachable!("scales are of rows"),
        }
    }
}

/// Checks that blocks have rows, and refuses channels, whose scales are [`Channels`](crate::Channels).
pub(crate) fn check_granularity(granularity: Granularity) -> Result<(), QuantError> {
    match granularity {
        Granularity::Block { rows: 0 } => Err(QuantError::EmptyBlock),
        Granularity::Channel => Err(QuantError::ChannelScales),
        Granularity::Tensor | Granularity::Head | Granularity::Block { .. } => Ok(()),
    }
}

/// Checks that scales are positive, finite and normal.
pub(crate) fn check_values(values: &[f32]) -> Result<(), QuantError> {
    match values.iter().position(|&scale| !(scale.is_normal() && scale > 0.0)) {
        Some(index) => Err(QuantError::Scale { index, given: values[index] }),
        None => Ok(()),
    }
}

/// The rows that share each scale, in the order of [`Scales::values`].
pub(crate) fn groups(granularity: Granularity, sequences: &SequenceRows, heads: usize) -> Vec<Vec<Panel>> {
    let panels = (0..sequences.count()).flat_map(|sequence| {
        (0..heads).map(move |head| Panel { sequence, head, rows: 0..sequences.len(sequence) })
    });
    match granularity {
        Granularity::Tensor => vec![panels.collect()],
        Granularity::Head => panels.map(|panel| vec![panel]).collect(),
        Granularity::Block { rows } => {
            let split = |panel: Panel| {
                panel.rows.clone().step_by(rows).map(move |first| {
                    vec![Panel { rows: first..panel.rows.end.min(first + rows), ..panel.clone() }]
                })
            };
            panels.flat_map(split).collect()
        }
        Granularity::Channel => unreachable!("scales are of rows"),
    }
}

/// The largest magnitude among the finite numbers of `row`; 0 if there are none.
pub(crate) fn amax(row: &[f32]) -> f32 {
    row.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f32::max)
}

/// The scale of numbers up to `amax`: amax / 448, so that the largest number takes the largest code. It is 1 for zeros,
/// and at least the smallest normal number: a subnormal scale would flush to zero or lose digits.
pub(crate) fn scale_of(amax: f32) -> f32 {
    if amax == 0.0 { 1.0 } else { (amax / E4m3::MAX).max(f32::MIN_POSITIVE) }
}

/// The code of `x`; `inverse` is 1 / scale, rounded. An infinity becomes NaN: e4m3 has no infinity, and saturation
/// would hide it.
pub(crate) fn encode(x: f32, inverse: f32) -> E4m3 {
    if x.is_finite() { E4m3::from_f32(x * inverse) } else { E4m3::NAN }
}
