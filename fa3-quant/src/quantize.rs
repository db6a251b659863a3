//! Quantized tensors.

use fa3_types::{Dim, ScaleBlocks, SequenceRows, Shape, ValueLayout, first_block};
use ndarray::Array4;
use rayon::prelude::*;

use crate::head::{head, head_mut};
use crate::scale::{self, Panel};
use crate::{E4m3, Granularity, QuantError, Scales};

/// An e4m3 tensor (batch, seqlen, heads, head_dim) with its scales: x ≈ code · scale.
///
/// Packed sequences have batch 1. Rows outside every sequence, or past a sequence's used length, have code 0 and no
/// scale.
///
/// A code is e4m3(x · (1 / scale)), with both rounded to f32. With y = x / scale and ulp(y) the distance of the e4m3
/// numbers around y (2⁻⁹ at the least), a finite x is within ½ ulp(y) · scale + 2⁻²² |x| + 2⁻¹⁴⁹ of its code times
/// scale; the last two terms are float rounding.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    codes: Array4<E4m3>,
    scales: Scales,
    sequences: SequenceRows,
}

/// The index of a row of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowIndex {
    /// The sequence.
    pub sequence: usize,
    /// The row, counted from the sequence's start.
    pub row: usize,
    /// The head.
    pub head: usize,
}

impl Quantized {
    /// Takes given codes and scales.
    ///
    /// # Errors
    /// An error unless the sequences lie within the codes; [`QuantError::EmptyBlock`] for blocks without rows;
    /// [`QuantError::ScaleCount`] unless there is one scale for each group of rows, in the order of [`Scales::values`];
    /// and [`QuantError::Scale`] for a scale that is not positive, finite and normal.
    pub fn new(
        codes: Array4<E4m3>,
        sequences: &SequenceRows,
        granularity: Granularity,
        scales: Vec<f32>,
    ) -> Result<Quantized, QuantError> {
        let (batch, seqlen, heads, head_dim) = codes.dim();
        check_shape(Shape { batch, seqlen, heads, head_dim }, sequences)?;
        let scales = Scales::new(granularity, sequences, heads, scales)?;
        Ok(Quantized { codes, scales, sequences: sequences.clone() })
    }

    /// Takes codes with scales of blocks of `rows` rows in the layout of kernels, (batch, heads, blocks): see
    /// [`ScaleBlocks`]. Scales at unused indices are ignored.
    ///
    /// # Errors
    /// The errors of [`Quantized::new`].
    pub fn of_blocks(
        codes: Array4<E4m3>,
        sequences: &SequenceRows,
        rows: usize,
        scales: &[f32],
    ) -> Result<Quantized, QuantError> {
        let (batch, seqlen, heads, head_dim) = codes.dim();
        let shape = Shape { batch, seqlen, heads, head_dim };
        check_shape(shape, sequences)?;
        let granularity = Granularity::Block { rows };
        scale::check_granularity(granularity)?;
        let expected = batch * heads * blocks(sequences, seqlen, rows).count();
        if scales.len() != expected {
            return Err(QuantError::ScaleCount { given: scales.len(), expected });
        }
        let scales = places(sequences, shape, rows).into_iter().map(|place| scales[place]).collect();
        Quantized::new(codes, sequences, granularity, scales)
    }

    /// The scales of blocks in the layout of kernels, (batch, heads, blocks): see [`ScaleBlocks`]. Unused indices have
    /// scale 1. `None` unless scales belong to blocks.
    pub fn block_scales(&self) -> Option<Vec<f32>> {
        let Granularity::Block { rows } = self.scales.granularity() else { return None };
        let (batch, seqlen, heads, head_dim) = self.codes.dim();
        let shape = Shape { batch, seqlen, heads, head_dim };
        let mut scales = vec![1.0; batch * heads * blocks(&self.sequences, seqlen, rows).count()];
        let places = places(&self.sequences, shape, rows).into_iter();
        places.zip(self.scales.values()).for_each(|(place, &scale)| scales[place] = scale);
        Some(scales)
    }

    /// Quantizes a tensor of this shape. `read` gives each row once. The rows that share a scale are gathered along
    /// with their largest magnitude, then encoded. A given scale replaces the computed scales.
    pub(crate) fn from_rows(
        shape: Shape,
        sequences: &SequenceRows,
        granularity: Granularity,
        scale: Option<f32>,
        read: impl Fn(RowIndex, &mut [f32]) + Sync,
    ) -> Result<Quantized, QuantError> {
        check_shape(shape, sequences)?;
        scale::check_granularity(granularity)?;
        scale::check_values(scale.as_slice())?;
        let groups = scale::groups(granularity, sequences, shape.heads);
        let encoded: Vec<(f32, Vec<E4m3>)> =
            groups.par_iter().map(|panels| encode_group(panels, shape.head_dim, scale, &read)).collect();

        let mut codes = Array4::from_elem(shape.dims(), E4m3::ZERO);
        for (panels, (_, group_codes)) in groups.iter().zip(&encoded) {
            let mut rows = group_codes.chunks_exact(shape.head_dim);
            for panel in panels {
                let (batch, first) = sequences.start(panel.sequence);
                let mut target = head_mut(codes.view_mut(), batch, panel.head);
                for (row, from) in panel.rows.clone().zip(&mut rows) {
                    target.row_mut(first + row).iter_mut().zip(from).for_each(|(to, from)| *to = *from);
                }
            }
        }
        let values = encoded.into_iter().map(|(scale, _)| scale).collect();
        let scales = Scales::new(granularity, sequences, shape.heads, values)?;
        Ok(Quantized { codes, scales, sequences: sequences.clone() })
    }

    /// The codes (batch, seqlen, heads, head_dim).
    pub fn codes(&self) -> &Array4<E4m3> {
        &self.codes
    }

    /// The codes of V in the layout [`ValueLayout::Transposed`]: (batch, heads, head_dim, keys), in memory in this
    /// order.
    pub fn transposed(&self) -> Array4<E4m3> {
        let (batch, seqlen, heads, head_dim) = self.codes.dim();
        let keys = ValueLayout::keys_of_row(seqlen);
        let mut transposed = Array4::from_elem((batch, heads, head_dim, keys), E4m3::ZERO);
        for ((batch, key, head, element), &code) in self.codes.indexed_iter() {
            transposed[[batch, head, element, ValueLayout::place_of_key(key)]] = code;
        }
        transposed
    }

    /// The scales.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// The sequences that the scales follow.
    pub fn sequences(&self) -> &SequenceRows {
        &self.sequences
    }

    /// The scale of row `row` of head `head` of sequence `sequence`.
    ///
    /// # Panics
    /// If there is no such row within the sequence's used length.
    pub fn scale(&self, sequence: usize, head: usize, row: usize) -> f32 {
        self.scales.of(sequence, head, row)
    }

    /// code · scale, in the shape of the codes; 0 for rows outside every sequence.
    pub fn dequantize(&self) -> Array4<f32> {
        let mut x = Array4::zeros(self.codes.dim());
        let heads = self.codes.dim().2;
        for panel in scale::groups(Granularity::Head, &self.sequences, heads).into_iter().flatten() {
            let (batch, first) = self.sequences.start(panel.sequence);
            let codes = head(self.codes.view(), batch, panel.head);
            let mut target = head_mut(x.view_mut(), batch, panel.head);
            for row in panel.rows {
                let scale = self.scale(panel.sequence, panel.head, row);
                let decode = |x: &mut f32, code: &E4m3| *x = code.to_f32() * scale;
                target.row_mut(first + row).zip_mut_with(&codes.row(first + row), decode);
            }
        }
        x
    }
}

/// The common scale of the panels' rows, and the codes of these rows, row after row.
fn encode_group(
    panels: &[Panel],
    head_dim: usize,
    scale: Option<f32>,
    read: &impl Fn(RowIndex, &mut [f32]),
) -> (f32, Vec<E4m3>) {
    let rows: usize = panels.iter().map(|panel| panel.rows.len()).sum();
    let mut scratch = vec![0.0; rows * head_dim];
    let mut places = scratch.chunks_exact_mut(head_dim);
    let mut amax = 0.0f32;
    for panel in panels {
        for (row, place) in panel.rows.clone().zip(&mut places) {
            read(RowIndex { sequence: panel.sequence, row, head: panel.head }, place);
            amax = amax.max(scale::amax(place));
        }
    }
    let scale = scale.unwrap_or_else(|| scale::scale_of(amax));
    let inverse = 1.0 / scale;
    (scale, scratch.into_iter().map(|x| scale::encode(x, inverse)).collect())
}

/// The block scales of one head.
fn blocks(sequences: &SequenceRows, seqlen: usize, rows: usize) -> ScaleBlocks {
    match sequences.is_packed() {
        true => ScaleBlocks::packed(seqlen, sequences.count(), rows),
        false => ScaleBlocks::dense(seqlen, rows),
    }
}

/// The index of the scale of each block of `rows` rows of a tensor, by sequence, then head, then block.
fn places(sequences: &SequenceRows, shape: Shape, rows: usize) -> Vec<usize> {
    let count = blocks(sequences, shape.seqlen, rows).count();
    let heads =
        (0..sequences.count()).flat_map(|sequence| (0..shape.heads).map(move |head| (sequence, head)));
    let places = heads.flat_map(|(sequence, head)| {
        let (batch, row) = sequences.start(sequence);
        let first = match sequences.is_packed() {
            // A packed tensor has fewer than 2³² rows.
            true => first_block(row as u32, sequence as u32, rows.ilog2()) as usize,
            false => 0,
        };
        let of_head = (batch * shape.heads + head) * count + first;
        (0..sequences.len(sequence).div_ceil(rows)).map(move |block| of_head + block)
    });
    places.collect()
}

/// Checks that rows have entries, and that the sequences lie within the tensor.
fn check_shape(shape: Shape, sequences: &SequenceRows) -> Result<(), QuantError> {
    for (dim, extent) in [(Dim::Heads, shape.heads), (Dim::HeadDim, shape.head_dim)] {
        if extent == 0 {
            return Err(QuantError::ZeroDim { dim });
        }
    }
    let expected = if sequences.is_packed() { 1 } else { sequences.count() };
    if shape.batch != expected {
        return Err(QuantError::Batch { given: shape.batch, expected });
    }
    for sequence in 0..sequences.count() {
        let end = sequences.start(sequence).1 + sequences.capacity(sequence);
        if end > shape.seqlen {
            return Err(QuantError::SequenceEnd { sequence, end, rows: shape.seqlen });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Preparation;
    use crate::testing::tensor;

    const SHAPE: Shape = Shape { batch: 1, seqlen: 60, heads: 2, head_dim: 16 };
    const GRANULARITIES: [Granularity; 3] =
        [Granularity::Tensor, Granularity::Head, Granularity::Block { rows: 8 }];

    /// Sequences of rows 0 to 20 (17 valid), 20 to 20, and 20 to 50. Rows 50 to 60 belong to no sequence.
    fn sequences() -> SequenceRows {
        SequenceRows::packed(&[0, 20, 20, 50]).unwrap().with_used(&[17, 0, 30]).unwrap()
    }

    fn quantize(x: &Array4<f32>, granularity: Granularity) -> Quantized {
        Preparation::new(granularity).quantize(x.view(), &sequences()).unwrap()
    }

    /// (sequence, row, row in the tensor) of every valid row.
    fn rows() -> impl Iterator<Item = (usize, usize, usize)> {
        (0..17).map(|row| (0, row, row)).chain((0..30).map(|row| (2, row, 20 + row)))
    }

    fn share(granularity: Granularity, a: (usize, usize, usize), b: (usize, usize, usize)) -> bool {
        match granularity {
            Granularity::Tensor => true,
            Granularity::Head => (a.0, a.2) == (b.0, b.2),
            Granularity::Block { rows } => (a.0, a.1 / rows, a.2) == (b.0, b.1 / rows, b.2),
            Granularity::Channel => unreachable!("scales are of rows"),
        }
    }

    #[test]
    fn a_scale_is_the_largest_magnitude_of_what_shares_it_over_448() {
        let x = tensor(SHAPE, 1);
        for granularity in GRANULARITIES {
            let quantized = quantize(&x, granularity);
            let all = || rows().flat_map(|(s, row, at)| (0..2).map(move |head| (s, row, head, at)));
            for (s, row, head, _) in all() {
                let shared =
                    all().filter(|&(t, other, h, _)| share(granularity, (s, row, head), (t, other, h)));
                let values = shared.flat_map(|(_, _, h, at)| (0..16).map(move |d| (h, at, d)));
                let amax = values.map(|(h, at, d)| x[[0, at, h, d]].abs()).fold(0.0, f32::max);
                assert_eq!(quantized.scale(s, head, row), amax / 448.0, "{granularity:?} {s} {row} {head}");
            }
            let count = match granularity {
                Granularity::Tensor => 1,
                Granularity::Head => 3 * 2,
                Granularity::Block { .. } => (3 + 4) * 2,
                Granularity::Channel => unreachable!("scales are of rows"),
            };
            assert_eq!(quantized.scales().values().len(), count);
        }
    }

    #[test]
    fn rows_that_are_not_in_use_change_nothing() {
        let x = tensor(SHAPE, 2);
        let mut poisoned = x.clone();
        for row in (17..20).chain(50..60) {
            poisoned.index_axis_mut(ndarray::Axis(1), row).fill(f32::NAN);
        }
        for granularity in GRANULARITIES {
            assert_eq!(quantize(&poisoned, granularity), quantize(&x, granularity));
            assert_eq!(quantize(&poisoned, granularity).codes()[[0, 55, 1, 3]], E4m3::ZERO);
            assert_eq!(quantize(&poisoned, granularity).dequantize()[[0, 18, 1, 3]], 0.0);
        }
    }

    #[test]
    fn nan_and_infinity_become_nan_and_leave_their_neighbours_alone() {
        let mut zeroed = tensor(SHAPE, 3);
        let mut x = zeroed.clone();
        let places =
            [([0, 3, 0, 5], f32::NAN), ([0, 30, 1, 0], f32::INFINITY), ([0, 31, 1, 0], f32::NEG_INFINITY)];
        for (place, value) in places {
            (x[place], zeroed[place]) = (value, 0.0);
        }
        for granularity in GRANULARITIES {
            let (quantized, mut expected) = (quantize(&x, granularity), quantize(&zeroed, granularity));
            places.iter().for_each(|(place, _)| expected.codes[*place] = E4m3::NAN);
            assert_eq!(quantized, expected);
            assert!(quantized.dequantize()[[0, 30, 1, 0]].is_nan());
        }
    }

    #[test]
    fn nothing_finite_has_scale_1() {
        for value in [0.0, -0.0, f32::NAN] {
            let x = Array4::from_elem(SHAPE.dims(), value);
            for granularity in GRANULARITIES {
                assert!(quantize(&x, granularity).scales().values().iter().all(|&scale| scale == 1.0));
            }
        }
    }

    #[test]
    fn codes_and_scales_from_elsewhere() {
        let quantized = quantize(&tensor(SHAPE, 4), Granularity::Head);
        let new = |granularity, scales: &[f32]| {
            Quantized::new(quantized.codes().clone(), &sequences(), granularity, scales.to_vec())
        };
        assert_eq!(new(Granularity::Head, quantized.scales().values()).unwrap(), quantized);
        let count = QuantError::ScaleCount { given: 1, expected: 6 };
        assert_eq!(new(Granularity::Head, &[1.0]).unwrap_err(), count);
        for given in [0.0, -1.0, f32::INFINITY, 1e-40] {
            let error = new(Granularity::Tensor, &[given]).unwrap_err();
            assert_eq!(error, QuantError::Scale { index: 0, given });
        }
        assert_eq!(new(Granularity::Block { rows: 0 }, &[]).unwrap_err(), QuantError::EmptyBlock);
        assert_eq!(new(Granularity::Channel, &[]).unwrap_err(), QuantError::ChannelScales);
    }

    #[test]
    fn transposed_codes_are_in_the_order_of_products() {
        let shape = Shape { batch: 2, seqlen: 130, heads: 3, head_dim: 16 };
        let sequences = SequenceRows::dense(2, 130);
        let quantized =
            Preparation::new(Granularity::Head).quantize(tensor(shape, 5).view(), &sequences).unwrap();
        let transposed = quantized.transposed();
        assert_eq!((transposed.dim(), transposed.is_standard_layout()), ((2, 3, 16, 256), true));
        let order = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15];
        for ((batch, head, element, place), &code) in transposed.indexed_iter() {
            let key = place / 16 * 16 + order[place % 16];
            let expected = quantized.codes().get([batch, key, head, element]);
            assert_eq!(code, *expected.unwrap_or(&E4m3::ZERO), "{batch} {head} {element} {place}");
        }
    }

    #[test]
    fn tensors_that_do_not_hold_the_sequences_are_rejected() {
        let reject = |dims: [usize; 4], sequences: &SequenceRows| {
            Preparation::new(Granularity::Tensor).quantize(Array4::zeros(dims).view(), sequences).unwrap_err()
        };
        let batch = QuantError::Batch { given: 2, expected: 1 };
        assert_eq!(reject([2, 60, 2, 16], &sequences()), batch);
        let end = QuantError::SequenceEnd { sequence: 2, end: 50, rows: 49 };
        assert_eq!(reject([1, 49, 2, 16], &sequences()), end);
        let dense = SequenceRows::dense(3, 8);
        assert_eq!(reject([2, 8, 2, 16], &dense), QuantError::Batch { given: 2, expected: 3 });
        assert_eq!(reject([3, 8, 0, 16], &dense), QuantError::ZeroDim { dim: Dim::Heads });
        assert_eq!(reject([3, 8, 2, 0], &dense), QuantError::ZeroDim { dim: Dim::HeadDim });
    }

    /// The distance between the e4m3 numbers around y, from the format's definition.
    fn ulp(y: f64) -> f64 {
        (y.abs().log2().floor().clamp(-6.0, 8.0) - 3.0).exp2()
    }

    proptest! {
        /// The error bound of [`Quantized`], with magnitudes from all-subnormal to just below overflow.
        #[test]
        fn codes_times_scales_are_near(
            seed: u64,
            magnitudes in prop::collection::vec(-149i32..=125, 60),
            block in 1usize..40,
        ) {
            let mut x = tensor(SHAPE, seed);
            for (row, &magnitude) in magnitudes.iter().enumerate() {
                // The factor is f64, because a float factor cannot reach this far: 2^-149 itself is subnormal.
                let scaled = |x: f32| (f64::from(x) * f64::from(magnitude).exp2()) as f32;
                x.index_axis_mut(ndarray::Axis(1), row).mapv_inplace(|x| scaled(x).clamp(f32::MIN, f32::MAX));
            }
            for granularity in [Granularity::Tensor, Granularity::Head, Granularity::Block { rows: block }] {
                let quantized = quantize(&x, granularity);
                prop_assert!(quantized.scales().values().iter().all(|scale| scale.is_normal() && *scale > 0.0));
                let back = quantized.dequantize();
                for ((s, row, at), (head, d)) in
                    rows().flat_map(|row| (0..2).flat_map(move |h| (0..16).map(move |d| (row, (h, d)))))
                {
                    let (exact, scale) = (f64::from(x[[0, at, head, d]]), f64::from(quantized.scale(s, head, row)));
                    let error = (f64::from(back[[0, at, head, d]]) - exact).abs();
                    let limit = 0.5 * ulp(exact / scale) * scale + exact.abs() * 2f64.powi(-22) + 2f64.powi(-149);
                    prop_assert!(error <= limit, "{exact:e} {scale:e}: {error:e} above {limit:e}");
                }
            }
        }
    }
}
