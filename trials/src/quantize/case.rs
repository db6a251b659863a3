//! A quantization problem with its inputs and its expected results.

use std::ops::Range;

use fa3_cuda::kernels::{Spec, quantize};
use fa3_quant::{
    Channels, E4m3, Granularity, Incoherent, Preparation, Quantized, Rope, RopeTable, Rotation, RowPositions,
};
use fa3_sched::DeviceLimits;
use fa3_sched::quantize::Plan;
use fa3_types::{
    Dtype, Positions, QuantizeProblem, QuantizeSpec, RopeStyle, Rotary, Scaling, SequenceRows, Shape,
    ValueLayout,
};
use ndarray::{Array2, Array4, Axis, Slice};

use crate::fwd::Layout;
use crate::memory::{Memory, UNWRITTEN, before, put, rounded, tensor_bytes, words};
use crate::values::Rng;
use crate::{Bits, Trial};

/// Distribution of the inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Standard normal.
    Normal,
    /// Standard normal, with one number in 500 a thousand times as large.
    Outliers,
    /// Small enough that block scales are subnormal or nearly so, if the type has such numbers.
    Tiny,
    /// As large as the type allows, so that sums overflow.
    Huge,
    /// Zeros of either sign, and a few ones.
    Zeros,
    /// Normal, with some NaN and infinities.
    NotFinite,
}

impl Spread {
    /// Every distribution.
    pub const ALL: [Spread; 6] =
        [Spread::Normal, Spread::Outliers, Spread::Tiny, Spread::Huge, Spread::Zeros, Spread::NotFinite];
}

/// Positions of the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// Consecutive positions from this one on.
    From(usize),
    /// Listed positions anywhere in the table. Some lie outside of it.
    Listed,
}

/// A quantization problem with the seed of its inputs.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// f16 or bf16.
    pub dtype: Dtype,
    /// Shape of the tensor.
    pub shape: Shape,
    /// Memory layouts of the tensor and of the codes. The latter is ignored if the codes are transposed.
    pub layouts: [Layout; 2],
    /// Whether the codes are in rows or transposed.
    pub value_layout: ValueLayout,
    /// Granularity or origin of the scales.
    pub scaling: Scaling,
    /// The rotary embedding: pairing style, number of rotated entries, and positions of the rows.
    pub rotation: Option<(RopeStyle, usize, Rows)>,
    /// Whether rows get a Hadamard transform.
    pub hadamard: bool,
    /// Lengths of the packed sequences, if the tensor is packed (it then has batch 1). Rows after the last sequence are
    /// NaN.
    pub packed: Option<&'static [usize]>,
    /// Distribution of the inputs.
    pub spread: Spread,
    /// Seed of numbers, positions and signs.
    pub seed: u64,
}

/// The expected results of a case.
struct Expected {
    codes: Array4<E4m3>,
    scales: Vec<f32>,
    /// Means of the channels.
    mean: Vec<f32>,
}

/// The inputs of a case.
struct Inputs {
    x: Array4<f32>,
    table: Option<RopeTable>,
    positions: Option<Vec<i32>>,
    incoherent: Option<Incoherent>,
}

impl Expected {
    /// Zero codes without scales.
    fn zeros(shape: Shape) -> Expected {
        Expected { codes: Array4::from_elem(shape.dims(), E4m3::ZERO), scales: Vec::new(), mean: Vec::new() }
    }

    /// The codes in the transposed layout that the PV product reads.
    fn transposed(&self) -> Array4<E4m3> {
        let (batch, seqlen, ..) = self.codes.dim();
        let sequences = SequenceRows::dense(batch, seqlen);
        let quantized = Quantized::new(self.codes.clone(), &sequences, Granularity::Tensor, vec![1.0]);
        quantized.expect("1 is a scale").transposed()
    }
}

impl Case {
    /// A random case. Seeds that are equal modulo `kernels` share their kernel, so that many problems need few of them.
    pub fn random(seed: u64, kernels: u64) -> Case {
        let mut of_kernel = Rng::new(seed % kernels);
        let mut rng = Rng::new(seed ^ 0x5eed << 32);
        let head_dim = 16 * (1 + of_kernel.below(16));
        let rotary_dim = 16 * (1 + of_kernel.below(head_dim as u64 / 16));
        let style = [RopeStyle::Interleaved, RopeStyle::HalfSplit][of_kernel.below(2)];
        let rows = if of_kernel.below(2) == 0 { Rows::Listed } else { Rows::From(rng.below(100)) };
        let scale = (rng.normal() * 4.0).exp2() as f32;
        let scalings = [
            Scaling::Block { rows: 64 },
            Scaling::Block { rows: 128 },
            Scaling::Given(scale),
            Scaling::Channel,
            Scaling::Heads { heads: 1 + of_kernel.below(2) },
            Scaling::Tensor,
        ];
        Case {
            dtype: [Dtype::F16, Dtype::Bf16][of_kernel.below(2)],
            scaling: scalings[of_kernel.below(6)],
            rotation: (of_kernel.below(4) > 0).then_some((style, rotary_dim, rows)),
            hadamard: of_kernel.below(3) > 0,
            shape: Shape {
                batch: 1 + rng.below(3),
                seqlen: 1 + rng.below(400),
                heads: 1 + rng.below(5),
                head_dim,
            },
            layouts: [Layout::ALL[rng.below(4)], Layout::ALL[rng.below(4)]],
            value_layout: [ValueLayout::Rows, ValueLayout::Transposed][of_kernel.below(2)],
            packed: None,
            spread: Spread::ALL[rng.below(6)],
            seed,
        }
        .allowed()
    }

    /// The case, or the nearest supported one. With per-channel scales there is no rotation and no transform. The size
    /// of head groups divides the number of heads. Packed sequences have codes in rows with block scales.
    #[must_use]
    pub fn allowed(self) -> Case {
        let Shape { heads, .. } = self.shape;
        let of_blocks = matches!(self.scaling, Scaling::Block { .. });
        let packed = self.packed.filter(|_| of_blocks && self.value_layout == ValueLayout::Rows);
        let shape = packed.map_or(self.shape, |lengths| Shape {
            batch: 1,
            seqlen: lengths.iter().sum::<usize>() + 30,
            ..self.shape
        });
        let case = Case { packed, shape, ..self };
        match self.scaling {
            Scaling::Channel => Case { rotation: None, hadamard: false, ..case },
            Scaling::Heads { heads: given } if !heads.is_multiple_of(given) => {
                Case { scaling: Scaling::Heads { heads }, ..case }
            }
            Scaling::Block { .. } | Scaling::Heads { .. } | Scaling::Tensor | Scaling::Given(_) => case,
        }
    }

    /// Builds the quantization problem.
    ///
    /// # Panics
    /// If the case is invalid.
    pub fn problem(&self) -> QuantizeProblem {
        let [of_x, of_codes] = self.layouts;
        let of_codes = match self.value_layout {
            ValueLayout::Rows => of_codes,
            ValueLayout::Transposed => Layout::Contiguous,
        };
        let [x, codes] = [(of_x, self.dtype), (of_codes, Dtype::E4m3)]
            .map(|(layout, dtype)| layout.tensor(dtype, self.shape));
        let mut spec = QuantizeSpec::new(x, codes);
        spec.layout = self.value_layout;
        spec.scaling = self.scaling;
        spec.packed = self.packed.map(<[usize]>::len);
        spec.rotary = self.rotation.map(|(style, rotary_dim, rows)| Rotary {
            style,
            rotary_dim,
            table_rows: self.table_rows(),
            positions: match rows {
                Rows::From(first) => Positions::From(first),
                Rows::Listed => Positions::Listed,
            },
        });
        spec.signs = self.incoherent().and_then(|incoherent| incoherent.signs());
        spec.validate().unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// Builds the trial of this case for a device of this many SMs.
    ///
    /// # Panics
    /// If the planner refuses the case.
    pub fn trial(self, sms: u32) -> Trial {
        let limits = DeviceLimits::h100_sxm().sms(sms.try_into().expect("a device has SMs"));
        let plan = Plan::new(&self.problem(), &limits).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let program = quantize::program(&plan).map(Spec::kernel);
        let (inputs, problem) = (self.inputs(), self.problem());
        let floats = |table: &Array2<f32>| words(table.iter().copied(), f32::to_le_bytes);
        let table = || inputs.table.as_ref().expect("a table is of a rotation");
        let before = before(&program, |buffer| match buffer.name {
            "x" => Some(tensor_bytes(problem.x(), &inputs.x)),
            "cos" => Some(floats(table().cos())),
            "sin" => Some(floats(table().sin())),
            "positions" => Some(words(inputs.positions.iter().flatten().copied(), i32::to_le_bytes)),
            "cu_seqlens" => Some(words(self.sequences().cu_seqlens(), i32::to_le_bytes)),
            _ => None,
        });
        Trial::new(format!("{plan}, {self:?}"), Bits::Inputs, program, before, move |after| self.judge(after))
    }

    /// Compares codes, scales and means with the results of fa3-quant.
    fn judge(&self, after: Memory<'_>) -> Result<(), String> {
        let (problem, expected) = (self.problem(), self.expected());
        let mut codes = vec![UNWRITTEN; problem.codes_bytes().0 as usize];
        match self.value_layout {
            ValueLayout::Rows => {
                put(&mut codes, problem.codes(), expected.codes.view(), |code| code.to_bits().into());
            }
            ValueLayout::Transposed => {
                let transposed = expected.transposed();
                codes.iter_mut().zip(&transposed).for_each(|(to, code)| *to = code.to_bits());
            }
        }
        after.check_bytes("codes", &codes.into_iter().map(Some).collect::<Vec<_>>())?;
        let outputs = [
            ("scales", problem.scales_shape().is_some().then_some(expected.scales)),
            ("mean", problem.mean_shape().is_some().then_some(expected.mean)),
        ];
        for (name, expected) in outputs.into_iter().filter_map(|(name, numbers)| Some((name, numbers?))) {
            let given = after.floats(name).unwrap_or_default();
            if given.len() != expected.len() {
                return Err(format!("{name} has {} numbers, not {}", given.len(), expected.len()));
            }
            let pairs = given.into_iter().zip(expected);
            if let Some((at, (given, expected))) = pairs.enumerate().find(|(_, (x, y))| x != y) {
                return Err(format!("{name} {at} is {given:e}, not {expected:e}"));
            }
        }
        Ok(())
    }

    /// The results of fa3-quant.
    fn expected(&self) -> Expected {
        let inputs = self.inputs();
        let Shape { batch, heads, .. } = self.shape;
        match self.scaling {
            Scaling::Channel => {
                let channels = Channels::of(inputs.x.view());
                let codes = channels.quantize(inputs.x.view());
                let codes = codes.unwrap_or_else(|error| panic!("{self:?}: {error}"));
                let [scales, mean] =
                    [channels.scale(), channels.mean()].map(|numbers| numbers.iter().copied().collect());
                Expected { codes: codes.codes().clone(), scales, mean }
            }
            Scaling::Heads { heads: of_scale } => {
                // Each group of heads is quantized as a tensor of its own.
                let mut expected = Expected::zeros(self.shape);
                for (batch, first) in
                    (0..batch).flat_map(|batch| (0..heads).step_by(of_scale).map(move |first| (batch, first)))
                {
                    let group = self.prepared(&inputs, batch..batch + 1, first..first + of_scale);
                    expected.scales.extend(group.scales().values());
                    for ((_, row, head, column), &code) in group.codes().indexed_iter() {
                        expected.codes[[batch, row, first + head, column]] = code;
                    }
                }
                expected
            }
            Scaling::Block { .. } | Scaling::Tensor | Scaling::Given(_) => {
                let all = self.prepared(&inputs, 0..batch, 0..heads);
                let scales = match self.scaling {
                    Scaling::Block { .. } => all.block_scales().expect("blocks have scales"),
                    Scaling::Heads { .. } | Scaling::Tensor | Scaling::Given(_) | Scaling::Channel => {
                        all.scales().values().to_vec()
                    }
                };
                Expected { codes: all.codes().clone(), scales, mean: Vec::new() }
            }
        }
    }

    /// The reference result for these heads of these sequences.
    fn prepared(&self, inputs: &Inputs, batch: Range<usize>, heads: Range<usize>) -> Quantized {
        let mut preparation = match self.scaling {
            Scaling::Block { rows } => Preparation::new(Granularity::Block { rows }),
            Scaling::Given(scale) => Preparation::with_scale(scale),
            Scaling::Heads { .. } | Scaling::Tensor | Scaling::Channel => {
                Preparation::new(Granularity::Tensor)
            }
        };
        preparation.incoherent = inputs.incoherent.as_ref();
        let (count, seqlen) = (batch.len(), self.shape.seqlen);
        let sequences = self.packed.map_or(SequenceRows::dense(count, seqlen), |_| self.sequences());
        let first = match self.rotation {
            Some((_, _, Rows::From(first))) => vec![first; sequences.count()],
            _ => Vec::new(),
        };
        let positions = match &inputs.positions {
            Some(each) => RowPositions::Each(&each[batch.start * seqlen..batch.end * seqlen]),
            None => RowPositions::First(&first),
        };
        preparation.rotation = inputs.table.as_ref().map(|table| Rotation { table, positions });
        let dims = [count, seqlen, heads.len(), self.shape.head_dim];
        let x = Array4::from_shape_fn(dims, |(sequence, row, head, column)| {
            inputs.x[[batch.start + sequence, row, heads.start + head, column]]
        });
        let quantized = preparation.quantize(x.view(), &sequences);
        quantized.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }

    /// The sequences: the packed ones, or the entries of the batch.
    fn sequences(&self) -> SequenceRows {
        let Shape { batch, seqlen, .. } = self.shape;
        self.packed.map_or(SequenceRows::dense(batch, seqlen), SequenceRows::packed_lengths)
    }

    fn inputs(&self) -> Inputs {
        let mut rng = Rng::new(self.seed);
        let mut x = Array4::from_shape_simple_fn(self.shape.dims(), || self.number(&mut rng));
        x.slice_axis_mut(Axis(1), Slice::from(self.sequences().end()..)).fill(f32::NAN);
        let rows = self.table_rows();
        let table = self.rotation.map(|(style, rotary_dim, _)| {
            Rope::new(style, rotary_dim, 10_000.0).expect("rotary_dim is even").table(rows)
        });
        let listed = matches!(self.rotation, Some((_, _, Rows::Listed)));
        let count = self.shape.batch * self.shape.seqlen;
        // One position in 16 lies outside of the table.
        let position = |rng: &mut Rng| match rng.below(16) {
            0 => [-1, rows as i32, i32::MAX, i32::MIN][rng.below(4)],
            _ => rng.below(rows as u64) as i32,
        };
        let positions = listed.then(|| (0..count).map(|_| position(&mut rng)).collect());
        Inputs { x, table, positions, incoherent: self.incoherent() }
    }

    fn incoherent(&self) -> Option<Incoherent> {
        self.hadamard.then(|| Incoherent::new(self.shape.head_dim, self.seed))
    }

    /// Number of rows of the table: the positions in use, and some more.
    fn table_rows(&self) -> usize {
        match self.rotation {
            // Lengths of packed sequences are data: the table may end before the longest sequence does.
            Some((_, _, Rows::From(first))) if self.packed.is_some() => first + 90,
            Some((_, _, Rows::From(first))) => first + self.shape.seqlen,
            _ => 50,
        }
    }

    /// A random number of the type.
    fn number(&self, rng: &mut Rng) -> f32 {
        let largest: f32 = if self.dtype == Dtype::F16 { 65504.0 } else { 3.3e38 };
        let normal = rng.normal() as f32;
        let x = match (self.spread, rng.below(500)) {
            (Spread::Normal, _) => normal,
            (Spread::Outliers, 0) => 1000.0 * normal,
            (Spread::Outliers, _) => normal,
            (Spread::Tiny, _) => normal * if self.dtype == Dtype::F16 { 1e-7 } else { 1e-37 },
            (Spread::Huge, _) => largest.copysign(normal),
            (Spread::Zeros, 0) => 1.0,
            (Spread::Zeros, _) => 0.0f32.copysign(normal),
            (Spread::NotFinite, 0) => f32::INFINITY.copysign(normal),
            (Spread::NotFinite, 1) => f32::NAN,
            (Spread::NotFinite, _) => normal,
        };
        rounded(self.dtype, x)
    }
}
