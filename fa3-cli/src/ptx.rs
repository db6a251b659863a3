//! `fa3 ptx`: a kernel's PTX, and what its launch needs.

use std::error::Error;
use std::path::{Path, PathBuf};

use fa3_ir::{
    Buffer, BufferRole, Kernel, ParamInfo, ParamKind, Passed, Program, Ptx, Step, Swizzle, VerifyErrors, ptx,
};
use serde_json::{Value, json};

use crate::console;
use crate::kernel::{self, KernelArgs};
use crate::write;

pub(crate) const ABOUT: &str = "\
Prints a kernel as PTX for sm_90a, which the driver and ptxas accept.

With --json, prints one object on one line for every launch, with everything that it needs: ptx, entry, threads, \
smem (bytes of dynamic shared memory), cluster, grid; arrays, each with name, elem, shape (outermost dimension \
first) and use (input, output, or sum, which must be zero before); args, one for each parameter: {u32: number}, \
{u64: number}, {f32: number}, {pointer: array} or {tensor: {array, dims, strides, box, elem, swizzle}}, innermost \
dimension first, strides in bytes, as in cuTensorMapEncodeTiled.";

const EXAMPLES: &str = "\
Examples:
  fa3 ptx gemm > gemm.ptx && ptxas -arch=sm_90a -v gemm.ptx
  fa3 ptx gemm --annotate
  fa3 ptx gemm_cluster --m 8192 --n 8192 --k 8192 --json > gemm.json";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, next_help_heading = "Print")]
pub(crate) struct Options {
    #[command(subcommand)]
    kernel: KernelArgs,
    /// Adds to every statement the line of Rust that built it
    #[arg(long, global = true)]
    annotate: bool,
    /// Prints PTX and launch parameters as JSON, or writes them to a file
    #[arg(long, global = true, value_name = "FILE|-", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// A kernel that the verifier rejects.
#[derive(Debug, thiserror::Error)]
#[error("kernel {kernel} is not sound:\n{faults}")]
pub(crate) struct Unsound {
    kernel: String,
    faults: VerifyErrors,
}

/// Prints the kernels. Always true, since nothing is checked.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let program = options.kernel.program()?;
    if let Some(path) = &options.json {
        let file = (path != Path::new("-")).then_some(path.as_path());
        let [file] = write::open([file], &[])?;
        let lines = program.steps.iter().map(|step| {
            emit(&step.kernel, options.annotate).map(|ptx| describe(&program, step, &ptx).to_string())
        });
        let lines = lines.collect::<Result<Vec<_>, _>>()?.join("\n");
        match file {
            Some(file) => write::write([(file, (lines + "\n").into_bytes())])?,
            None => console::print(&lines),
        }
    } else {
        for kernel in kernel::distinct(program) {
            console::print(&emit(&kernel, options.annotate)?.text.trim_end());
        }
    }
    Ok(true)
}

/// A kernel's PTX.
pub(crate) fn emit(kernel: &Kernel, annotate: bool) -> Result<Ptx, Unsound> {
    let emit = if annotate { ptx::emit_annotated } else { ptx::emit };
    emit(kernel).map_err(|faults| Unsound { kernel: kernel.name.clone(), faults })
}

fn describe(program: &Program<Kernel>, step: &Step<Kernel>, ptx: &Ptx) -> Value {
    let args = ptx.params.iter().map(|param| {
        let passed = step.args.iter().find(|(name, _)| *name == param.name);
        describe_arg(&passed.expect("programs pass every parameter").1, param)
    });
    json!({
        "ptx": ptx.text,
        "entry": ptx.entry,
        "threads": ptx.threads,
        "smem": ptx.smem_bytes,
        "cluster": ptx.cluster,
        "grid": step.grid,
        "arrays": program.buffers.iter().map(array).collect::<Vec<_>>(),
        "args": args.collect::<Vec<_>>(),
    })
}

fn array(Buffer { name, elem, shape, role, .. }: &Buffer) -> Value {
    let used = match role {
        BufferRole::Input | BufferRole::OptionalInput => "input",
        BufferRole::Output | BufferRole::OptionalOutput | BufferRole::Scratch => "output",
        BufferRole::InOut | BufferRole::TileCounter => "sum",
    };
    json!({ "name": name, "elem": elem.to_string(), "shape": shape, "use": used })
}

fn describe_arg(passed: &Passed, param: &ParamInfo) -> Value {
    match (passed, param.kind) {
        (Passed::U32(value), _) => json!({ "u32": value }),
        (Passed::U64(value), _) => json!({ "u64": value }),
        (Passed::F32(value), _) => json!({ "f32": value }),
        (Passed::Tensor { buffer, dims, strides }, ParamKind::TensorMap(shape)) => {
            let swizzle = if shape.swizzle == Swizzle::None { 0 } else { shape.swizzle.row_bytes() };
            json!({ "tensor": {
                "array": buffer.0,
                "dims": dims,
                "strides": strides,
                "box": shape.dims(),
                "elem": shape.elem.to_string(),
                "swizzle": swizzle,
            }})
        }
        (Passed::Tensor { .. }, _) => unreachable!("programs pass tensors for tensor maps"),
        (Passed::Pointer(buffer), _) => json!({ "pointer": buffer.0 }),
    }
}
