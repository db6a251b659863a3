//! A quantization to e4m3, as a builder.

use std::ops::Range;

use fa3_quant::{Channels, E4m3, Granularity, Incoherent, Preparation, RopeTable, Rotation, RowPositions};
use fa3_types::{
    Positions, ProblemError, QuantizeProblem, QuantizeSpec, Rotary, Scaling, SequenceRows, Shape, TensorName,
    first_block,
};
use ndarray::{Array3, Array4, ArrayView4, Axis};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Scalar};

/// A quantization of a tensor to e4m3, as FlashAttention-3 prepares Q and K (§3.3 of the paper). It is a builder:
/// [`Quantize::run`] computes it.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
/// ```
///
/// V is quantized without rotation and transform. With [`Scaling::Channel`], y is x minus the mean of its channel, and
/// each channel has a scale.
///
/// X is (batch, seqlen, heads, head_dim) of f16 or bf16, with head_dim a multiple of 16 up to 256. Any strides are
/// allowed. Nothing is padded, because rows of codes are multiples of 16 bytes, and the transform mixes all columns of
/// a row. A block or channel in which every y is 0 has scale 1. NaN and infinities become NaN, and scales ignore them.
///
/// CPU and GPU give the same bits, and refuse the same calls.
///
/// Transposed codes of V, as 8-bit products read them, are a separate problem:
/// [`QuantizeSpec::transposed`](fa3_types::QuantizeSpec::transposed), run by `fa3::cuda::Quantize`.
///
/// ```
/// use fa3::half::bf16;
/// use fa3::ndarray::Array4;
/// use fa3::{Device, Quantize, Rope, RopeStyle};
///
/// // (batch, seqlen, heads, head_dim), with one outlier
/// let mut q = Array4::from_shape_fn((1, 200, 2, 64), |(_, s, h, d)| {
///     bf16::from_f32(((s * 7 + h * 5 + d * 3) as f32).sin())
/// });
/// q[[0, 5, 0, 9]] = bf16::from_f32(500.0);
///
/// let table = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0)?.table(200);
/// let quantize = Quantize::new(&q).rotary(&table).hadamard(1);
/// let quantized = quantize.run(&Device::Cpu)?;
/// assert_eq!(quantized.codes.dim(), (1, 200, 2, 64));
/// assert_eq!(quantized.scales.dim(), (1, 2, 2)); // a scale for each 128 rows of a head
/// // The transform spreads the outlier over its row: the block's scale is not 500 / 448.
/// assert!(quantized.scale([0, 5, 0, 9]) < 0.2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "nothing is computed before `run`"]
pub struct Quantize<'a, T> {
    x: ArrayView4<'a, T>,
    table: Option<&'a RopeTable>,
    first: Option<usize>,
    listed: Option<&'a [i32]>,
    seed: Option<u64>,
    scaling: Scaling,
    packed: Option<&'a [i32]>,
}

/// A tensor of e4m3 with its scales: the original, rotated and transformed, is about codes · scales, plus the means of
/// channels, if any.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Quantized {
    /// Codes (batch, seqlen, heads, head_dim).
    pub codes: Array4<E4m3>,
    /// Scales: (batch, heads, blocks) of blocks, which [`ScaleBlocks`](crate::problem::ScaleBlocks) numbers in packed
    /// sequences; (batch, groups, 1) of groups of heads; (batch, heads, head_dim) of channels; (1, 1, 1) for a single
    /// scale.
    pub scales: Array3<f32>,
    /// The means of channels (batch, heads, head_dim), if channels have scales.
    pub mean: Option<Array3<f32>>,
    /// The granularity or the source of the scales.
    pub scaling: Scaling,
    /// The rows of packed sequences.
    pub(crate) packed: Option<SequenceRows>,
}

impl<'a, T: Scalar> Quantize<'a, T> {
    /// Quantization without rotation and transform, of an array or a view, with a scale for each 128 rows of a head.
    pub fn new(x: impl Into<ArrayView4<'a, T>>) -> Quantize<'a, T> {
        let scaling = Scaling::Block { rows: 128 };
        Quantize { x: x.into(), table: None, first: None, listed: None, seed: None, scaling, packed: None }
    }

    fa3_types::setters! {
        /// Rotates each row by its position first. The rows of a sequence have positions 0, 1, …
        rotary(table: &'a RopeTable) { table: Some(table) }

        /// Sets the positions of each sequence's rows to `first`, `first + 1`, … This excludes [`Quantize::positions`].
        first_position(first: usize) { first: Some(first) }

        /// Sets the position of each row, (batch, seqlen), row by row. A row whose position is outside of the table
        /// becomes NaN. This excludes [`Quantize::first_position`].
        positions(positions: &'a [i32]) { listed: Some(positions) }

        /// Transforms each row before it is quantized, by an orthogonal matrix with random signs. Give Q and K the same
        /// seed: this preserves their scores.
        hadamard(seed: u64) { seed: Some(seed) }

        /// Sets the source of scales, by default a scale for each 128 rows of a head. A GPU reads the tensor twice for
        /// [`Scaling::Heads`], [`Scaling::Tensor`] and [`Scaling::Channel`]. Scales of channels are for V.
        scaling(scaling: Scaling) { scaling }

        /// Takes the tensor as packed: sequence i is rows `cu_seqlens[i] .. cu_seqlens[i + 1]`, and no block has rows
        /// of two sequences. The rows of each sequence have positions 0, 1, … or the listed ones; a row whose position
        /// is outside of the table becomes NaN. Codes of rows behind the last sequence are 0.
        ///
        /// ```
        /// use fa3::half::bf16;
        /// use fa3::ndarray::Array4;
        /// use fa3::{Device, Quantize};
        ///
        /// let x = Array4::from_shape_fn((1, 300, 1, 64), |(_, s, _, d)| bf16::from_f32((s + d) as f32));
        /// let quantized = Quantize::new(&x).packed(&[0, 130, 300]).run(&Device::Cpu)?;
        /// // The first sequence has blocks of 128 and of 2 rows.
        /// assert_eq!(quantized.scale([0, 129, 0, 0]), 192.0 / 448.0);
        /// # Ok::<(), fa3::Error>(())
        /// ```
        packed(cu_seqlens: &'a [i32]) { packed: Some(cu_seqlens) }
    }

    /// The validated problem, of contiguous tensors: the strides of the view are not part of it.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn problem(&self) -> Result<QuantizeProblem, Error> {
        Ok(self.parts()?.0)
    }

    /// The problem, and the transform with its signs.
    fn parts(&self) -> Result<(QuantizeProblem, Option<Incoherent>), Error> {
        let (batch, seqlen, heads, head_dim) = self.x.dim();
        let mut spec = QuantizeSpec::contiguous(T::DTYPE, Shape { batch, seqlen, heads, head_dim });
        spec.scaling = self.scaling;
        let rows = self.rows()?;
        spec.packed = rows.is_packed().then_some(rows.count());
        spec.rotary = self.rotary_spec()?;
        let problem = spec.validate()?;
        let Some(seed) = self.seed else { return Ok((problem, None)) };
        // Signs are drawn only after head_dim has been validated.
        let incoherent = Incoherent::new(head_dim, seed);
        spec.signs = incoherent.signs();
        Ok((spec.validate()?, Some(incoherent)))
    }

    fn rotary_spec(&self) -> Result<Option<Rotary>, Error> {
        let positions = positions(&self.x, self.first, self.listed)?;
        let Some(table) = self.table else {
            let nowhere = self.first.is_none() && self.listed.is_none();
            return if nowhere { Ok(None) } else { Err(Error::PositionsWithoutRotary) };
        };
        let (style, rotary_dim, table_rows) = (table.style(), table.rotary_dim(), table.positions());
        Ok(Some(Rotary { style, rotary_dim, table_rows, positions }))
    }

    /// Computes codes and scales. On a GPU, x is copied to it and the results are copied back.
    ///
    /// # Errors
    /// [`Error`] with the first violation.
    pub fn run(&self, device: &Device) -> Result<Quantized, Error> {
        let ((problem, incoherent), rows) = (self.parts()?, self.rows()?);
        if rows.end() > problem.x().shape.seqlen {
            let (tensor, given, rows) = (TensorName::X, rows.end(), problem.x().shape.seqlen);
            return Err(Error::Problem(ProblemError::CuSeqlensEnd { tensor, given, rows }));
        }
        let quantized = match device {
            Device::Cpu => self.on_cpu(&problem, incoherent.as_ref(), &rows),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let lists = [self.listed, self.packed];
                cuda::quantize(device, &problem, self.x, self.table, lists)?
            }
        };
        Ok(Quantized { packed: rows.is_packed().then_some(rows), ..quantized })
    }

    /// The rows of the sequences.
    fn rows(&self) -> Result<SequenceRows, Error> {
        let (batch, seqlen, ..) = self.x.dim();
        Ok(SequenceRows::listed(batch, seqlen, self.packed, None)?)
    }

    fn on_cpu(
        &self,
        problem: &QuantizeProblem,
        incoherent: Option<&Incoherent>,
        sequences: &SequenceRows,
    ) -> Quantized {
        let Shape { batch, heads, .. } = problem.x().shape;
        let whole = (0..batch, 0..heads);
        let part = |part, granularity| self.part(problem, incoherent, (part, sequences), granularity);
        match self.scaling {
            Scaling::Channel => self.by_channels(problem),
            _ if self.x.is_empty() => {
                let count = problem.scales_shape().map_or(0, |shape| shape.iter().product());
                Quantized::new(problem, Vec::new(), vec![1.0; count], Vec::new())
            }
            Scaling::Heads { heads: of_scale } => {
                let mut codes = Array4::from_elem(problem.x().shape.dims(), E4m3::ZERO);
                let mut scales = Vec::new();
                for (batch, first) in
                    (0..batch).flat_map(|batch| (0..heads).step_by(of_scale).map(move |first| (batch, first)))
                {
                    let group = part((batch..batch + 1, first..first + of_scale), Granularity::Tensor);
                    let of_batch = codes.index_axis_mut(Axis(0), batch);
                    let (_, mut rest) = of_batch.split_at(Axis(1), first);
                    let (mut to, _) = rest.view_mut().split_at(Axis(1), of_scale);
                    to.assign(&group.codes().index_axis(Axis(0), 0));
                    scales.extend(group.scales().values());
                }
                Quantized::new(problem, codes.into_iter().collect(), scales, Vec::new())
            }
            Scaling::Tensor => of_codes(problem, part(whole, Granularity::Tensor)),
            Scaling::Block { rows } => {
                let quantized = part(whole, Granularity::Block { rows });
                let scales = quantized.block_scales().expect("blocks have scales");
                Quantized::new(problem, quantized.codes().iter().copied().collect(), scales, Vec::new())
            }
            // With a given scale, any block size gives the same codes: a thread encodes a block at a time.
            Scaling::Given(_) => of_codes(problem, part(whole, Granularity::Block { rows: 128 })),
        }
    }

    /// Some heads of some sequences.
    fn part(
        &self,
        problem: &QuantizeProblem,
        incoherent: Option<&Incoherent>,
        ((batch, heads), sequences): ((Range<usize>, Range<usize>), &SequenceRows),
        granularity: Granularity,
    ) -> fa3_quant::Quantized {
        let mut preparation = Preparation::new(granularity);
        preparation.incoherent = incoherent;
        if let Scaling::Given(scale) = self.scaling {
            preparation.scale = Some(scale);
        }
        let whole = problem.x().shape;
        let shape = Shape { batch: batch.len(), heads: heads.len(), ..whole };
        let dense = SequenceRows::dense(shape.batch, shape.seqlen);
        let sequences = if sequences.is_packed() { sequences } else { &dense };
        let first;
        let positions = match self.listed {
            Some(each) => RowPositions::Each(&each[batch.start * whole.seqlen..batch.end * whole.seqlen]),
            None => {
                first = vec![self.first.unwrap_or(0); sequences.count()];
                RowPositions::First(&first)
            }
        };
        preparation.rotation = self.table.map(|table| Rotation { table, positions });
        let quantized = preparation.quantize_rows(shape, sequences, |at, row| {
            let (entry, first) = sequences.start(at.sequence);
            let rows = self.x.index_axis_move(Axis(0), batch.start + entry);
            let source =
                rows.index_axis_move(Axis(0), first + at.row).index_axis_move(Axis(0), heads.start + at.head);
            row.iter_mut().zip(source).for_each(|(to, from)| *to = from.to_f32());
        });
        quantized.expect("a valid problem can be computed")
    }

    fn by_channels(&self, problem: &QuantizeProblem) -> Quantized {
        let x = self.x.mapv(|x| x.to_f32());
        let channels = Channels::of(x.view());
        let codes = channels.quantize(x.view()).expect("they are its channels");
        let numbers = |x: &Array3<f32>| x.iter().copied().collect();
        let codes = codes.codes().iter().copied().collect();
        Quantized::new(problem, codes, numbers(channels.scale()), numbers(channels.mean()))
    }
}

/// The positions of a tensor's rows: from a first one on, or listed.
///
/// # Errors
/// A first position and a list are given, or the list's length is not the number of rows.
pub(crate) fn positions<T>(
    x: &ArrayView4<'_, T>,
    first: Option<usize>,
    listed: Option<&[i32]>,
) -> Result<Positions, Error> {
    let (batch, seqlen, ..) = x.dim();
    match (first, listed) {
        (Some(_), Some(_)) => Err(Error::TwoPositions),
        (first, None) => Ok(Positions::From(first.unwrap_or(0))),
        (None, Some(each)) if batch.checked_mul(seqlen) == Some(each.len()) => Ok(Positions::Listed),
        (None, Some(each)) => Err(Error::PositionCount { given: each.len(), batch, seqlen }),
    }
}

/// The result of a problem without means, from its codes and scales.
fn of_codes(problem: &QuantizeProblem, quantized: fa3_quant::Quantized) -> Quantized {
    let codes = quantized.codes().iter().copied().collect();
    Quantized::new(problem, codes, quantized.scales().values().to_vec(), Vec::new())
}

impl Quantized {
    /// Results of a problem that were computed elsewhere, in the order of the problem's tensors. Given scales and
    /// absent means are ignored.
    ///
    /// # Panics
    /// If the numbers of codes, scales and means differ from the problem's.
    pub fn new(problem: &QuantizeProblem, codes: Vec<E4m3>, scales: Vec<f32>, mean: Vec<f32>) -> Quantized {
        let codes = Array4::from_shape_vec(problem.codes().shape.dims(), codes).expect("one code each");
        let array = |shape, numbers| Array3::from_shape_vec(shape, numbers).expect("one number each");
        let scales = match (problem.scaling(), problem.scales_shape()) {
            (Scaling::Given(scale), _) => Array3::from_elem([1; 3], scale),
            (_, shape) => array(shape.unwrap_or([0; 3]), scales),
        };
        let mean = problem.mean_shape().map(|shape| array(shape, mean));
        Quantized { codes, scales, mean, scaling: problem.scaling(), packed: None }
    }

    /// The scale of an element.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn scale(&self, [batch, row, head, column]: [usize; 4]) -> f32 {
        match self.scaling {
            Scaling::Block { rows } => self.scales[[batch, head, self.block(row, rows)]],
            Scaling::Heads { heads } => self.scales[[batch, head / heads, 0]],
            Scaling::Tensor => self.scales[[0; 3]],
            Scaling::Given(scale) => scale,
            Scaling::Channel => self.scales[[batch, head, column]],
        }
    }

    /// The block of a row of the tensor. A row outside every packed sequence has no block, and counts as part of the
    /// first one.
    fn block(&self, row: usize, rows: usize) -> usize {
        let Some(sequences) = &self.packed else { return row / rows };
        let of_row = |&sequence: &usize| {
            let first = sequences.start(sequence).1;
            (first..first + sequences.capacity(sequence)).contains(&row)
        };
        (0..sequences.count()).find(of_row).map_or(0, |sequence| {
            let first = sequences.start(sequence).1;
            first_block(first as u32, sequence as u32, rows.ilog2()) as usize + (row - first) / rows
        })
    }

    /// Codes · scales, plus means of channels, if any, (batch, seqlen, heads, head_dim).
    pub fn dequantize(&self) -> Array4<f32> {
        let mut x = Array4::zeros(self.codes.dim());
        for ((batch, row, head, column), code) in self.codes.indexed_iter() {
            let at = [batch, row, head, column];
            let mean = self.mean.as_ref().map_or(0.0, |mean| mean[[batch, head, column]]);
            x[at] = code.to_f32().mul_add(self.scale(at), mean);
        }
        x
    }
}
