//! Quantization to e4m3: a call as it comes from Python, and what was made of earlier ones.

use std::sync::LazyLock;

use fa3_cuda::host::{Device, Quantize, QuantizeError, Stream};
use fa3_quant::Incoherent;
use fa3_sched::DeviceLimits;
use fa3_sched::quantize::Plan;
use fa3_types::{
    Address, Dtype, Positions, QuantizeAddresses, QuantizePlacement, QuantizeProblem, QuantizeProblemError,
    QuantizeSpec, RopeStyle, Rotary, Scaling, TensorDesc, ValueLayout,
};

use crate::call::Number;
use crate::error::Error;
use crate::kept::Kept;
use crate::plans::open;
use crate::workspaces::{Allocate, Lent};

/// What was made of the calls so far.
static MADE: LazyLock<Kept<Call, Made>> = LazyLock::new(Kept::default);

/// A quantization and its device.
struct Made {
    device: Device,
    quantize: Quantize,
}

/// (cos, sin, table_rows, rotary_dim, interleaved, positions, first_position). cos, sin and positions are addresses.
/// The first position counts if there are no positions.
pub(crate) type Rotation = (u64, u64, usize, usize, bool, Option<u64>, Number<usize>);

/// Where scales come from: [`Scaling`] that calls can be compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Scales {
    /// Of blocks of so many rows of a head.
    Blocks(usize),
    /// Of so many successive heads of a sequence.
    Heads(usize),
    /// Of the tensor.
    Tensor,
    /// This one. The bits of f32: NaN, which no problem can have, is equal to itself.
    Given(u32),
    /// Of channels, which have means, too.
    Channels,
}

impl Scales {
    /// This one.
    pub(crate) fn given(scale: f64) -> Scales {
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

/// Everything that a plan depends on. Calls that are equal share one.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    device: u32,
    x: TensorDesc,
    rotary: Option<Rotary>,
    hadamard_seed: Option<u64>,
    scales: Scales,
    layout: ValueLayout,
}

impl Call {
    /// Of x on a device.
    pub(crate) fn new(
        device: u32,
        x: TensorDesc,
        rotation: Option<&Rotation>,
        hadamard_seed: Option<u64>,
        scales: Scales,
        layout: ValueLayout,
    ) -> Call {
        let rotary =
            rotation.map(|&(_, _, table_rows, rotary_dim, interleaved, positions, Number(first))| {
                let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
                let positions = positions.map_or(Positions::From(first), |_| Positions::Listed);
                Rotary { style, rotary_dim, table_rows, positions }
            });
        Call { device, x, rotary, hadamard_seed, scales, layout }
    }

    /// The same call of a contiguous tensor.
    pub(crate) fn contiguous(&self) -> Call {
        Call { x: TensorDesc::contiguous(self.x.dtype, self.x.shape), ..self.clone() }
    }

    /// The tensor.
    pub(crate) fn x(&self) -> &TensorDesc {
        &self.x
    }

    /// The rotation, if any.
    pub(crate) fn rotary(&self) -> Option<Rotary> {
        self.rotary
    }

    /// The number that the signs of the Hadamard transform are drawn from, if there is one.
    pub(crate) fn hadamard_seed(&self) -> Option<u64> {
        self.hadamard_seed
    }

    /// The problem, with contiguous codes.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn problem(&self) -> Result<QuantizeProblem, QuantizeProblemError> {
        let mut spec = QuantizeSpec::new(self.x, TensorDesc::contiguous(Dtype::E4m3, self.x.shape));
        (spec.layout, spec.rotary, spec.scaling) = (self.layout, self.rotary, self.scales.scaling());
        let problem = spec.validate()?;
        let Some(seed) = self.hadamard_seed else { return Ok(problem) };
        // There are signs for every head_dim that is not refused.
        spec.signs = Incoherent::new(self.x.shape.head_dim, seed).signs();
        spec.validate()
    }
}

/// The addresses of a call's tensors.
pub(crate) fn addresses(
    x: u64,
    codes: u64,
    scales: Option<u64>,
    mean: Option<u64>,
    rotation: Option<&Rotation>,
) -> QuantizeAddresses {
    QuantizeAddresses {
        x: Address(x),
        codes: Address(codes),
        scales: scales.map(Address),
        mean: mean.map(Address),
        cos: rotation.map(|rotation| Address(rotation.0)),
        sin: rotation.map(|rotation| Address(rotation.1)),
        positions: rotation.and_then(|rotation| rotation.5).map(Address),
    }
}

/// Puts the quantization of `call` on `stream`, over the tensors that lie `at`. `allocate` makes its workspace, if it
/// needs one, which the caller keeps until then.
///
/// # Errors
/// What is wrong with the call, what the driver says, or what `allocate` raises.
pub(crate) fn launch(
    call: &Call,
    stream: usize,
    at: QuantizeAddresses,
    allocate: &Allocate,
) -> Result<Lent, Error> {
    let made = MADE.find(call, make)?;
    let Made { device, quantize } = &*made;
    let placement = QuantizePlacement::new(quantize.plan().problem(), at)?;
    // SAFETY: the Python sources take it from torch. It is the current one of the device, in the primary context as all
    // of torch's, and alive for as long as it is current.
    #[allow(unsafe_code, reason = "torch's streams are plain numbers")]
    let stream = unsafe { Stream::from_raw(device, stream) };
    let workspace = match quantize.workspace_bytes() {
        0 => Lent::at(0),
        bytes => Lent::allocated(allocate, bytes, 0)?,
    };
    // SAFETY: the Python sources take the addresses from torch. They are those of tensors of the problem's shapes,
    // strides and dtypes on that device, codes, scales, mean and workspace of new ones. The workspace may hold
    // anything. They may be freed before the work is done: torch gives their memory to later work of the same stream,
    // or waits for the streams that a caller recorded, as for its own operators; memory of a capture it keeps for as
    // long as the graph. A plan that is dropped leaves its device, which stays open.
    #[allow(unsafe_code, reason = "a kernel gets plain addresses")]
    unsafe { quantize.launch(&stream, &placement, workspace.address()) }?;
    Ok(workspace)
}

/// Checks a call as far as that needs no device, with the limits of an H100.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(call: &Call) -> Result<(), Error> {
    let problem = call.problem().map_err(QuantizeError::from)?;
    Plan::new(&problem, &DeviceLimits::h100_sxm()).map_err(QuantizeError::from)?;
    Ok(())
}

fn make(call: &Call) -> Result<Made, Error> {
    let problem = call.problem().map_err(QuantizeError::from)?;
    let device = open(call.device)?;
    let quantize = Quantize::new(&device, &problem)?;
    Ok(Made { device, quantize })
}
