//! V by channels: each column of a head has a mean and a scale.

use fa3_types::{CHANNEL_GROUPS, CHANNEL_ROWS, Granularity, KnownProblem, SequenceRows};
use ndarray::{Array3, Array4, ArrayView1, ArrayView4, Axis, Zip};

use crate::{Output, QuantError, Quantized, scale};

/// The means and scales of the channels of V, (batch, heads, head_dim):
///
/// ```text
/// V = mean + scale · code,    O = mean + scale · (Σ_j p_j · code_j) / Σ_j p_j
/// ```
///
/// A row of O is a weighted mean of rows of V, so V's means and scales apply to O's columns. The common part of a
/// column is not rounded to e4m3, which leaves more digits for the differences.
///
/// ```
/// use fa3_quant::Channels;
/// use fa3_quant::ndarray::Array4;
///
/// let v = Array4::from_shape_fn((1, 100, 1, 16), |(_, key, _, column)| column as f32 + (key as f32).sin());
/// let channels = Channels::of(v.view());
/// assert!((channels.mean()[[0, 0, 7]] - 7.0).abs() < 0.1);
/// let near = channels.dequantize(&channels.quantize(v.view())?);
/// assert!((near - v).iter().all(|error| error.abs() <= 1.0 / 16.0));
/// # Ok::<(), fa3_quant::QuantError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Channels {
    mean: Array3<f32>,
    scale: Array3<f32>,
}

impl Channels {
    /// Computes means and scales of a tensor (batch, seqlen, heads, head_dim): the mean of each channel, and the scale
    /// that maps the largest remainder to the largest code. [`CHANNEL_ROWS`] defines the order of the sums. Infinities
    /// and NaN count as 0 in the mean, and are left out of the scale. If a number minus the mean would not be finite,
    /// the mean is 0.
    pub fn of(x: ArrayView4<'_, f32>) -> Channels {
        let (batch, seqlen, heads, head_dim) = x.dim();
        let mut channels = Channels {
            mean: Array3::zeros((batch, heads, head_dim)),
            scale: Array3::ones((batch, heads, head_dim)),
        };
        let columns = x.lanes(Axis(1));
        Zip::from(&mut channels.mean).and(&mut channels.scale).and(columns).for_each(
            |mean, scale, column| {
                (*mean, *scale) = Span::of_column(column).mean_and_scale(seqlen);
            },
        );
        channels
    }

    /// Takes given means and scales.
    ///
    /// # Errors
    /// [`QuantError::ChannelShape`] unless there is a scale for each mean, [`QuantError::Scale`] for a scale that is
    /// not positive, finite and normal.
    pub fn new(mean: Array3<f32>, scale: Array3<f32>) -> Result<Channels, QuantError> {
        if mean.dim() != scale.dim() {
            return Err(QuantError::ChannelShape { mean: mean.dim(), scale: scale.dim() });
        }
        scale::check_values(&scale.iter().copied().collect::<Vec<_>>())?;
        Ok(Channels { mean, scale })
    }

    /// The means (batch, heads, head_dim).
    pub fn mean(&self) -> &Array3<f32> {
        &self.mean
    }

    /// The scales (batch, heads, head_dim).
    pub fn scale(&self) -> &Array3<f32> {
        &self.scale
    }

    /// The codes of a tensor (batch, seqlen, heads, head_dim), e4m3((x - mean) · (1 / scale)), each step rounded to
    /// f32. The returned [`Quantized`] has the scale 1, since the channels' scales apply to O.
    ///
    /// # Errors
    /// [`QuantError::ChannelShape`] unless the tensor has these channels, [`QuantError::ZeroDim`] if it has no
    /// channels.
    pub fn quantize(&self, x: ArrayView4<'_, f32>) -> Result<Quantized, QuantError> {
        let (batch, seqlen, heads, head_dim) = x.dim();
        if (batch, heads, head_dim) != self.mean.dim() {
            return Err(QuantError::ChannelShape { mean: self.mean.dim(), scale: (batch, heads, head_dim) });
        }
        let codes = Array4::from_shape_fn(x.dim(), |at @ (batch, _, head, column)| {
            let channel = [batch, head, column];
            let centred = if x[at].is_finite() { x[at] - self.mean[channel] } else { f32::NAN };
            scale::encode(centred, 1.0 / self.scale[channel])
        });
        Quantized::new(codes, &SequenceRows::dense(batch, seqlen), Granularity::Tensor, vec![1.0])
    }

    /// mean + scale · code for codes of these channels.
    ///
    /// # Panics
    /// If the codes have another shape than these channels.
    pub fn dequantize(&self, codes: &Quantized) -> Array4<f32> {
        let codes = codes.codes();
        Array4::from_shape_fn(codes.dim(), |at @ (batch, _, head, column)| {
            let channel = [batch, head, column];
            codes[at].to_f32().mul_add(self.scale[channel], self.mean[channel])
        })
    }

    /// Applies the scales and means of V's channels to O computed from codes. A row that saw no key stays 0.
    ///
    /// # Errors
    /// [`QuantError::ChannelShape`] unless V of the problem has these channels.
    pub fn restore(&self, problem: &KnownProblem, output: &mut Output) -> Result<(), QuantError> {
        let v = problem.v().shape;
        let expected = (v.batch, v.heads, v.head_dim);
        if self.mean.dim() != expected || problem.rows_q().is_packed() {
            return Err(QuantError::ChannelShape { mean: self.mean.dim(), scale: expected });
        }
        for ((batch, row, head, column), o) in output.o.indexed_iter_mut() {
            if output.lse[[batch, head, row]] != f32::NEG_INFINITY {
                let channel = [batch, problem.heads().kv_head(head), column];
                *o = o.mul_add(self.scale[channel], self.mean[channel]);
            }
        }
        Ok(())
    }
}

/// Statistics of some numbers of a channel: the sum, the smallest and the largest of the finite numbers.
#[derive(Clone, Copy)]
struct Span {
    sum: f32,
    min: f32,
    max: f32,
}

impl Span {
    const NONE: Span = Span { sum: 0.0, min: f32::INFINITY, max: f32::NEG_INFINITY };

    fn of(x: f32) -> Span {
        if x.is_finite() { Span { sum: x, min: x, max: x } } else { Span::NONE }
    }

    fn and(self, other: Span) -> Span {
        Span { sum: self.sum + other.sum, min: self.min.min(other.min), max: self.max.max(other.max) }
    }

    /// The statistics of all spans, summed in groups: see [`CHANNEL_ROWS`].
    fn of_all(spans: impl Iterator<Item = Span>) -> Span {
        let mut groups = [Span::NONE; CHANNEL_GROUPS];
        for (index, span) in spans.enumerate() {
            let group = &mut groups[index % CHANNEL_GROUPS];
            *group = group.and(span);
        }
        groups.into_iter().fold(Span::NONE, Span::and)
    }

    fn of_column(column: ArrayView1<'_, f32>) -> Span {
        let parts = column.axis_chunks_iter(Axis(0), CHANNEL_ROWS);
        Span::of_all(parts.map(|part| Span::of_all(part.iter().copied().map(Span::of))))
    }

    /// Mean and scale of a channel of `rows` rows.
    fn mean_and_scale(self, rows: usize) -> (f32, f32) {
        let around = |mean: f32| (self.max - mean).max(mean - self.min).max(0.0);
        let mean = self.sum / rows as f32;
        let mean = if mean.is_finite() && around(mean).is_finite() { mean } else { 0.0 };
        (mean, scale::scale_of(around(mean)))
    }
}

#[cfg(test)]
mod tests {
    use fa3_types::{Dtype, ProblemSpec, Shape};

    use super::*;
    use crate::testing::tensor;
    use crate::{E4m3, Fp8Attention, Preparation};

    const SHAPE: Shape = Shape { batch: 2, seqlen: 700, heads: 2, head_dim: 48 };

    /// Normal numbers. Each channel has its own centre and size.
    fn values() -> Array4<f32> {
        let mut v = tensor(SHAPE, 3);
        for ((_, _, head, column), x) in v.indexed_iter_mut() {
            *x = *x * 2f32.powi(column as i32 % 7 - 3) + (head as f32 - 0.5) * column as f32;
        }
        v
    }

    /// A column of `x`.
    fn column<T: Copy>(x: &Array4<T>, [batch, head, column]: [usize; 3]) -> Vec<T> {
        let rows = 0..x.dim().1;
        rows.map(|row| x[[batch, row, head, column]]).collect()
    }

    #[test]
    fn means_are_those_of_f64_and_scales_take_all_codes() {
        let v = values();
        let channels = Channels::of(v.view());
        let codes = channels.quantize(v.view()).unwrap();
        for ((batch, head, column), &mean) in channels.mean().indexed_iter() {
            let numbers = self::column(&v, [batch, head, column]);
            let exact = numbers.iter().map(|&x| f64::from(x)).sum::<f64>() / 700.0;
            assert!((f64::from(mean) - exact).abs() <= 1e-6 * (1.0 + exact.abs()), "{mean} {exact}");
            let amax = numbers.iter().map(|x| (x - mean).abs()).fold(0.0, f32::max);
            assert_eq!(channels.scale()[[batch, head, column]], amax / E4m3::MAX);
            let codes = self::column(codes.codes(), [batch, head, column]);
            let largest = codes.into_iter().map(|code| code.to_f32().abs()).fold(0.0, f32::max);
            assert_eq!(largest, E4m3::MAX);
        }
    }

    #[test]
    fn dequantized_numbers_are_near() {
        let v = values();
        let channels = Channels::of(v.view());
        let near = channels.dequantize(&channels.quantize(v.view()).unwrap());
        for ((batch, row, head, column), &near) in near.indexed_iter() {
            let channel = [batch, head, column];
            let exact = v[[batch, row, head, column]];
            let (centred, scale) = ((exact - channels.mean()[channel]).abs(), channels.scale()[channel]);
            let bound = centred / 16.0 + scale / 1024.0 + 1e-5;
            assert!((near - exact).abs() <= bound, "{near} {exact}");
        }
    }

    /// The mean depends on the order of summation: 2^24 swallows ones unless they have been added up before.
    #[test]
    fn numbers_are_summed_in_groups() {
        let mut column = ndarray::Array1::from_elem(300, 1.0f32);
        column[3] = 16_777_216.0;
        // Each part is summed in 16 groups. The group of rows 3, 19, 35, … of the first part loses its 15 ones. The
        // other groups of this part have 16 ones each, whose sums are even and are added exactly. The next part has 44
        // ones.
        assert_eq!(Span::of_column(column.view()).sum, 16_777_216.0 + 240.0 + 44.0);
    }

    #[test]
    fn what_is_not_finite_becomes_nan_alone() {
        let mut v = values();
        v[[0, 5, 1, 3]] = 0.0;
        let zeroed = Channels::of(v.view());
        for strange in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            v[[0, 5, 1, 3]] = strange;
            let channels = Channels::of(v.view());
            assert_eq!(channels.mean(), zeroed.mean());
            let codes = channels.quantize(v.view()).unwrap();
            assert_eq!(codes.codes().iter().filter(|code| code.is_nan()).count(), 1);
            assert!(codes.codes()[[0, 5, 1, 3]].is_nan());
        }
    }

    #[test]
    fn columns_without_a_mean_have_0() {
        let columns = [[f32::NAN; 4], [f32::MAX; 4], [f32::MAX, -f32::MAX, -f32::MAX, 0.0], [1.0; 4]];
        let v = Array4::from_shape_fn((1, 4, 1, 4), |(_, row, _, column)| columns[column][row]);
        let channels = Channels::of(v.view());
        assert_eq!(channels.mean().iter().copied().collect::<Vec<_>>(), [0.0, 0.0, 0.0, 1.0]);
        let scales = [1.0, f32::MAX / 448.0, f32::MAX / 448.0, 1.0];
        assert_eq!(channels.scale().iter().copied().collect::<Vec<_>>(), scales);
        let empty = Channels::of(Array4::zeros((1, 0, 1, 2)).view());
        assert_eq!((empty.mean()[[0, 0, 0]], empty.scale()[[0, 0, 0]]), (0.0, 1.0));
    }

    #[test]
    fn rows_that_see_no_key_stay_0() {
        let q = Shape { batch: 2, seqlen: 72, heads: 2, head_dim: 48 };
        let k = Shape { seqlen: 70, ..SHAPE };
        let problem = ProblemSpec::dense(Dtype::E4m3, q, k).causal().known().unwrap();
        let v = values().slice_axis_move(Axis(1), (..70).into());
        let channels = Channels::of(v.view());
        let head = Preparation::new(Granularity::Head);
        let q = head.quantize(tensor(q, 1).view(), problem.rows_q()).unwrap();
        let k = head.quantize(tensor(k, 2).view(), problem.rows_k()).unwrap();
        let codes = channels.quantize(v.view()).unwrap();
        let mut output = Fp8Attention::default().forward(&problem, &q, &k, &codes).unwrap();
        channels.restore(&problem, &mut output).unwrap();
        for ((_, row, _, column), &o) in output.o.indexed_iter() {
            // The means of column 0 are near 0, so O may be 0.
            assert!(if row < 2 { o == 0.0 } else { o != 0.0 || column == 0 }, "{row} {column}: {o}");
        }
    }

    #[test]
    fn channels_of_another_tensor_are_refused() {
        let (v, other) = (values(), Array4::zeros((2, 700, 1, 48)));
        let channels = Channels::of(v.view());
        let error = QuantError::ChannelShape { mean: (2, 2, 48), scale: (2, 1, 48) };
        assert_eq!(channels.quantize(other.view()).unwrap_err(), error);
        let new = |scale| Channels::new(channels.mean().clone(), scale);
        assert_eq!(new(channels.scale().clone()), Ok(channels.clone()));
        assert_eq!(new(Array3::ones((2, 1, 48))).unwrap_err(), error);
        let mut zero = channels.scale().clone();
        zero[[0, 0, 1]] = 0.0;
        assert_eq!(new(zero).unwrap_err(), QuantError::Scale { index: 1, given: 0.0 });
    }
}
