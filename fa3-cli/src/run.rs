//! `fa3 run`: the attention of tensors in files.

mod call;
mod compare;
pub(crate) mod error;
mod gpu;
mod layout;
mod npy;
mod report;
pub(crate) mod safetensors;
mod scales;
mod source;
mod summary;
pub(crate) mod tensor;
pub(crate) mod text;

use std::path::{Path, PathBuf};

use fa3_types::Dtype;
use rayon::ThreadPoolBuilder;
use serde_json::{Value, json};

use crate::args::function::FunctionArgs;
use crate::args::json::JsonArgs;
use crate::args::score::ScoreArgs;
use crate::console;
use crate::device::{ChosenDevice, DeviceChoice};
use crate::threads::ThreadsError;
use crate::write::{self, NewFile};
use call::{Call, Lists, Results};
use compare::Judged;
use error::Error;
use layout::Layout;
use safetensors::{File, Selection};
use source::Source;
use tensor::Tensor;

pub(crate) const ABOUT: &str = "\
Computes O = softmax(mask(cap(scale · Q Kᵀ))) V and LSE = ln Σ exp(score) for tensors in files.

The input is a safetensors file with tensors q, k and v, or three .npy files. Shapes are (batch, seqlen, heads, \
head_dim), or (total, heads, head_dim) for packed sequences; --layout names others. K and V may have fewer heads \
than Q. The type is F32, F16, BF16 or F8_E4M3 (.npy: f4 or f2). O has the same type, or BF16 for F8_E4M3.

In a safetensors file, names may have a prefix: each P for which there are tensors Pq, Pk and Pv is a call. --prefix \
selects one P; --q, --k and --v give other names for q, k and v. For packed sequences, Pcu_seqlens_q and \
Pcu_seqlens_k (I32 or I64) say where the sequences begin; Pseqused_q and Pseqused_k are optional. Psink (heads_q) \
has a logit for each query head in the softmax's denominator, as in GPT-OSS. Pqv, of O's shape, is the part of the \
queries that is multiplied by V in latent attention, as in DeepSeek's models.

F8_E4M3 tensors are codes times scales: Pq_descale, Pk_descale and Pv_descale, or for tensors named Pcodes, which \
fa3 quantize writes, Pscales and Pmean. Scales are per head (batch, heads, or fewer if heads share them), per block \
of rows (batch, heads, blocks), one for the whole tensor, or per channel of V (batch, heads, head_dim) with Pv_mean. \
Without scales, the codes are the numbers. A tensor that is named like scales, but that no call uses, is reported.

If there are Po or Plse, or with --check, results are checked by an oracle in f64 and the error law: they may be off \
by twice the error of standard attention in the same precision. For F8_E4M3 that is BF16 on the CPU, and FP8, \
including P, on a GPU. If a problem has more than 20 GFLOP, only the rows where errors are most likely to show are \
checked. The difference from Po and Plse is a second opinion, since they may be from another mask, scale or soft \
cap. The check takes many times as long as the computation; --no-check leaves it out. With --q, --k or --v there is \
no second opinion, because Po and Plse belong to Pq, Pk and Pv.

With --backward, dQ, dK and dV are computed from the gradients of O, Pdo or Pdout, and of LSE, Pdlse. Without a \
gradient of O it is 1, so that dQ, dK and dV are the gradients of the sum of O; without Pdlse, dLSE is 0. With \
--check, the error law decides on them, too; if a problem has more than 2.5 GFLOP, on some heads only.

Only the tensors of the calls are read from a file, and a pipe is read up to its stated end. Output files are \
written completely or not at all; the name - is neither stdin nor stdout. A file that exists is replaced at once and \
keeps its permissions. On a GPU the kernel is compiled and warmed up before it is timed; on the CPU, calls after the \
first one are timed, unless the first one takes 2 s.";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  fa3 run data/minilm_layer5.safetensors
  fa3 run qkv.safetensors --causal --prefix layer0. -o out.safetensors
  fa3 run model.safetensors --q q_proj.output --k k_proj.output --v v_proj.output --layout fused --head-dim 128 --dtype bf16
  fa3 run packed.safetensors --cu-seqlens-q 0,100,300
  fa3 run qkv.safetensors --causal --score 's+slope[h]*(k-q)' --table slope=0.5,0.25 --check
  fa3 run qkv.safetensors --check --backward -o gradients.safetensors --json report.json
  fa3 run q.npy k.npy v.npy --window 256,0 -o o.npy --lse lse.npy

Exit code: 0, or 1 if a result breaks the error law, or 2 if there is no result.")]
pub(crate) struct Options {
    /// A safetensors file, or Q, K and V as .npy files
    #[arg(required = true, num_args = 1..=3, value_name = "FILE")]
    inputs: Vec<PathBuf>,
    /// Writes O and LSE as safetensors, named Po and Plse, and gradients Pdq, Pdk, Pdv and Pdsink; or O as .npy. It
    /// must not be stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Writes LSE as .npy
    #[arg(long, value_name = "FILE", requires = "output")]
    lse: Option<PathBuf>,
    #[command(flatten)]
    selection: Selection,
    /// The order of dimensions of Q, K, V, O and their gradients in input and output files; LSE is always (batch,
    /// heads, seqlen)
    #[arg(long, value_enum)]
    layout: Option<Layout>,
    /// Heads of Q in fused columns; heads of K and V have the head_dim that follows
    #[arg(long, value_name = "N", conflicts_with = "head_dim")]
    heads: Option<usize>,
    /// The head_dim of Q and K in fused columns
    #[arg(long, value_name = "N")]
    head_dim: Option<usize>,
    /// Rounds inputs to f32, f16, bf16 or e4m3, without scales, and computes in it; the type of Q if absent
    #[arg(long, value_name = "TYPE")]
    dtype: Option<Dtype>,
    #[command(flatten)]
    score: ScoreArgs,
    #[command(flatten)]
    function: FunctionArgs,
    #[command(flatten)]
    lists: Lists,
    /// Where to compute: cpu, gpu, which is the first Hopper GPU, or the number of another one; auto is a Hopper GPU
    /// where there is one whose kernels take the problem, else the CPU
    #[arg(long, value_name = "auto|cpu|gpu|N", default_value = "auto")]
    device: DeviceChoice,
    /// Also checks results for which the file has no expected result
    #[arg(long)]
    check: bool,
    /// Does not check results
    #[arg(long, conflicts_with = "check")]
    no_check: bool,
    /// Also computes dQ, dK and dV, from Pdo or Pdout and Pdlse; not for .npy files
    #[arg(long)]
    backward: bool,
    /// Number of threads, up to 1024; one per core if absent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    #[command(flatten)]
    json: JsonArgs,
}

/// The results of all calls.
struct Done {
    /// Whether all results that were checked satisfy the error law.
    hold: bool,
    /// Reports as JSON.
    calls: Vec<Value>,
    files: Vec<(NewFile, Vec<u8>)>,
}

/// The files that O and LSE are written to.
type Outputs = [Option<NewFile>; 2];

pub(crate) const NPY: &str = "npy";
const SAFETENSORS: &str = "safetensors";

/// Computes, prints, compares and writes. True if every result satisfies the error law. In case of an error
/// no file has been written.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn std::error::Error>> {
    if options.inputs.iter().any(|input| input == Path::new("-")) {
        return Err(Error::Stdin.into());
    }
    let json = options.json.file(options.output.is_some())?;
    let [output, lse, json] =
        write::open([options.output.as_deref(), options.lse.as_deref(), json], &options.inputs)?;
    let outputs = [output, lse];
    let one_a_core = 0;
    let threads = options.threads.map_or(one_a_core, usize::from);
    let pool = ThreadPoolBuilder::new().num_threads(threads).build().map_err(ThreadsError::from)?;
    let done = pool.install(|| match options.inputs.as_slice() {
        [input] if has_extension(input, NPY) => Err(Error::OneNpy { path: input.clone() }),
        [input] => run_safetensors(input, options, outputs),
        [q, k, v] => run_npy([q, k, v], options, outputs),
        inputs => Err(Error::FileCount { given: inputs.len() }),
    });
    let Done { hold, calls, mut files } = done?;
    let report = json!({ "calls": calls });
    options.json.print_json(&report);
    files.extend(json.map(|file| (file, write::json(&report))));
    write::write(files)?;
    Ok(hold)
}

/// Reads a tensor from a safetensors file by name, or from a .npy file, whose tensor has no name.
pub(crate) fn read_tensor(
    path: &Path,
    name: Option<&str>,
    default: &str,
    types: &'static str,
) -> Result<Tensor, Error> {
    if path == Path::new("-") {
        return Err(Error::Stdin);
    }
    if has_extension(path, NPY) {
        return match name {
            Some(_) => Err(Error::NotForNpy { option: "--tensor" }),
            None => read_npy(path),
        };
    }
    File::open(path)?.tensor(name.unwrap_or(default), types)
}

fn run_safetensors(input: &Path, options: &Options, [output, lse]: Outputs) -> Result<Done, Error> {
    if lse.is_some() {
        return Err(Error::NotForSafetensors);
    }
    options.check_outputs(SAFETENSORS, NPY)?;
    let mut file = File::open(input)?;
    let prefixes = file.prefixes(&options.selection)?;
    let mut place = options.place()?;
    let (mut hold, mut calls, mut results) = (true, Vec::new(), Vec::new());
    for prefix in &prefixes {
        let call = file.call(prefix, &options.selection, options.backward)?;
        let again = place.again();
        let Results { report, o, lse, gradients } = call.attend(options, place)?;
        place = again;
        options.json.print_text(&report);
        hold &= report.holds();
        calls.push(report.json());
        if output.is_some() {
            results.extend([o, lse]);
            results.extend(gradients);
        }
    }
    if let Some(names) = file.unused_scales(&prefixes) {
        console::print_note(&format_args!("{} has {names}, which no call takes", input.display()));
    }
    let mut files = Vec::new();
    if let Some(file) = output {
        let bytes = safetensors::encode(file.path(), &results)?;
        files.push((file, bytes));
    }
    Ok(Done { hold, calls, files })
}

fn run_npy(paths: [&PathBuf; 3], options: &Options, [output, lse]: Outputs) -> Result<Done, Error> {
    let Selection { prefix, q, k, v } = &options.selection;
    let [prefix, q, k, v] = [prefix, q, k, v].map(Option::is_some);
    let given = [("--prefix", prefix), ("--q", q), ("--k", k), ("--v", v), ("--backward", options.backward)];
    if let Some((option, _)) = given.into_iter().find(|(_, given)| *given) {
        return Err(Error::NotForNpy { option });
    }
    options.check_outputs(NPY, SAFETENSORS)?;
    let [q, k, v] = paths.map(|path| read_npy(path));
    let call = Call {
        prefix: String::new(),
        q: q?,
        k: k?,
        v: v?,
        lists: Lists::default(),
        qv: None,
        sink: None,
        scales: Default::default(),
        expected_o: None,
        expected_lse: None,
        dout: None,
        dlse: None,
    };
    let results = call.attend(options, options.place()?)?;
    options.json.print_text(&results.report);
    let mut files = Vec::new();
    for (file, tensor) in [(output, results.o), (lse, results.lse)] {
        if let Some(file) = file {
            let bytes =
                npy::encode(&tensor).map_err(|source| Error::Npy { path: file.path().into(), source })?;
            files.push((file, bytes));
        }
    }
    Ok(Done { hold: results.report.holds(), calls: vec![results.report.json()], files })
}

/// Reads the tensor of a .npy file. Its name is the file's.
fn read_npy(path: &Path) -> Result<Tensor, Error> {
    let mut source = Source::open(path)?;
    npy::read(path.display().to_string(), &mut source)
        .map_err(|source| Error::Npy { path: path.into(), source })
}

pub(crate) fn has_extension(path: &Path, expected: &str) -> bool {
    path.extension().is_some_and(|extension| extension == expected)
}

impl Options {
    /// Refuses an output whose file extension names the other format.
    fn check_outputs(&self, expected: &'static str, other: &str) -> Result<(), Error> {
        match self.output.iter().chain(&self.lse).find(|path| has_extension(path, other)) {
            Some(path) => Err(Error::OutputFormat { path: path.clone(), expected }),
            None => Ok(()),
        }
    }

    fn place(&self) -> Result<ChosenDevice, Error> {
        self.device.open().map_err(|error| Error::compute("", error))
    }

    fn judged(&self) -> Judged {
        match (self.check, self.no_check) {
            (true, _) => Judged::All,
            (_, true) => Judged::None,
            _ => Judged::Expected,
        }
    }
}
