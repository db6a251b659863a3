//! A call of quantization to e4m3.

use std::num::NonZeroU32;

use fa3_cuda::host::OperationError;
use fa3_quant::Incoherent;
use fa3_sched::quantize::Plan;
use fa3_types::{Dtype, QuantizeProblem, QuantizeSpec, RopeStyle, Rotary, Scaling, TensorDesc, ValueLayout};

use crate::call::Call;
use crate::error::Error;
use crate::options::Options;
use crate::tensors::Tensors;

/// [`Scaling`] in a form that can be compared and hashed, because calls are keys of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scales {
    /// A scale for each block of `usize` rows of a head.
    Blocks(usize),
    /// A scale for each group of `usize` successive heads of a sequence.
    Heads(usize),
    /// A scale for the tensor.
    Tensor,
    /// A given scale, as the bits of an f32, so that NaN, which every problem refuses, equals itself.
    Given(u32),
    /// A scale and a mean for each channel.
    Channels,
}

impl Scales {
    /// The given scale `scale`.
    pub fn given(scale: f64) -> Scales {
        Scales::Given((scale as f32).to_bits())
    }

    fn scaling(self) -> Scaling {
        match self {
            Scales::Blocks(rows) => Scaling::Block { rows },
            Scales::Heads(heads) => Scaling::Heads { heads },
            Scales::Tensor => Scaling::Tensor,
            Scales::Given(bits) => Scaling::Given(f32::from_bits(bits)),
            Scales::Channels => Scaling::Channel,
        }
    }
}

/// A quantization.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Quantization {
    /// The tensor.
    pub x: TensorDesc,
    /// The tensor's rotation, if any.
    pub rotary: Option<Rotary>,
    /// The seed of the Hadamard transform's signs; no transform if `None`.
    pub hadamard_seed: Option<u64>,
    /// The source of the scales.
    pub scales: Scales,
    /// The layout of the codes.
    pub layout: ValueLayout,
}

/// The options of a quantization.
pub struct Numbers {
    style: RopeStyle,
    /// The position of the first row, if no positions are listed.
    first: usize,
    hadamard_seed: Option<u64>,
    /// The source of the scales, if the call has no means.
    scales: Scales,
    layout: ValueLayout,
}

impl Quantization {
    /// The same call with a contiguous tensor.
    pub fn contiguous(&self) -> Quantization {
        Quantization { x: TensorDesc::contiguous(self.x.dtype, self.x.shape), ..self.clone() }
    }
}

impl Call for Quantization {
    type Plan = Plan;

    type Numbers = Numbers;

    fn numbers(options: &Options<'_>) -> Result<Numbers, Error> {
        let (scale, heads) = (options.real("scale")?, options.integer("heads_per_scale")?);
        let rows = options.integer("block_rows")?;
        let scales = match (scale, heads, rows) {
            (Some(scale), ..) => Scales::given(scale),
            (None, Some(heads), _) => Scales::Heads(heads),
            (None, None, Some(rows)) => Scales::Blocks(rows),
            (None, None, None) => Scales::Tensor,
        };
        let transposed = options.flag("transposed")?;
        Ok(Numbers {
            style: options.style()?,
            first: options.integer("first_position")?.unwrap_or(0),
            hadamard_seed: options.integer("hadamard_seed")?,
            scales,
            layout: if transposed { ValueLayout::Transposed } else { ValueLayout::Rows },
        })
    }

    fn given(tensors: &mut Tensors<'_>, numbers: &Numbers) -> Result<Quantization, Error> {
        let &Numbers { style, first, hadamard_seed, scales, layout } = numbers;
        tensors.has_output("codes", Dtype::E4m3)?;
        tensors.has_output("scales", Dtype::F32)?;
        let scales = if tensors.has_output("mean", Dtype::F32)? { Scales::Channels } else { scales };
        let x = tensors.input("x")?;
        let rotary = tensors.rotary(style, [("positions", first)])?.map(|[rotary]| rotary);
        Ok(Quantization { x, rotary, hadamard_seed, scales, layout })
    }

    /// The problem, in which codes are contiguous.
    fn problem(&self) -> Result<QuantizeProblem, Error> {
        let mut spec = QuantizeSpec::new(self.x, TensorDesc::contiguous(Dtype::E4m3, self.x.shape));
        (spec.layout, spec.rotary, spec.scaling) = (self.layout, self.rotary, self.scales.scaling());
        let problem = spec.validate().map_err(OperationError::from)?;
        let Some(seed) = self.hadamard_seed else { return Ok(problem) };
        // `signs` is `None` only above 256 entries, and `validate` has refused such a head_dim.
        spec.signs = Incoherent::new(self.x.shape.head_dim, seed).signs();
        Ok(spec.validate().map_err(OperationError::from)?)
    }

    fn options(&self, _sms: NonZeroU32) -> Result<(), Error> {
        Ok(())
    }
}
