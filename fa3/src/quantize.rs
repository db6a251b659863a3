//! One quantization to e4m3, as a builder.

use std::ops::Range;

use fa3_quant::{Channels, E4m3, Granularity, Incoherent, Preparation, RopeTable, Rotation, RowPositions};
use fa3_types::{Positions, QuantizeProblem, QuantizeSpec, Rotary, Scaling, Sequences, Shape};
use ndarray::{Array3, Array4, ArrayView4, Axis};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{Device, Error, Scalar};

/// The way of a tensor to e4m3, as FlashAttention-3 takes Q and K there (§3.3). A builder; [`Quantize::run`] computes
/// it.
///
/// ```text
/// y = x, rotated by its position, times M       M = diag(±1) · Hadamard
/// codes = e4m3(y / scale)                       scale = max |y| / 448 of each block of rows of a head
/// ```
///
/// V goes there without rotation and transform. With [`Quantize::channels`] y is x minus the mean of its channel, and
/// each channel has a scale.
///
/// X is (batch, seqlen, heads, head_dim) of f16 or bf16, with head_dim a multiple of 16 up to 256. Strides are free.
/// A block or channel whose numbers y are all 0 has scale 1. NaN and infinities become NaN and count in no scale.
///
/// CPU and GPU give the same bits, and refuse the same.
///
/// Codes of V that are transposed, as 8-bit products read them, come from a problem of its own:
/// [`QuantizeSpec::transposed`], run by `fa3::cuda::Quantize`.
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
/// let quantize = Quantize::new(q.view()).rotary(&table).hadamard(1);
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
    rows: Option<Rows<'a>>,
    seed: Option<u64>,
    scaling: Scaling,
}

/// Where rows stand.
#[derive(Clone, Copy, Debug)]
enum Rows<'a> {
    From(usize),
    Listed(&'a [i32]),
}

/// A tensor of e4m3 with its scales: the original, rotated and transformed, is about codes · scales, and the means of
/// channels more if there are any.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// Codes (batch, seqlen, heads, head_dim).
    pub codes: Array4<E4m3>,
    /// Scales (batch, heads, blocks); of several heads (batch, groups of heads, 1); of channels (batch, heads, head_dim);
    /// (1, 1, 1) if there is one.
    pub scales: Array3<f32>,
    /// The means of channels (batch, heads, head_dim), if these have scales.
    pub mean: Option<Array3<f32>>,
    /// What shares a scale.
    pub scaling: Scaling,
}

impl<'a, T: Scalar> Quantize<'a, T> {
    /// Quantization alone, with a scale for each 128 rows of a head.
    pub fn new(x: ArrayView4<'a, T>) -> Quantize<'a, T> {
        Quantize { x, table: None, rows: None, seed: None, scaling: Scaling::Block { rows: 128 } }
    }

    /// Rotates each row by its position first. The rows of a sequence are at positions 0, 1, …
    pub fn rotary(mut self, table: &'a RopeTable) -> Quantize<'a, T> {
        self.table = Some(table);
        self
    }

    /// Lets the rows of each sequence be at positions `first`, `first + 1`, …
    pub fn first_position(mut self, first: usize) -> Quantize<'a, T> {
        self.rows = Some(Rows::From(first));
        self
    }

    /// Lists the position of each row, (batch, seqlen), row by row. A row whose position is not one of the table's
    /// becomes NaN.
    pub fn positions(mut self, positions: &'a [i32]) -> Quantize<'a, T> {
        self.rows = Some(Rows::Listed(positions));
        self
    }

    /// Transforms each row before it is quantized, by an orthogonal matrix with random signs. Give Q and K the same
    /// seed: then their scores stay the same.
    pub fn hadamard(mut self, seed: u64) -> Quantize<'a, T> {
        self.seed = Some(seed);
        self
    }

    /// A scale for each `rows` rows of a head, 64 or 128.
    pub fn block_rows(mut self, rows: usize) -> Quantize<'a, T> {
        self.scaling = Scaling::Block { rows };
        self
    }

    /// One scale, which is known. Larger numbers than 448 · `scale` saturate.
    pub fn scale(mut self, scale: f32) -> Quantize<'a, T> {
        self.scaling = Scaling::Given(scale);
        self
    }

    /// A scale for each `heads` successive heads of a sequence, by the largest magnitude in them: 1, or the query heads of
    /// a key head. A GPU goes over the tensor twice for it.
    pub fn heads(mut self, heads: usize) -> Quantize<'a, T> {
        self.scaling = Scaling::Heads { heads };
        self
    }

    /// One scale, by the largest magnitude of the tensor. A GPU goes over the tensor twice for it.
    pub fn tensor(mut self) -> Quantize<'a, T> {
        self.scaling = Scaling::Tensor;
        self
    }

    /// A mean, which is subtracted, and a scale for each channel, a column of a head of a sequence. It is for V: what
    /// its rows have in common takes no digits of e4m3 then, and O gets it back in [`crate::Fp8`].
    pub fn channels(mut self) -> Quantize<'a, T> {
        self.scaling = Scaling::Channel;
        self
    }

    /// The problem, validated, of contiguous tensors: the strides of the view are not part of it.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn problem(&self) -> Result<QuantizeProblem, Error> {
        Ok(self.parts()?.0)
    }

    /// The problem and the transform that its signs are of.
    fn parts(&self) -> Result<(QuantizeProblem, Option<Incoherent>), Error> {
        let (batch, seqlen, heads, head_dim) = self.x.dim();
        let mut spec = QuantizeSpec::contiguous(T::DTYPE, Shape { batch, seqlen, heads, head_dim });
        spec.scaling = self.scaling;
        spec.rotary = self.rotary_spec()?;
        let problem = spec.validate()?;
        let Some(seed) = self.seed else { return Ok((problem, None)) };
        // Only now is head_dim known to be one that signs may be drawn for.
        let incoherent = Incoherent::new(head_dim, seed);
        spec.signs = incoherent.signs();
        Ok((spec.validate()?, Some(incoherent)))
    }

    fn rotary_spec(&self) -> Result<Option<Rotary>, Error> {
        let Some(table) = self.table else {
            return if self.rows.is_none() { Ok(None) } else { Err(Error::PositionsWithoutRotary) };
        };
        let (batch, seqlen, ..) = self.x.dim();
        let positions = match self.rows {
            None => Positions::From(0),
            Some(Rows::From(first)) => Positions::From(first),
            Some(Rows::Listed(each)) if batch.checked_mul(seqlen) != Some(each.len()) => {
                return Err(Error::PositionCount { given: each.len(), batch, seqlen });
            }
            Some(Rows::Listed(_)) => Positions::Listed,
        };
        let (style, rotary_dim, table_rows) = (table.style(), table.rotary_dim(), table.positions());
        Ok(Some(Rotary { style, rotary_dim, table_rows, positions }))
    }

    /// Computes codes and scales. On a GPU, x is copied there and the results are copied back.
    ///
    /// # Errors
    /// [`Error`] with the first thing that is wrong.
    pub fn run(&self, device: &Device) -> Result<Quantized, Error> {
        let (problem, incoherent) = self.parts()?;
        match device {
            Device::Cpu => Ok(self.on_cpu(&problem, incoherent.as_ref())),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let listed = match self.rows {
                    Some(Rows::Listed(each)) => Some(each),
                    Some(Rows::From(_)) | None => None,
                };
                Ok(cuda::quantize(device, &problem, self.x, self.table, listed)?)
            }
        }
    }

    fn on_cpu(&self, problem: &QuantizeProblem, incoherent: Option<&Incoherent>) -> Quantized {
        let Shape { batch, heads, .. } = problem.x().shape;
        let whole = (0..batch, 0..heads);
        let part = |part, granularity| self.part(problem, incoherent, part, granularity);
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
            Scaling::Block { rows } => of_codes(problem, part(whole, Granularity::Block { rows })),
            // Any blocks do: they are what a thread encodes at once.
            Scaling::Given(_) => of_codes(problem, part(whole, Granularity::Block { rows: 128 })),
        }
    }

    /// These heads of these sequences.
    fn part(
        &self,
        problem: &QuantizeProblem,
        incoherent: Option<&Incoherent>,
        (batch, heads): (Range<usize>, Range<usize>),
        granularity: Granularity,
    ) -> fa3_quant::Quantized {
        let mut preparation = Preparation::new(granularity);
        preparation.incoherent = incoherent;
        if let Scaling::Given(scale) = self.scaling {
            preparation.scale = Some(scale);
        }
        let whole = problem.x().shape;
        let shape = Shape { batch: batch.len(), heads: heads.len(), ..whole };
        let first;
        let positions = match self.rows.unwrap_or(Rows::From(0)) {
            Rows::Listed(each) => {
                RowPositions::Each(&each[batch.start * whole.seqlen..batch.end * whole.seqlen])
            }
            Rows::From(position) => {
                first = vec![position; shape.batch];
                RowPositions::First(&first)
            }
        };
        preparation.rotation = self.table.map(|table| Rotation { table, positions });
        let sequences = Sequences::dense(shape.batch, shape.seqlen);
        let quantized = preparation.quantize_rows(shape, &sequences, |at, row| {
            let rows = self.x.index_axis_move(Axis(0), batch.start + at.sequence);
            let source =
                rows.index_axis_move(Axis(0), at.row).index_axis_move(Axis(0), heads.start + at.head);
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

/// Codes with scales of their own.
fn of_codes(problem: &QuantizeProblem, quantized: fa3_quant::Quantized) -> Quantized {
    let codes = quantized.codes().iter().copied().collect();
    Quantized::new(problem, codes, quantized.scales().values().to_vec(), Vec::new())
}

impl Quantized {
    /// What was computed of a problem elsewhere, in the order of its tensors. Of scales that were given, and means that
    /// there are not, nothing is looked at.
    ///
    /// # Panics
    /// Unless there are as many codes, scales and means as the problem has.
    pub fn new(problem: &QuantizeProblem, codes: Vec<E4m3>, scales: Vec<f32>, mean: Vec<f32>) -> Quantized {
        let codes = Array4::from_shape_vec(problem.codes().shape.dims(), codes).expect("one code each");
        let array = |shape, numbers| Array3::from_shape_vec(shape, numbers).expect("one number each");
        let scales = match (problem.scaling(), problem.scales_shape()) {
            (Scaling::Given(scale), _) => Array3::from_elem([1; 3], scale),
            (_, shape) => array(shape.unwrap_or([0; 3]), scales),
        };
        let mean = problem.mean_shape().map(|shape| array(shape, mean));
        Quantized { codes, scales, mean, scaling: problem.scaling() }
    }

    /// The scale of an element.
    ///
    /// # Panics
    /// If there is no such element.
    pub fn scale(&self, [batch, row, head, column]: [usize; 4]) -> f32 {
        match self.scaling {
            Scaling::Block { rows } => self.scales[[batch, head, row / rows]],
            Scaling::Heads { heads } => self.scales[[batch, head / heads, 0]],
            Scaling::Tensor => self.scales[[0; 3]],
            Scaling::Given(scale) => scale,
            Scaling::Channel => self.scales[[batch, head, column]],
        }
    }

    /// Codes · scales, and means of channels more, (batch, seqlen, heads, head_dim).
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

#[cfg(test)]
mod tests {
    use fa3_quant::Rope;
    use fa3_types::{QuantizeProblemError, RopeStyle};
    use half::{bf16, f16};

    use super::*;

    const DIMS: [usize; 4] = [2, 150, 3, 48];

    fn wave<T: Scalar>(dims: [usize; 4]) -> Array4<T> {
        let mut x = 0.0;
        Array4::from_shape_simple_fn(dims, || {
            x += 0.7;
            T::from_f32(3.0 * f32::sin(x))
        })
    }

    fn table(positions: usize) -> RopeTable {
        Rope::new(RopeStyle::Interleaved, 32, 10_000.0).unwrap().table(positions)
    }

    /// What fa3-quant makes of `x`.
    fn expected<T: Scalar>(x: &Array4<T>, preparation: &Preparation<'_>) -> (Array4<E4m3>, Vec<f32>) {
        let (batch, seqlen, ..) = x.dim();
        let x = x.mapv(|x| x.to_f32());
        let quantized = preparation.quantize(x.view(), &Sequences::dense(batch, seqlen)).unwrap();
        (quantized.codes().clone(), quantized.scales().values().to_vec())
    }

    fn is_as_fa3_quant_s<T: Scalar + Copy>() {
        let (x, table, mixed) = (wave::<T>(DIMS), table(170), Incoherent::new(48, 9));
        let first = |first| Rotation { table: &table, positions: RowPositions::First(first) };
        let listed: Vec<i32> = (0..300).map(|row| row * 37 % 180 - 5).collect();
        let each = Rotation { table: &table, positions: RowPositions::Each(&listed) };
        let [small, large] = [64, 128].map(|rows| Preparation::new(Granularity::Block { rows }));
        let quantize = Quantize::new(x.view());
        for (quantize, preparation) in [
            (quantize.clone(), large),
            (quantize.clone().block_rows(64).hadamard(9), small.incoherent(&mixed)),
            (quantize.clone().rotary(&table), large.rotation(first(&[0, 0]))),
            (quantize.clone().rotary(&table).first_position(20), large.rotation(first(&[20, 20]))),
            (
                quantize.clone().rotary(&table).positions(&listed).hadamard(9),
                large.rotation(each).incoherent(&mixed),
            ),
            (quantize.clone().scale(0.01), Preparation::with_scale(0.01)),
            (quantize.clone().tensor().hadamard(9), Preparation::new(Granularity::Tensor).incoherent(&mixed)),
            (
                quantize.clone().heads(1).rotary(&table).positions(&listed),
                Preparation::new(Granularity::Head).rotation(each),
            ),
        ] {
            let quantized = quantize.run(&Device::Cpu).unwrap();
            let (codes, scales) = expected(&x, &preparation);
            assert_eq!(quantized.codes, codes);
            assert_eq!(quantized.scales.iter().copied().collect::<Vec<_>>(), scales);
            let shape = quantize.problem().unwrap().scales_shape().unwrap_or([1; 3]);
            assert_eq!(quantized.scales.shape(), shape);
        }
        let values = x.mapv(|x| x.to_f32());
        let channels = Channels::of(values.view());
        let quantized = Quantize::new(x.view()).channels().run(&Device::Cpu).unwrap();
        assert_eq!(quantized.codes, channels.quantize(values.view()).unwrap().codes());
        assert_eq!((&quantized.scales, quantized.mean.as_ref()), (channels.scale(), Some(channels.mean())));
    }

    #[test]
    fn codes_and_scales_are_those_of_fa3_quant() {
        is_as_fa3_quant_s::<f16>();
        is_as_fa3_quant_s::<bf16>();
    }

    /// The scale of several heads is the largest of theirs, and their codes are those of that scale.
    #[test]
    fn heads_share_the_largest_scale() {
        let x = Array4::from_shape_fn([2, 150, 6, 48], |(b, s, h, d)| {
            f16::from_f32(
                ((7 * b + 3 * s + d) as f32).sin() * (1 + h) as f32 * if h == 3 { 0.0 } else { 1.0 },
            )
        });
        let quantize = Quantize::new(x.view()).hadamard(1);
        let single = quantize.clone().heads(1).run(&Device::Cpu).unwrap();
        let shared = quantize.clone().heads(3).run(&Device::Cpu).unwrap();
        assert_eq!((single.scales.dim(), shared.scales.dim()), ((2, 6, 1), (2, 2, 1)));
        for ((batch, group, _), &scale) in shared.scales.indexed_iter() {
            // Zeros alone have the scale 1, but none in what is larger.
            let heads = (3 * group..3 * group + 3).filter(|&head| head != 3);
            let largest = heads.map(|head| single.scales[[batch, head, 0]]).fold(0.0, f32::max);
            assert_eq!(scale, largest);
            let given = quantize.clone().scale(scale).run(&Device::Cpu).unwrap();
            for ((b, row, head, column), &code) in shared.codes.indexed_iter() {
                if (b, head / 3) == (batch, group) {
                    assert_eq!(code, given.codes[[b, row, head, column]]);
                }
            }
        }
        assert_eq!(single.scales[[0, 3, 0]], 1.0);
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_gives_the_same_bits() {
        let (device, no_gpu) = Device::best();
        if let Some(why) = no_gpu {
            println!("skipped: {why}");
            return;
        }
        let (x, table, listed) = (wave::<bf16>(DIMS), table(170), vec![7; 300]);
        let quantize = Quantize::new(x.view()).hadamard(9);
        let rotated = quantize.clone().rotary(&table);
        let empty = Array4::from_elem([2, 0, 3, 48], bf16::ZERO);
        for quantize in [
            quantize.clone(),
            quantize.scale(0.01),
            rotated.clone().first_position(20).block_rows(64),
            rotated.clone().positions(&listed),
            Quantize::new(x.view()).channels(),
            rotated.clone().heads(1),
            Quantize::new(x.view()).heads(3),
            Quantize::new(x.view()).tensor(),
            Quantize::new(empty.view()).tensor(),
            Quantize::new(empty.view()),
            Quantize::new(empty.view()).channels(),
        ] {
            assert_eq!(quantize.run(&device).unwrap(), quantize.run(&Device::Cpu).unwrap());
        }
    }

    #[test]
    fn dequantized_numbers_are_near() {
        let x = wave::<f16>(DIMS);
        let quantize = Quantize::new(x.view());
        for quantize in [quantize.clone().block_rows(64), quantize.clone().scale(0.01), quantize.channels()] {
            let quantized = quantize.run(&Device::Cpu).unwrap();
            for ((at, &near), x) in quantized.dequantize().indexed_iter().zip(&x) {
                let (batch, _, head, column) = at;
                let mean = quantized.mean.as_ref().map_or(0.0, |mean| mean[[batch, head, column]]);
                // Half a step of 3 bits, or of the smallest numbers.
                let bound = (x.to_f32() - mean).abs() / 16.0 + 1e-4;
                assert!((near - x.to_f32()).abs() <= bound, "{at:?}: {near} {x}");
            }
        }
    }

    #[test]
    fn strides_are_free() {
        let x = wave::<f16>(DIMS);
        let expected = Quantize::new(x.view()).run(&Device::Cpu).unwrap();
        let heads_first = x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
        let view = heads_first.view().permuted_axes([0, 2, 1, 3]);
        assert_eq!(Quantize::new(view).run(&Device::Cpu).unwrap(), expected);
        let one = x.index_axis(Axis(0), 0);
        let twice = one.broadcast(DIMS).unwrap();
        let quantized = Quantize::new(twice).run(&Device::Cpu).unwrap();
        assert_eq!(quantized.codes.index_axis(Axis(0), 1), expected.codes.index_axis(Axis(0), 0));
    }

    #[test]
    fn tensors_without_elements_are_legal() {
        for dims in [[0, 4, 2, 16], [2, 0, 2, 16], [1 << 30, 0, 1, 16]] {
            let x = Array4::from_elem(dims, f16::ZERO);
            let quantized = Quantize::new(x.view()).hadamard(1).run(&Device::Cpu).unwrap();
            assert_eq!(quantized.codes.shape(), dims);
            assert_eq!(quantized.scales.shape(), [dims[0], dims[2], dims[1].div_ceil(128)]);
            let given = Quantize::new(x.view()).scale(0.5).run(&Device::Cpu).unwrap();
            assert_eq!(given.scales, Array3::from_elem([1; 3], 0.5));
            let one = Quantize::new(x.view()).tensor().run(&Device::Cpu).unwrap();
            assert_eq!(one.scales, Array3::ones([1; 3]));
        }
    }

    #[test]
    fn channels_without_elements_have_mean_0_and_scale_1() {
        for dims in [[0, 4, 2, 16], [2, 0, 2, 16]] {
            let x = Array4::from_elem(dims, f16::ZERO);
            let quantized = Quantize::new(x.view()).channels().run(&Device::Cpu).unwrap();
            let shape = [dims[0], dims[2], dims[3]];
            assert_eq!(quantized.mean, Some(Array3::zeros(shape)));
            assert_eq!(quantized.scales, Array3::ones(shape));
        }
    }

    #[test]
    fn bad_requests_are_refused() {
        let (x, table) = (wave::<f16>(DIMS), table(150));
        let quantize = Quantize::new(x.view());
        let refused = |quantize: &Quantize<'_, f16>| quantize.run(&Device::Cpu).unwrap_err();
        let error = refused(&quantize.clone().block_rows(32));
        assert_eq!(error, QuantizeProblemError::BlockRows { given: 32 }.into());
        let error = refused(&quantize.clone().scale(-1.0));
        assert_eq!(error.to_string(), "the scale -1 is outside 2^-64 to 2^64");
        let rotated = quantize.clone().rotary(&table);
        let error = refused(&rotated.clone().first_position(1));
        assert_eq!(error, QuantizeProblemError::Positions { last: 150, rows: 150 }.into());
        let error = refused(&rotated.clone().positions(&[0; 299]));
        assert_eq!(error.to_string(), "299 positions were given for 2 sequences of 150 rows");
        for quantize in [quantize.clone().first_position(0), quantize.clone().positions(&[0; 300])] {
            assert_eq!(refused(&quantize).to_string(), "positions were given without a rotation");
        }
        let error = refused(&quantize.clone().heads(2));
        assert_eq!(error.to_string(), "a scale for each 2 heads, of which the tensor has 3");
        let error = refused(&quantize.channels().hadamard(1));
        assert_eq!(error, QuantizeProblemError::MixedChannels.into());
        let wide = Rope::new(RopeStyle::HalfSplit, 64, 10_000.0).unwrap().table(150);
        let error = refused(&Quantize::new(x.view()).rotary(&wide));
        assert_eq!(error, QuantizeProblemError::RotaryDim { given: 64, head_dim: 48 }.into());
        let single = wave::<f32>(DIMS);
        let error = Quantize::new(single.view()).run(&Device::Cpu).unwrap_err();
        assert_eq!(error.to_string(), "x is f32, expected f16 or bf16");
    }

    /// No signs are drawn for it.
    #[test]
    fn a_head_dimension_that_is_too_large_is_refused_at_once() {
        let one = Array4::from_elem([1, 1, 1, 1], f16::ZERO);
        let wide = one.broadcast([1, 1, 1, (1 << 31) - 16]).unwrap();
        let error = Quantize::new(wide).hadamard(1).problem().unwrap_err();
        assert_eq!(error.to_string(), "x has head_dim 2147483632, more than 256");
    }
}
