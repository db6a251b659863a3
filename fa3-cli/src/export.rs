//! `fa3 export`: a folder with a problem's kernels, for engines that launch them without this library.

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

use fa3_cuda::host::{TiledMap, WorkspaceLayout};
use fa3_ir::{BufferId, Kernel, ParamInfo, ParamKind, Passed, Program, Ptx, Step, TensorView};
use fa3_sim::{Loaded, Mode, Policy, ProgramSimulation};
use serde::Serialize;

use crate::console;
use crate::kernel::{KernelArgs, Reference};
use crate::ptx;
use crate::sim::{FLOP_PER_SECOND, buffers};
use crate::threads;
use crate::tools::Ptxas;
use crate::write;

pub(crate) const ABOUT: &str = "\
Writes a folder with the kernels of a problem, and everything that launches them without this library.

NAME.ptx is a kernel as PTX, NAME.cubin its machine code, where ptxas is found. launch.c is a C program that launches \
the kernels through the driver: its functions `load` and `launch` are for an engine, and its main program runs the \
test vector. program.json has its tables as JSON: tensors in the order of their addresses; the bytes of the workspace, \
which begins with counters that are 0 before the first launch; and launches, each with its grid, block, cluster, bytes \
of dynamic shared memory and arguments. A tensor map has the arguments of cuTensorMapEncodeTiled, by their names.

The test vector is NAME.before, the contents of a tensor before the launches, and NAME.after, the contents that the \
simulator computes, after a check by f64 arithmetic.

The kernels serve this problem alone: dimensions are in tensor maps, and numbers such as the grid in arguments.";

const EXAMPLES: &str = "\
Examples:
  fa3 export forward --seqlen 200 --heads 4 --causal -o attention
  fa3 export backward --seqlen 4096 --heads 32 --no-test -o gradients";

#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, next_help_heading = "Export")]
pub(crate) struct Options {
    #[command(subcommand)]
    kernel: KernelArgs,
    /// The folder, which is made if it is not there
    #[arg(short, long, global = true, value_name = "FOLDER", default_value = "fa3-export")]
    output: PathBuf,
    /// Writes no test vector, which the simulator computes in minutes for large problems
    #[arg(long, global = true)]
    no_test: bool,
}

/// The reason why there is no test vector.
#[derive(Debug, thiserror::Error)]
enum NoTest {
    #[error(
        "the simulator takes about {minutes:.0} minutes for the test vector: smaller problems take less, and --no-test \
         leaves it out"
    )]
    Long { minutes: f64 },
    #[error("the simulator finds a fault of {kernel}, which `fa3 sim` explains")]
    Fault { kernel: String },
}

/// The longest time of the simulator in seconds.
const TOO_LONG: f64 = 120.0;

/// Everything that a launcher needs, as program.json has it.
#[derive(Serialize)]
struct Export {
    fa3: &'static str,
    kernel: String,
    tensors: Vec<Tensor>,
    workspace: Workspace,
    launches: Vec<Launch>,
}

/// A tensor of the caller's. Its address is a multiple of `align` bytes.
#[derive(Serialize)]
struct Tensor {
    name: &'static str,
    elem: String,
    shape: Vec<u64>,
    bytes: usize,
    align: u32,
    is_written: bool,
    is_optional: bool,
    /// Files of the test vector.
    before: Option<String>,
    after: Option<String>,
}

#[derive(Serialize)]
struct Workspace {
    bytes: usize,
    counter_bytes: usize,
}

#[derive(Serialize)]
struct Launch {
    kernel: String,
    files: Vec<String>,
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    shared_memory: u32,
    programmatic_stream_serialization: bool,
    arguments: Vec<Argument>,
}

#[derive(Serialize)]
struct Argument {
    name: String,
    #[serde(flatten)]
    value: Value,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum Value {
    U32(u32),
    U64(u64),
    F32(f32),
    Address(Place),
    TensorMap {
        #[serde(flatten)]
        place: Place,
        #[serde(flatten)]
        map: Map,
    },
}

/// Where an address leads.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Place {
    /// To a tensor, by its index.
    Tensor(usize),
    /// Behind the beginning of the workspace, in bytes.
    Workspace(u64),
}

/// The arguments of `cuTensorMapEncodeTiled`, by their names.
struct Map(Box<[(&'static str, Vec<u64>); 9]>);

impl Serialize for Map {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, numbers)| (name, numbers)))
    }
}

type Files = Vec<(String, Vec<u8>)>;

/// Writes the folder. Always true, since a test vector that is wrong is an error.
pub(crate) fn run(options: &Options) -> Result<bool, Box<dyn Error>> {
    let program = options.kernel.program()?;
    let mut files = Files::new();
    let ptxas = Ptxas::find();
    if let Err(why) = &ptxas {
        console::print_note(&format_args!("there is no machine code: {why}"));
    }
    let mut launches = Vec::new();
    let workspace = WorkspaceLayout::of(&program)?;
    for step in &program.steps {
        let ptx = ptx::emit(&step.kernel, false)?;
        let name = file_name(&ptx, &mut files);
        if let Ok(ptxas) = &ptxas
            && !files.iter().any(|(file, _)| *file == format!("{name}.cubin"))
        {
            files.push((format!("{name}.cubin"), ptxas.assemble(&ptx)?.cubin));
        }
        let of_kernel =
            files.iter().map(|(file, _)| file).filter(|file| file.split('.').next() == Some(&name));
        launches.push(launch(&program, &workspace, step, &ptx, of_kernel.cloned().collect()));
    }
    let [before, after] = if options.no_test { Default::default() } else { options.test(&program)? };
    let mut tensors = Vec::new();
    for (index, buffer) in
        program.buffers.iter().enumerate().filter(|(_, buffer)| !buffer.role.is_workspace())
    {
        let mut file = |contents: &[Vec<u8>], extension| {
            let bytes = contents.get(index).filter(|bytes| !bytes.is_empty())?;
            let name = format!("{}.{extension}", buffer.name);
            files.push((name.clone(), bytes.clone()));
            Some(name)
        };
        let written: &[Vec<u8>] = if buffer.role.is_written() { &after } else { &[] };
        tensors.push(Tensor {
            name: buffer.name,
            elem: buffer.elem.to_string(),
            shape: buffer.shape.clone(),
            bytes: buffer.bytes(),
            align: buffer.align,
            is_written: buffer.role.is_written(),
            is_optional: buffer.role.is_optional(),
            before: file(&before, "before"),
            after: file(written, "after"),
        });
    }
    let (bytes, counter_bytes) = (workspace.bytes(), workspace.counter_bytes());
    let workspace = Workspace { bytes, counter_bytes };
    let (fa3, kernel) = (env!("CARGO_PKG_VERSION"), options.kernel.to_string());
    let export = Export { fa3, kernel, tensors, workspace, launches };
    files.push(("program.json".to_owned(), write::json(&export)));
    files.push(("launch.c".to_owned(), export.c().into_bytes()));
    write::write_into(&options.output, files)?;
    Ok(true)
}

/// The name of a kernel's files. Two kernels of one name have different files, launches of one kernel share them.
fn file_name(ptx: &Ptx, files: &mut Files) -> String {
    let names =
        (1..).map(|count| if count == 1 { ptx.entry.clone() } else { format!("{}_{count}", ptx.entry) });
    for name in names {
        let file = format!("{name}.ptx");
        match files.iter().find(|(other, _)| *other == file) {
            Some((_, text)) if text == ptx.text.as_bytes() => return name,
            Some(_) => {}
            None => {
                files.push((file, ptx.text.clone().into_bytes()));
                return name;
            }
        }
    }
    unreachable!("there are more names than kernels")
}

fn launch(
    program: &Program<Kernel>,
    workspace: &WorkspaceLayout,
    step: &Step<Kernel>,
    ptx: &Ptx,
    files: Vec<String>,
) -> Launch {
    let place = |buffer: BufferId| match workspace.offset(buffer) {
        Some(offset) => Place::Workspace(offset),
        None => {
            let before = program.buffers[..buffer.0].iter();
            Place::Tensor(before.filter(|buffer| !buffer.role.is_workspace()).count())
        }
    };
    let argument = |param: &ParamInfo| {
        let passed = step.args.iter().find(|(name, _)| *name == param.name);
        let value = match (&passed.expect("programs pass every parameter").1, param.kind) {
            (Passed::U32(value), _) => Value::U32(*value),
            (Passed::U64(value), _) => Value::U64(*value),
            (Passed::F32(value), _) => Value::F32(*value),
            (Passed::Pointer(buffer), _) => Value::Address(place(*buffer)),
            (Passed::Tensor { buffer, dims, strides }, ParamKind::TensorMap(shape)) => {
                let view = TensorView { address: 0, dims: dims.clone(), strides: strides.clone() };
                let map = Map(Box::new(TiledMap::new(&shape, &view).arguments()));
                Value::TensorMap { place: place(*buffer), map }
            }
            (Passed::Tensor { .. }, _) => unreachable!("programs pass tensors for tensor maps"),
        };
        Argument { name: param.name.clone(), value }
    };
    Launch {
        kernel: ptx.entry.clone(),
        files,
        grid: step.grid,
        block: [ptx.threads, 1, 1],
        cluster: [ptx.cluster, 1, 1],
        shared_memory: ptx.smem_bytes,
        programmatic_stream_serialization: ptx.waits_for_grid,
        arguments: ptx.params.iter().map(argument).collect(),
    }
}

impl Options {
    /// The contents of all buffers before and after the launches, by the simulator.
    fn test(&self, program: &Program<Kernel>) -> Result<[Vec<Vec<u8>>; 2], Box<dyn Error>> {
        let reference: Reference = self.kernel.reference()?;
        let seconds = reference.flops() / FLOP_PER_SECOND;
        if seconds > TOO_LONG {
            return Err(NoTest::Long { minutes: (seconds / 60.0).ceil() }.into());
        }
        threads::start()?;
        let seed = 1;
        let mut before = buffers::initial(program, seed)?;
        reference.place(program, &mut before, seed)?;
        reference.prepare(program, &mut before);
        let simulation =
            ProgramSimulation::of(program.map(Loaded::new)).policy(Policy::Eager).mode(Mode::Exact);
        let outcome = simulation.run(&before)?;
        if !outcome.is_clean() {
            return Err(NoTest::Fault { kernel: self.kernel.to_string() }.into());
        }
        reference.judge(program, &before, &outcome.buffers)?;
        Ok([before, outcome.buffers])
    }
}

impl Export {
    /// The launcher in C.
    fn c(&self) -> String {
        let mut tables = String::new();
        let (name, Workspace { bytes, counter_bytes }) = (&self.kernel, &self.workspace);
        let _ =
            write!(tables, "/* fa3 {}: {name} */\nenum {{ COUNTER_BYTES = {counter_bytes} }};\n", self.fa3);
        let _ = writeln!(tables, "static const size_t WORKSPACE_BYTES = {bytes};\n");
        tables += "static const struct tensor tensors[] = {\n";
        for Tensor { name, elem, bytes, before, after, .. } in &self.tensors {
            let [before, after] = [before, after]
                .map(|file| file.as_ref().map_or("NULL".to_owned(), |file| format!("\"{file}\"")));
            let _ =
                writeln!(tables, "    {{\"{name}\", {}, {bytes}, {before}, {after}}},", elem.to_uppercase());
        }
        tables += "};\n\n";
        for (index, launch) in self.launches.iter().enumerate() {
            let _ = writeln!(tables, "static const struct argument arguments_{index}[] = {{");
            for Argument { name, value } in &launch.arguments {
                let _ = writeln!(tables, "    {{{}}}, /* {name} */", value.c());
            }
            tables += "};\n\n";
        }
        tables += "static const struct step steps[] = {\n";
        for (index, launch) in self.launches.iter().enumerate() {
            let file = launch.files[0].trim_end_matches(".ptx");
            let Launch { kernel, grid: [x, y, z], block, cluster, shared_memory, arguments, .. } = launch;
            let early = i32::from(launch.programmatic_stream_serialization);
            let (block, cluster, count) = (block[0], cluster[0], arguments.len());
            let numbers = format!("{{{x}, {y}, {z}}}, {block}, {cluster}, {shared_memory}, {early}, {count}");
            let _ = writeln!(tables, "    {{\"{file}\", \"{kernel}\", {numbers}, arguments_{index}}},");
        }
        tables += "};\n";
        include_str!("export/launch.c").replace("/*TABLES*/\n", &tables)
    }
}

impl Value {
    /// The fields of an argument in C.
    fn c(&self) -> String {
        let place = |place: &Place| match *place {
            Place::Tensor(index) => (0, index.to_string()),
            Place::Workspace(offset) => (offset, "-1".to_owned()),
        };
        match self {
            Value::U32(value) => format!("BITS32, {value}, 0, {{0}}"),
            Value::F32(value) => format!("BITS32, {:#x}, 0, {{0}}", value.to_bits()),
            Value::U64(value) => format!("BITS64, {value}u, 0, {{0}}"),
            Value::Address(at) => {
                let (offset, tensor) = place(at);
                format!("ADDRESS, {offset}, {tensor}, {{0}}")
            }
            Value::TensorMap { place: at, map: Map(arguments) } => {
                let (offset, tensor) = place(at);
                let list = |numbers: &[u64]| {
                    let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
                    if numbers.is_empty() { "0".to_owned() } else { numbers.join(", ") }
                };
                let [elem, dims, strides, boxes, steps, interleave, swizzle, promotion, fill] =
                    arguments.each_ref().map(|(_, numbers)| list(numbers));
                let (rank, arrays) =
                    (arguments[1].1.len(), format!("{{{dims}}}, {{{strides}}}, {{{boxes}}}, {{{steps}}}"));
                let map = format!("{elem}, {rank}, {arrays}, {interleave}, {swizzle}, {promotion}, {fill}");
                format!("MAP, {offset}, {tensor}, {{{map}}}")
            }
        }
    }
}
