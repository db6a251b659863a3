//! `fa3 quantize`: quantizes a tensor in a file to FP8.

mod error;
mod gpu;
mod report;

use std::error::Error;
use std::path::PathBuf;

use fa3::{Device, QuantError, Quantize, Quantized, Rope, RopeStyle, RopeTable, Scaling};
use fa3_quant::Incoherent;
use fa3_types::Dtype;
use half::{bf16, f16};
use ndarray::Array4;
use safetensors::Dtype as InFile;

use crate::args::choice::{Choice, one_of};
use crate::args::json::JsonArgs;
use crate::args::number::{half, multiple_of};
use crate::device::{Computed, DeviceChoice};
use crate::run::tensor::{Stored, Tensor};
use crate::run::{self, safetensors::encode};
use crate::threads;
use crate::write::{self, NewFile};
use error::QuantizeRefusal;
use report::{Drift, Report};

pub(crate) const ABOUT: &str = "\
Quantizes a tensor to e4m3 as FlashAttention-3 quantizes Q and K: rotary embedding, a Hadamard transform with random \
signs, and a scale for each block of rows of a head. The rotary embedding and the transform are optional.

The input is a safetensors file with a tensor x, or a .npy file (f4 or f2). Its shape is (batch, seqlen, heads, \
head_dim), and its type is F16 or BF16; F32 is rounded to the type that --dtype names. head_dim is a multiple of 16 \
up to 256.

The output is a safetensors file with codes (F8_E4M3), of the same shape, and scales (F32) of shape (batch, heads, \
blocks), (1, 1, 1) for a single scale, or (batch, heads / N, 1) with --heads N. Codes times scales are the rotated \
and transformed rows, up to the printed error: the root mean square of the differences, relative to the rows'.

--channels quantizes V: each column of a head has a mean, which is subtracted, and a scale. Then scales and mean \
(F32) have the shape (batch, heads, head_dim), and the rows are codes times scales plus means.

CPU and GPU give the same bits. On a GPU one kernel does everything, after two that find the scales with --channels, \
--heads or --one-scale. Kernels are compiled and warmed up before they are timed.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 quantize x.safetensors -o codes.safetensors
  fa3 quantize qkv.safetensors --tensor q --rope halves --hadamard 1 -o q.safetensors
  fa3 quantize k.npy --dtype bf16 --block-rows 64 --device cpu -o k.safetensors
  fa3 quantize qkv.safetensors --tensor v --channels -o v.safetensors

Exit code: 0, or 2 if there is no result.")]
pub(crate) struct Options {
    /// A safetensors file or a .npy file
    #[arg(value_name = "FILE")]
    input: PathBuf,
    /// Writes codes and scales as safetensors; not to stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The tensor's name in a safetensors file, x if absent
    #[arg(long, value_name = "NAME")]
    tensor: Option<String>,
    /// Rounds the tensor to this type first: bf16 or f16
    #[arg(long, value_name = "TYPE", value_parser = half)]
    dtype: Option<Dtype>,
    #[command(flatten)]
    rotary: RotaryArgs,
    /// Multiplies rows by a Hadamard matrix with random signs from SEED; use the same seed for Q and K
    #[arg(long, value_name = "SEED")]
    hadamard: Option<u64>,
    /// Rows of a head that share a scale: 64 or 128
    #[arg(long, value_name = "N", default_value_t = 128)]
    block_rows: usize,
    /// The scale of the whole tensor, if it is known; magnitudes above 448 times the scale saturate
    #[arg(long, value_name = "F", conflicts_with = "block_rows")]
    scale: Option<f32>,
    /// One scale for each N successive heads, such as the query heads of a key head; a GPU reads the tensor twice
    #[arg(long, value_name = "N", conflicts_with_all = ["block_rows", "scale"])]
    heads: Option<usize>,
    /// One scale for the whole tensor, from its largest magnitude; a GPU reads the tensor twice
    #[arg(long, conflicts_with_all = ["block_rows", "scale", "heads"])]
    one_scale: bool,
    /// A mean, which is subtracted, and a scale for each column of a head, as for V
    #[arg(long, conflicts_with_all = ["block_rows", "scale", "heads", "one_scale", "hadamard", "rope"])]
    channels: bool,
    /// Where to compute: cpu, gpu, which is the first Hopper GPU, or the number of another one; auto is a Hopper GPU
    /// where there is one, else the CPU
    #[arg(long, value_name = "auto|cpu|gpu|N", default_value = "auto")]
    device: DeviceChoice,
    #[command(flatten)]
    json: JsonArgs,
}

/// Options of rotary embedding.
#[derive(Debug, clap::Args)]
struct RotaryArgs {
    /// Rotates rows by their positions: interleaved pairs entries 2i and 2i + 1, halves pairs i and i + rotary_dim / 2
    #[arg(long, value_name = "interleaved|halves", value_parser = one_of(STYLES), hide_possible_values = true)]
    rope: Option<RopeStyle>,
    /// Leading entries of a row that are rotated, a multiple of 16; all if absent
    #[arg(long, value_name = "N", requires = "rope", value_parser = multiple_of(16, 256))]
    rotary_dim: Option<u32>,
    /// Pair i rotates by position · F^(−2i / rotary_dim)
    #[arg(long, value_name = "F", requires = "rope", default_value_t = 10_000.0)]
    rope_base: f64,
    /// The position of each sequence's first row, up to 1048576
    #[arg(long, value_name = "N", requires = "rope", default_value_t = 0)]
    #[arg(value_parser = clap::value_parser!(u32).range(0..=1 << 20))]
    first_position: u32,
}

/// Which entries are rotated as a pair.
const STYLES: &[Choice<RopeStyle>] =
    &[("interleaved", "", RopeStyle::Interleaved), ("halves", "", RopeStyle::HalfSplit)];

/// The element types that are read.
const TYPES: &str = "F32, F16 or BF16";

pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let inputs = std::slice::from_ref(&options.input);
    let json = options.json.file(options.output.is_some())?;
    let outputs = write::open([options.output.as_deref(), json], inputs)?;
    if let Some(path) = options.output.as_ref().filter(|path| run::has_extension(path, run::NPY)) {
        return Err(QuantizeRefusal::NpyOutput { path: path.clone() }.into());
    }
    threads::start()?;
    let tensor = run::read_tensor(&options.input, options.tensor.as_deref(), "x", TYPES)?;
    match (options.dtype, tensor.dtype) {
        (None, InFile::F32) => return Err(QuantizeRefusal::Single { tensor: tensor.name }.into()),
        (Some(Dtype::F16), _) | (None, InFile::F16) => options.quantize::<f16>(tensor, outputs)?,
        // `quantize` refuses all other types.
        _ => options.quantize::<bf16>(tensor, outputs)?,
    }
    Ok(true)
}

impl Options {
    fn quantize<T: Stored>(
        &self,
        tensor: Tensor,
        outputs: [Option<NewFile>; 2],
    ) -> Result<(), Box<dyn Error>> {
        let (name, x) = (tensor.name.clone(), array::<T>(tensor)?);
        let refused = |error| -> Box<dyn Error> {
            if let fa3::Error::Quantize(source) = error {
                return QuantizeRefusal::Problem { tensor: name.clone(), source }.into();
            }
            error.into()
        };
        let mut quantize = Quantize::new(&x).scaling(match (self.scale, self.heads) {
            (Some(scale), _) => Scaling::Given(scale),
            (_, Some(heads)) => Scaling::Heads { heads },
            _ if self.one_scale => Scaling::Tensor,
            _ if self.channels => Scaling::Channel,
            _ => Scaling::Block { rows: self.block_rows },
        });
        if let Some(seed) = self.hadamard {
            quantize = quantize.hadamard(seed);
        }
        // The problem is checked before a table is computed for it.
        quantize.problem().map_err(refused)?;
        let (_, seqlen, _, head_dim) = x.dim();
        let first = self.rotary.first_position as usize;
        let table = self.rotary.table(first + seqlen, head_dim)?;
        if let Some(table) = &table {
            quantize = quantize.rotary(table).first_position(first);
        }
        let problem = quantize.problem().map_err(refused)?;

        let place = self.device.open().map_err(refused)?;
        let computed = self.device.compute(
            place,
            "codes and scales",
            |device| Ok(gpu::quantize(device, &problem, x.view(), table.as_ref())?),
            || quantize.run(&Device::Cpu),
        );
        let Computed { result: quantized, times, place } = computed.map_err(refused)?;

        let incoherent = self.hadamard.map(|seed| Incoherent::new(head_dim, seed));
        let drift = Drift::of(x.view(), table.as_ref(), first, incoherent.as_ref(), &quantized);
        let report = Report { problem, place, times, drift, quantized: &quantized };
        let value = report.json();
        self.json.print(&report, &value);
        let [output, json] = outputs;
        let mut files: Vec<_> = json.map(|file| (file, write::json(&value))).into_iter().collect();
        if let Some(file) = output {
            let Quantized { codes, scales, mean, .. } = quantized;
            let mut tensors = vec![Tensor::new("codes", codes), Tensor::new("scales", scales)];
            tensors.extend(mean.map(|mean| Tensor::new("mean", mean)));
            let bytes = encode(file.path(), &tensors)?;
            files.push((file, bytes));
        }
        Ok(write::write(files)?)
    }
}

impl RotaryArgs {
    /// The cos and sin table for `positions` positions, if rows are rotated.
    fn table(&self, positions: usize, head_dim: usize) -> Result<Option<RopeTable>, QuantError> {
        let Some(style) = self.rope else { return Ok(None) };
        let rotary_dim = self.rotary_dim.map_or(head_dim, |rotary_dim| rotary_dim as usize);
        Ok(Some(Rope::new(style, rotary_dim, self.rope_base)?.table(positions)))
    }
}

/// The tensor as (batch, seqlen, heads, head_dim), rounded to `T`.
fn array<T: Stored>(tensor: Tensor) -> Result<Array4<T>, Box<dyn Error>> {
    if tensor.dims()?.contains(&0) {
        return Err(QuantizeRefusal::Empty { tensor: tensor.name, given: tensor.shape }.into());
    }
    if ![InFile::F32, InFile::F16, InFile::BF16].contains(&tensor.dtype) {
        return Err(run::error::Error::dtype(&tensor, TYPES).into());
    }
    Ok(tensor.rounded_to::<T>().array::<T>(false, "")?)
}
